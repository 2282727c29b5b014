"""A model in stages computes what it does in one process: loss, norm, every gradient, weights."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import pipeline_plans
import programs
from covering import Case
from plait.parallel import held
from plait.parallel.pipeline import run as executor
from pool import Pool


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
    first = programs.engine_of(task, f"micro={micro} precision=fp64").whole_parameters()
    return programs.one_process_task(task, first, 1)


@pytest.mark.parametrize("case", pipeline_plans.few_cases(), ids=pipeline_plans.name_of)
def test_a_models_stages_train_as_the_one_process_program_does(
    pool: Pool, case: Case, tmp_path: Path
) -> None:
    check_parity(pool, case, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("case", pipeline_plans.all_cases(), ids=pipeline_plans.name_of)
def test_under_every_schedule_stages_train_as_the_one_process_program_does(
    pool: Pool, case: Case, tmp_path: Path
) -> None:
    check_parity(pool, case, tmp_path)
