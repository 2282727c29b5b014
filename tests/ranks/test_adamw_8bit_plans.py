"""AdamW with 8-bit states: under every plan the blocks, and so the numbers, of one process."""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import ConfigError
from plait.optim import stepper
from plait.optim.adamw_8bit import stored_bytes
from plait.plan import MemoryUse, Plan
from support import block_codes, edge_case_models, hf_models, programs
from support.pool import Pool

WIDE = functools.partial(programs.llama, hidden=512, ffn=512, layers=2)  # rows of whole blocks for 2 columns
MIXTRAL = functools.partial(hf_models.model_of, "mixtral")
TASK = programs.Task(programs.llama, optimizer="AdamW8bit")
TASKS = {
    "llama": TASK,
    "uneven": replace(TASK, build=edge_case_models.uneven, groups=edge_case_models.interleaved_groups),
    "wide": replace(TASK, build=WIDE, steps=2),
    "mixtral": replace(TASK, build=MIXTRAL, own_loss=True),
}
RANGES = ["dp=2 zero=0", "dp=3 zero=1", "dp=4 shard=2 zero=2", "dp=2 zero=3 micro=3", "pp=2 micro=2"]
CASES = [
    *(("uneven", plan) for plan in ("micro=2", "dp=3 zero=1", "dp=2 zero=2", "dp=4 zero=3")),
    *(("llama", plan) for plan in RANGES),
    ("llama", "dp=2 zero=3 offload=cpu"),
    ("llama", "dp=2 zero=2 offload=disk"),
    ("wide", "tp=2"),
    ("wide", "pp=2 tp=2 dp=2 zero=1 micro=2"),
    ("mixtral", "dp=2 ep=2 zero=1"),
]
MUTATIONS: dict[str, Any] = {
    "": nullcontext,
    "blocks begin at the shard": lambda: mock.patch.object(
        stepper, "quantize", lambda values, stored, _, name: _quantize(values, stored, 0, name)
    ),
}
_quantize = stepper.quantize


def _trained(task: programs.Task, plan: str) -> programs.Trace:
    return programs.train_task(task, f"{plan} precision=fp64")


def _units(task: programs.Task) -> Any:
    return programs.engine_of(task, "precision=fp64").layout.units


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    """A task's training in plain torch, with states rounded along the units' storages."""

    @functools.cache
    def run(name: str) -> programs.Trace:
        task = TASKS[name]
        first = pool.run(_trained, 1, replace(task, steps=0), "micro=1")[0].first_weights
        units = pool.run(_units, 1, task)[0]
        of = functools.partial(block_codes.PlainAdamW8bit, units, arguments=task.arguments)
        return programs.one_process_task(task, first, 1, stepper_of=of)

    return run


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_plan_trains_as_plain_torch_with_the_same_blocks(
    pool: Pool, reference: Any, name: str, plan: str, tmp_path: Path
) -> None:
    task = replace(TASKS[name], offload_dir=str(tmp_path) if "disk" in plan else None)
    ours, *others = pool.run(_trained, Plan.parse(plan).num_ranks, task, plan)
    programs.assert_same(ours, reference(name))
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
