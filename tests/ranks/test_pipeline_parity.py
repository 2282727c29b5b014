"""A model in stages computes what it does in one process: loss, norm, every gradient, weights."""

import functools
from pathlib import Path

import pytest

from support import hybrid_plans, pipeline_faults, pipeline_plans, programs
from support.covering import Case
from support.pool import Pool


def check_parity(pool: Pool, case: Case, folder: Path) -> None:
    task = pipeline_plans.task_of(case)
    ours, *others = pool.run(programs.train_task, int(case["pp"]), task, pipeline_plans.plan_of(case, folder))
    oracle = oracle_of(case["model"], *map(int, (case["pp"], case["chunks"], case["micro"])))
    assert programs.largest_difference(ours.first_weights, oracle.first_weights)[0] == 0
    programs.assert_same(ours, oracle)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
        assert not other.weights, "whole tensors are rank 0's"
    assert all(norm > 2 * programs.CLIP for norm in oracle.norms), "clipping was not active"


@functools.cache
def oracle_of(model: str, pp: int, chunks: int, micro: int) -> programs.Trace:
    """From the first weights of one rank: they follow from names and the seed."""
    case = {"model": model, "pp": str(pp), "chunks": str(chunks), "micro": str(micro)}
    task = pipeline_plans.task_of(case)
    first = programs.engine_of(task, f"micro={micro} precision=fp64").full_parameters()
    return programs.one_process_task(task, first, 1)


FEW = pipeline_plans.few_cases(hybrid_plans.pairs_in(pipeline_plans.FACTORS))
EVERY = pipeline_plans.all_cases()
FIRST = {case["schedule"]: case for case in reversed(EVERY)}.values()  # one of every schedule


@pytest.mark.parametrize("case", FEW, ids=pipeline_plans.name_of)
def test_a_models_stages_train_as_the_one_process_program_does(
    pool: Pool, case: Case, tmp_path: Path
) -> None:
    check_parity(pool, case, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.quick if case in FIRST else ()) for case in EVERY],
    ids=pipeline_plans.name_of,
)
def test_under_every_schedule_stages_train_as_the_one_process_program_does(
    pool: Pool, case: Case, tmp_path: Path
) -> None:
    check_parity(pool, case, tmp_path)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zbv"])
def test_over_gloo_stages_train_as_the_one_process_program_does(
    pool: Pool, schedule: str, tmp_path: Path
) -> None:
    """Three ranks: the one between has more groups than the others, and they are not numbered alike."""
    check_parity(pool.over("gloo"), {**_case(schedule, "tied_llama"), "pp": "3"}, tmp_path)


# --- without communication


def _case(schedule: str, model: str) -> Case:
    chunks = "1" if schedule in ("1f1b", "zb-h1") else "2"
    options = {"schedule": schedule, "pp": "2", "micro": "4", "chunks": chunks}
    return {**options, "recompute": "none", "model": model}


def _train_deaf(task: programs.Task, plan: str, what: str) -> programs.Trace:
    with pipeline_faults.muted(what):
        return programs.train_task(task, plan)


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        ("activations", "gradient of"),
        ("gradients", "gradient of"),
        ("shared", "gradient of"),
        ("norm", "gradient of|loss or norm"),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_without_communication_between_stages_the_numbers_differ(
    pool: Pool, schedule: str, what: str, differs: str, tmp_path: Path
) -> None:
    """Under zbv the first stage and the last are on one rank, and share without a message."""
    case = _case(schedule, "tied_llama")
    task, plan = pipeline_plans.task_of(case), pipeline_plans.plan_of(case, tmp_path)
    ours = pool.run(_train_deaf, 2, task, plan, what)[0]
    oracle = oracle_of("tied_llama", 2, int(case["chunks"]), 4)
    if (schedule, what) == ("zbv", "shared"):
        programs.assert_same(ours, oracle)
        return
    with pytest.raises(AssertionError, match=differs):
        programs.assert_same(ours, oracle)
