"""Evaluation, checkpoints, dropout and DistributedDataParallel on CUDA ranks."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.checkpoint import Saver, newest
from plait.comm import connect
from plait.models import causal_lm_on_meta
from support import cuda_steps, programs, trainings
from support.pool import Pool
from support.virtual_cuda.recording import Recording, recorded

PLAN = "dp=2 zero=3 precision=fp32"


def _assert_ordered(recordings: list[Recording | None]) -> None:
    for recording in recordings:
        if recording is not None:
            assert not recording.findings.races, recording.findings.races
            assert not recording.findings.frees_in_use, recording.findings.frees_in_use


# --- evaluation and checkpoints


def _evaluated(device: str, plan: str) -> tuple[float, Recording | None]:
    world = connect(device=device)
    engine = trainings.engine_of(plan, cuda_steps.small_llama, world=world)
    first, second = (programs.share_of(batch, engine) for batch in programs.batches(2))
    engine.step(first)
    with recorded() as recording:
        result = engine.evaluate(second)
    world.close()
    return result.loss_sum / result.num_tokens, recording


@pytest.mark.parametrize("plan", [PLAN, "pp=2 micro=2 precision=fp32"])
def test_evaluation_is_that_of_the_cpu(pool: Pool, plan: str) -> None:
    on_cpu = pool.run(_evaluated, 2, "cpu", plan)
    on_cuda = pool.run(_evaluated, 2, "cuda", plan)
    assert on_cuda[0][0] == pytest.approx(on_cpu[0][0], rel=1e-5)
    _assert_ordered([recording for _, recording in on_cuda])


def _step_after_load(folder: Path, plan: str) -> tuple[list[float], Recording | None]:
    """Losses and norms of the step after a save, and of the same step after that checkpoint was loaded; the
    save is in the background, so that the step runs during it."""
    world = connect(device="cuda")
    engine = trainings.engine_of(plan, world=world)
    batches = [programs.share_of(batch, engine) for batch in programs.batches(2)]
    engine.step(batches[0])
    saver = Saver(folder, world, background=True)
    with recorded() as recording:
        saver.save(engine.num_steps, engine.state_shards(), {})
        results = [engine.step(batches[1])]
    saver.finish()
    checkpoint = newest(folder)
    assert checkpoint is not None
    engine.load(checkpoint.path)
    results.append(engine.step(batches[1]))
    world.close()
    return [value for result in results for value in (result.loss, result.grad_norm)], recording


@pytest.mark.parametrize("plan", [PLAN, "dp=2 zero=1 offload=cpu precision=bf16"])
def test_training_continues_from_a_checkpoint_saved_in_the_background(
    pool: Pool, plan: str, tmp_path: Path
) -> None:
    outcomes = pool.run(_step_after_load, 2, tmp_path, plan)
    [loss, norm, loss_after_load, norm_after_load], _ = outcomes[0]
    assert [loss_after_load, norm_after_load] == pytest.approx([loss, norm], rel=1e-6)
    _assert_ordered([recording for _, recording in outcomes])


# --- dropout


def _with_dropout() -> Any:
    return causal_lm_on_meta(
        {
            "model_type": "gpt2",
            "vocab_size": programs.VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0.3,
            "embd_pdrop": 0.3,
            "attn_pdrop": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    ).train()


def _with_dropout_losses(plan: str) -> list[float]:
    world = connect(device="cuda")
    engine = trainings.engine_of(plan, _with_dropout, world=world)
    torch.manual_seed(5 + world.rank)
    results = trainings.train(engine, last=3)
    world.close()
    return [value for result in results for value in (result.loss, result.grad_norm)]


def test_recomputed_blocks_drop_what_they_dropped_before(pool: Pool) -> None:
    plan = "dp=2 zero=3 micro=2 precision=fp32"
    kept, recomputed = (
        pool.run(_with_dropout_losses, 2, f"{plan} recompute={choice}")[0] for choice in ("none", "full")
    )
    assert recomputed == pytest.approx(kept, rel=1e-5)


# --- DistributedDataParallel

NUM_LAYERS, WIDTH = 4, 64


def _ddp_steps(arguments: dict[str, Any]) -> Recording | None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{os.environ['PLAIT_RENDEZVOUS_FILE']}-ddp", size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    alone = nn.Sequential(*layers).double()
    ddp = plait.DistributedDataParallel(
        copy.deepcopy(alone).to(device), device_ids=[rank], bucket_cap_mb=0.05, **arguments
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, alone)]
    recordings = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(size, 8, WIDTH, generator=generator, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with recorded() as recording:
            ddp(rows[rank].to(device)).square().mean().backward()
            optimizers[0].step()
        recordings.append(recording)
        alone(rows.flatten(0, 1)).square().mean().backward()
        optimizers[1].step()
    for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-9, atol=1e-12)
    return recordings[-1]


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda it: next(iter(it), "plain"))
def test_ddp_trains_as_one_process(pool: Pool, arguments: dict[str, Any]) -> None:
    recordings = pool.run(_ddp_steps, 2, arguments)
    _assert_ordered(recordings)
