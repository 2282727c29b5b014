"""Costs of a step on CUDA ranks: waits of the host, memory that streams keep, calls of the optimizer, exposed
communication."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.comm import connect
from plait.engine import inputs
from support import programs
from support.cuda_checks import Case, check
from support.pool import Pool
from support.virtual_cuda.log import Kind
from support.virtual_cuda.recording import Recording, recorded

# A step blocks the host once, to read its loss and norm. With offload it also waits for the gradients, and,
# where parameters are rounded on the host, for the buffer of the unit before the last one.
CASES = [
    Case(2, "dp=2 zero=1 micro=2 precision=bf16", syncs=1),
    Case(2, "dp=2 zero=3 micro=2 optim_dtype=bf16 precision=bf16", syncs=1),
    Case(4, "dp=4 shard=2 zero=3 precision=bf16", syncs=1),
    Case(1, "dp=1 zero=3 offload=cpu precision=bf16", syncs=2),
    Case(2, "dp=2 zero=3 micro=2 offload=cpu precision=bf16", syncs=2),
    Case(4, "dp=4 shard=2 zero=3 offload=cpu precision=bf16", syncs=3),
    Case(2, "dp=2 zero=2 micro=2 offload=cpu accumulate=sharded precision=bf16", syncs=6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_waits_once_and_no_stream_keeps_memory(pool: Pool, case: Case) -> None:
    check(pool, case)


def _engine(plan: str) -> plait.Engine:
    arguments = {"optimizer_args": programs.ADAMW, "loss": programs.summed_loss}
    return plait.parallelize(programs.rough_llama(), plan, world=connect(device="cuda"), **arguments)


def _optimizer_calls(plan: str) -> int:
    engine = _engine(plan)
    calls: list[None] = []
    engine._parts.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(None))
    engine.step(programs.share_of(programs.batches(1)[0], engine))
    return len(calls)


@pytest.mark.parametrize(("zero", "calls"), [(0, 1), (1, 3), (3, 1)])
def test_the_optimizer_runs_once_or_as_often_as_overlaps_with_gathers(
    pool: Pool, zero: int, calls: int
) -> None:
    assert pool.run(_optimizer_calls, 2, f"dp=2 zero={zero} precision=bf16") == [calls, calls]


def _reductions(plan: str) -> list[str]:
    """The reductions of gradients in a step, in order."""
    engine = _engine(plan)
    batches = [programs.share_of(batch, engine) for batch in programs.batches(2)]
    engine.step(batches[0])
    with recorded(keep_log=True) as recording:
        engine.step(batches[1])
    return [] if recording is None else _large_reductions(recording)


def _large_reductions(recording: Recording) -> list[str]:
    operations = [entry for entry in recording.log if entry.kind == Kind.OP and entry.spans]
    names = [entry.name for entry in operations if entry.spans[0][1] - entry.spans[0][0] > 200]
    return [name for name in names if name in ("nccl:reduce_scatter", "nccl:all_reduce")]


@pytest.mark.parametrize("plan", ["dp=4 shard=2 zero=3 precision=fp32", "dp=4 shard=2 zero=1 precision=fp32"])
def test_replicas_are_summed_while_later_units_are_reduced(pool: Pool, plan: str) -> None:
    names = pool.run(_reductions, 4, plan)[0]
    if names:
        last = len(names) - names[::-1].index("nccl:reduce_scatter")
        assert "nccl:all_reduce" in names[:last]


def _loss(device: str, position_ids: list[list[int]] | None) -> float:
    world = connect(device=device)
    engine = plait.parallelize(programs.rough_llama(), "precision=fp32", world=world)
    batch = {"input_ids": torch.arange(8).unsqueeze(0), "labels": torch.arange(8).unsqueeze(0)}
    if position_ids is not None:
        batch["position_ids"] = torch.tensor(position_ids)
    loss = engine.evaluate(batch).loss_sum
    world.close()
    return loss


def _losses(position_ids: Any) -> list[float]:
    return [_loss(device, ids) for device in ("cpu", "cuda") for ids in (position_ids, None)]


def test_sequences_that_are_packed_into_a_row_stay_separate(pool: Pool) -> None:
    [(packed, one_row, packed_on_cuda, one_row_on_cuda)] = pool.run(_losses, 1, [[0, 1, 2, 3, 0, 1, 2, 3]])
    assert packed_on_cuda == pytest.approx(packed, rel=1e-5)
    assert one_row_on_cuda == pytest.approx(one_row, rel=1e-5)
    assert packed != pytest.approx(one_row, rel=1e-5)


def _syncs_with(entries: dict[str, Tensor], plan: str, device: str) -> Recording | None:
    """Two steps with these entries besides token ids, on `device`; the second one is recorded."""
    engine = _engine(plan)
    ids = torch.arange(4 * 8).reshape(4, 8)
    batch = {"input_ids": ids, "labels": ids, **entries}
    return _second_step(engine, {key: value.to(device) for key, value in batch.items()})


def _second_step(engine: plait.Engine, batch: dict[str, Tensor]) -> Recording | None:
    engine.step(batch)
    with recorded() as recording:
        engine.step(batch)
    return recording


_PADDED = torch.arange(8) < torch.tensor([[8], [5], [8], [3]])
_PACKED = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]).expand(4, 8)


@pytest.mark.parametrize("plan", ["dp=1 micro=2 precision=bf16", "pp=2 micro=4 precision=bf16"])
@pytest.mark.parametrize(
    "entries",
    [
        {"attention_mask": _PADDED.long()},
        {"attention_mask": torch.ones_like(_PADDED).long()},
        {"position_ids": _PACKED},
        {"position_ids": torch.arange(8).expand(4, 8)},
    ],
    ids=["padded", "full", "packed", "in order"],
)
def test_masks_and_positions_of_a_batch_cost_no_wait(
    pool: Pool, entries: dict[str, Tensor], plan: str
) -> None:
    ranks = 2 if "pp" in plan else 1
    for recording in pool.run(_syncs_with, ranks, entries, plan, "cpu"):
        assert recording is None or recording.findings.syncs.total() <= 1, recording.findings.syncs
        assert recording is None or not recording.findings.races, recording.findings.races


def test_a_mask_on_the_gpu_is_read_once_per_step(pool: Pool) -> None:
    entries = {"attention_mask": _PADDED.long()}
    [recording] = pool.run(_syncs_with, 1, entries, "dp=1 micro=4 precision=bf16", "cuda")
    assert recording is None or recording.findings.syncs.total() <= 2, recording.findings.syncs


def _cost_of_eager_attention() -> tuple[Recording | None, int]:
    """A step of rows padded on the left, and the number of searches for eager attention in two steps."""
    model: Any = programs.rough_llama()
    model.set_attn_implementation("eager")
    engine = plait.parallelize(model, "cp=2 micro=2 precision=bf16", world=connect(device="cuda"))
    ids = torch.arange(4 * 8).reshape(4, 8)
    mask = (torch.arange(8) >= 3).long().expand(4, 8)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(torch.arange(8) < 4, -100)}
    with mock.patch.object(inputs, "is_eager", wraps=inputs.is_eager) as searches:
        return _second_step(engine, batch), searches.call_count


def test_eager_attention_is_searched_for_once_and_its_targets_cost_no_wait(pool: Pool) -> None:
    for recording, num_searches in pool.run(_cost_of_eager_attention, 2):
        assert recording is None or recording.findings.syncs.total() <= 1, recording.findings.syncs
        assert num_searches == 1


def _padded_loss(device: str, mask: Tensor | None) -> float:
    world = connect(device=device)
    engine = plait.parallelize(programs.rough_llama(), "precision=fp32", world=world)
    ids = torch.arange(4 * 8).reshape(4, 8)
    batch = {"input_ids": ids, "labels": ids} | ({} if mask is None else {"attention_mask": mask})
    loss = engine.step(batch).loss
    world.close()
    return loss


def _padded_losses(mask: Tensor) -> list[float]:
    full = torch.ones_like(mask)
    return [_padded_loss(device, each) for device in ("cpu", "cuda") for each in (mask, full, None)]


def test_masks_that_are_decided_on_the_cpu_have_the_same_effect(pool: Pool) -> None:
    [losses] = pool.run(_padded_losses, 1, _PADDED.flip(1).long())  # padding in front changes later tokens
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
