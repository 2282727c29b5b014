"""Bytes of offloaded plans on CUDA ranks, estimated and measured: staging buffers and blocks of files too."""

from pathlib import Path
from typing import Any

import pytest

import plait
from plait.comm import connect
from plait.plan import MemoryUse
from support import programs
from support.pool import Pool

CATEGORIES = ("parameters", "gradients", "master", "optimizer", "buffers", "loss", "host", "disk")


def _memory(plan: str, options: dict[str, Any]) -> tuple[MemoryUse, MemoryUse]:
    world = connect(device="cuda")
    engine = plait.parallelize(
        programs.wide_llama(), plan, optimizer_args=programs.ADAMW, seed=3, world=world, **options
    )
    shape = (programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH)
    estimated = engine.estimated_memory(shape)
    for batch in programs.batches(3):
        own = programs.share_of(batch, engine)
        engine.step({**own, "labels": own["input_ids"]})  # an estimate is for a target at each position
    measured = engine.memory()
    world.close()
    return estimated, measured


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1 zero=3 offload=cpu precision=bf16",
        "dp=2 zero=1 offload=cpu precision=bf16",
        "dp=2 zero=3 offload=cpu precision=fp32",
        "dp=4 shard=2 zero=3 offload=cpu precision=bf16",
        "dp=4 shard=2 zero=1 offload=cpu precision=bf16",
        "dp=2 zero=3 offload=disk precision=bf16",
        "dp=2 zero=2 offload=disk optim_dtype=bf16 precision=bf16",
    ],
)
def test_every_byte_of_an_offloaded_plan_is_estimated(pool: Pool, plan: str, tmp_path: Path) -> None:
    options = {"offload_dir": tmp_path} if "disk" in plan else {}
    ranks = pool.run(_memory, int(plan[3]), plan, options)
    for category in CATEGORIES:
        estimated = max(getattr(predicted, category) for predicted, _ in ranks)
        held = max(getattr(measured, category) for _, measured in ranks)
        rounding = 32768 if category == "disk" else 4096  # pages of each unit's files; padding, counters
        assert held == pytest.approx(estimated, rel=0, abs=rounding), category
