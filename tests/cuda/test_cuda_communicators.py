"""Communicators on CUDA ranks: few, made by all ranks at once, and messages in one order on them."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import plait
from plait.comm import all_reduce, connect
from plait.plan import communicators
from support import cuda_steps, programs
from support.cuda_checks import Case, check, check_replay
from support.pool import Pool
from support.virtual_cuda.recording import Recording, recorded


def tied_llama() -> nn.Module:
    """Build a Llama of six blocks whose embedding is its head."""
    return programs.llama(exact=False, layers=6, tied=True)


SIX = {"build": tied_llama}
CASES = [
    (
        Case(
            3,
            "pp=3 micro=3 chunks=2 schedule=interleaved precision=fp32",
            syncs=60,
            kept_bytes=10**6,
            options=SIX,
        ),
        4,
    ),
    (Case(4, "pp=4 micro=2 schedule=zb-h1 precision=fp32", syncs=60, kept_bytes=10**6, options=SIX), 3),
    (Case(4, "tp=2x2 precision=fp32", syncs=20, kept_bytes=10**6), 3),
    (Case(8, "pp=2 dp=2 tp=2 sp=true zero=3 micro=2 precision=fp32", syncs=60, kept_bytes=10**6), 6),
]


@pytest.mark.parametrize(("case", "number"), CASES, ids=str)
def test_hybrid_plans_train_with_few_communicators(pool: Pool, case: Case, number: int) -> None:
    for recording in check(pool, case):
        assert len(recording.communicators) == number, recording.communicators


def _train_with(message_ctas: int, plan: str) -> Recording | None:
    with mock.patch.object(communicators, "_MESSAGE_CTAS", message_ctas):
        return cuda_steps.train("cuda", plan, cuda_steps.small_llama, keep_log=True).recording


def test_messages_with_more_thread_blocks_exceed_the_budget(pool: Pool) -> None:
    case = Case(2, "pp=2 micro=2 precision=fp32", syncs=1)
    few, many = (pool.run(_train_with, 2, ctas, case.plan) for ctas in (4, 16))
    if few[0] is not None:
        check_replay(few, case)
        with pytest.raises(AssertionError, match="CTAs of messages"):
            check_replay(many, case)


def _used(folder: Path, device: str, plan: str) -> tuple[list[float], Recording | None]:
    """Numbers that an engine computes and collects other than by steps."""
    world = connect(device=device, timeout_s=40)
    engine = plait.parallelize(tied_llama(), plan, seed=3, world=world)
    batch = {key: rows.to(world.device) for key, rows in programs.batches(1, sequences=3)[0].items()}
    engine.step(batch)
    with recorded() as recording:
        logits: Any = engine.outputs(batch, lambda output: output["logits"])
        evaluated = engine.evaluate(batch)
        state = engine.state()
        engine.save(folder)
    engine.load(engine.save(folder))
    result = engine.step(batch)
    world.close()
    total = sum(float(tensor.double().sum()) for tensor in state.values())
    return [float(logits.double().sum()), evaluated.loss_sum, total, result.loss, result.grad_norm], recording


def test_outputs_states_and_checkpoints_of_three_stages_are_those_of_the_cpu(
    pool: Pool, tmp_path: Path
) -> None:
    plan = "pp=3 micro=3 precision=fp64"
    on_cpu, on_cuda = (pool.run(_used, 3, tmp_path / device, device, plan) for device in ("cpu", "cuda"))
    for (expected, _), (found, recording) in zip(on_cpu, on_cuda, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
        if recording is not None:
            assert not recording.findings.races
            assert len(recording.communicators) == 3, "none is created on the way"


def _pair_and_all() -> tuple[float, float]:
    """Sums over a group that two of three ranks create by themselves, and over all ranks."""
    world = connect(device="cuda", timeout_s=40)
    of_pair, of_all = (torch.tensor([1.0 + world.rank], device=world.device) for _ in range(2))
    if world.rank != 1:
        all_reduce(of_pair, world.new_group((0, 2), "pair"))
    all_reduce(of_all, world.group)
    world.close()
    return of_pair.item(), of_all.item()


def test_two_of_three_ranks_create_a_group_without_the_third(pool: Pool) -> None:
    assert pool.run(_pair_and_all, 3) == [(4.0, 6.0), (2.0, 6.0), (4.0, 6.0)]


def _communicators_after(plans: list[str]) -> int:
    """The number of this rank's communicators after an engine of each plan, all but the last one dropped."""
    world = connect(device="cuda", timeout_s=40)
    for plan in plans:
        engine = plait.parallelize(cuda_steps.small_llama(), plan, seed=3, world=world)
        engine.step({key: rows.to(world.device) for key, rows in programs.batches(1)[0].items()})
    with recorded() as recording:
        pass
    world.close()
    return 0 if recording is None else len(recording.communicators)


def test_engines_share_communicators_of_the_same_ranks_and_channel(pool: Pool) -> None:
    found = pool.run(_communicators_after, 2, ["dp=2 zero=1", "tp=2", "pp=2", "dp=2 zero=1", "tp=2"])
    assert found in ([1 + 2 + 2] * 2, [0, 0])  # of all ranks, which tp=2 uses; of dp=2 and pp=2, once
