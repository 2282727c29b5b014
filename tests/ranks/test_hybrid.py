"""Every strand combined with every other: the one-process program's numbers under every plan."""

import datetime
import functools
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.plan import Plan
from support import hybrid_plans, pipeline_plans, programs
from support.covering import Case
from support.pool import Pool

RESULTS = Path(__file__).resolve().parents[2] / "build" / "hybrid_sweep.jsonl"


def check_parity(pool: Pool, case: Case, folder: Path, steps: int) -> float:
    """The largest difference of a gradient or a weight. The second step has the first one's weights and
    optimizer states; a third one shows little more."""
    task = replace(hybrid_plans.task_of(case, folder), steps=steps)
    plan = hybrid_plans.plan_of(case, folder)
    ranks = hybrid_plans.num_ranks(case)
    ours, *others = pool.over(case["transport"]).run(programs.train_task, ranks, task, plan)
    first = _first_weights(case["model"], hybrid_plans.num_layers(case))
    assert programs.largest_difference(ours.first_weights, first)[0] == 0
    oracle = programs.one_process_task(task, first, 1)
    assert all(norm > 2 * programs.CLIP for norm in oracle.norms), "clipping was not active"
    programs.assert_same(ours, oracle)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
        assert not other.weights, "whole tensors are rank 0's"
    pairs = [(ours.weights, oracle.weights), *zip(ours.gradients, oracle.gradients, strict=True)]
    return max(programs.largest_difference(mine, theirs)[0] for mine, theirs in pairs)


@functools.cache
def _first_weights(model: str, layers: int) -> dict[str, Tensor]:
    """They follow from names and the seed."""
    task = pipeline_plans.task(model, layers, 2)
    return programs.engine_of(task, "precision=fp64").full_parameters()


@pytest.mark.parametrize("case", hybrid_plans.few_cases(), ids=hybrid_plans.name_of)
def test_loss_gradients_and_weights_equal_the_one_process_programs(
    pool: Pool, case: Case, tmp_path: Path
) -> None:
    check_parity(pool, case, tmp_path, steps=2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2", "pp=2 dp=4 tp=2 sp=true zero=3 shard=2 schedule=zb-h1"),
        pytest.param("tied_llama", "pp=2 dp=2 tp=2x2 zero=1 schedule=zbv", marks=pytest.mark.sweep),
    ],
)
def test_sixteen_ranks_train_as_the_one_process_program_does(pool: Pool, model: str, words: str) -> None:
    plan = Plan.parse(f"{words} micro=2 precision=fp64")
    task = pipeline_plans.task(model, 5, 2 * plan.dp * plan.micro)
    ours = pool.run(programs.train_task, plan.num_ranks, task, str(plan), timeout_s=180)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


@pytest.mark.parametrize(
    "verb", [pytest.param("all_reduce", marks=pytest.mark.quick), "start_scattered_sum", "start_all_gather"]
)
def test_each_of_three_strands_needs_its_communication(pool: Pool, verb: str) -> None:
    """Over columns, between data ranks as gradients are summed, and as parameters are gathered."""
    task, plan = pipeline_plans.task("llama", 3, 8), "pp=2 dp=2 tp=2 zero=3 micro=2 precision=fp64"
    ours = pool.over("gloo").run(programs.train_task, 8, task, plan, (verb,))[0]
    with pytest.raises(AssertionError, match=r"differs by|loss or norm"):
        programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


@pytest.fixture(scope="session")
def record() -> Iterator[Callable[[Case, float | None], None]]:
    """Record a sweep for tools/hybrid_table.py: the machine and its load, then a line for each case, with
    None for a case that failed."""
    RESULTS.parent.mkdir(exist_ok=True)
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    today, few = datetime.date.today().isoformat(), len(hybrid_plans.few_cases())
    with RESULTS.open("w") as file:
        print(json.dumps({"date": today, "machine": machine, "few": few}), file=file, flush=True)

        def add(case: Case, difference: float | None) -> None:
            print(json.dumps({"case": {**case}, "difference": difference}), file=file, flush=True)

        yield add


@pytest.mark.sweep
@pytest.mark.parametrize("case", hybrid_plans.many_cases(), ids=hybrid_plans.name_of)
def test_under_many_plans_loss_gradients_and_weights_equal_the_one_process_programs(
    pool: Pool, case: Case, tmp_path: Path, record: Callable[[Case, float | None], None]
) -> None:
    difference = None
    try:
        difference = check_parity(pool, case, tmp_path, steps=programs.STEPS)
    finally:
        record(case, difference)
