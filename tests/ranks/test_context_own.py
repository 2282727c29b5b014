"""Context parallelism of modules of one's own: `plait.attention`, and a loss that is a sum over tokens."""

from dataclasses import replace
from typing import Any

import pytest

from plait.plan import Plan
from support import own_context, programs
from support.pool import Pool


def check_parity(pool: Pool, words: str, task: programs.Task) -> None:
    plan = f"{words} precision=fp64"
    ours, *others = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, plan)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def task(**options: Any) -> programs.Task:
    build = own_context.builder(**options)
    return programs.Task(build, own_context.shifted, steps=2, loss=own_context.summed_loss)


@pytest.mark.parametrize(
    "words",
    [
        "dp=1",
        "cp=2 zero=1",
        "cp=2 cp_method=ring recompute=full",
        "cp=2 cp_method=ulysses",
        "cp=3 zero=3",
        "cp=3 cp_method=ring recompute=selective",
        "cp=3 cp_method=ulysses recompute=full",
        "cp=4 cp_method=2x2 zero=2",
        "cp=2 pp=2 micro=2 recompute=full schedule=1f1b",
        "cp=2 dp=2 pp=2 micro=1 zero=1 schedule=zb-h1",
    ],
)
def test_a_module_of_ones_own_trains_as_in_one_process(pool: Pool, words: str) -> None:
    check_parity(pool, words, task(kv_heads=6 if "2x2" not in words else 2))
