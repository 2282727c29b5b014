"""Groups without connections of their own, as on NCCL, communicate and train like groups that have them.

Here over Gloo, in place of NCCL: `World.shares_communicators` is true only on CUDA devices otherwise.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from plait.comm import World, all_reduce, barrier, connect, receive, send
from plait.plan import Plan
from support import pipeline_plans, programs
from support.pool import Pool
from support.shm_cases import product, run_case


@contextmanager
def sharing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "shares_communicators", True)
        yield


def _collectives() -> None:
    """All collectives in subgroups of two and three ranks, at the same time; sums of integers are exact."""
    with sharing():
        world = connect(transport="gloo")
        group = world.subgroup((0, 3) if world.rank in (0, 3) else (1, 2, 4))
        cases = [
            case for case in product(group.size) if case.dtype == torch.int32 and case.place == "foreign"
        ]
        random.Random(group.size).shuffle(cases)
        for case in cases[:80]:
            run_case(case, world, group)
        barrier(group)
        all_reduce(mean := torch.tensor([float(world.rank)]), group, "mean")
        assert mean.item() == pytest.approx(sum(group.ranks) / group.size)
        if group.rank == 0:
            send(torch.tensor([7]), group, group.size - 1)
        elif group.rank == group.size - 1:
            receive(found := torch.zeros(1, dtype=torch.int64), group, 0)
            assert found.item() == 7
        all_reduce(mean, world.group)


def test_subgroups_compute_every_collective_through_the_group_of_all_ranks(pool: Pool) -> None:
    pool.run(_collectives, 5)


def _trained(task: Any, plan: str) -> Any:
    with sharing():
        return programs.train_task(task, plan)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tied_llama", "pp=3 dp=2 zero=1 schedule=interleaved chunks=2"),
        ("llama", "pp=2 dp=4 shard=2 zero=3 schedule=zb-h1"),
        ("gpt2", "pp=2 tp=2x2 dp=1 sp=true"),
    ],
)
def test_plans_train_the_same_with_few_communicators(pool: Pool, model: str, words: str) -> None:
    plan = Plan.parse(f"{words} micro=3 precision=fp64")
    task = pipeline_plans.task(model, 7 if "interleaved" in words else 3, 2 * plan.dp * plan.micro)
    ours = pool.over("gloo").run(_trained, plan.num_ranks, task, str(plan))[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))
