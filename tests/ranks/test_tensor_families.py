"""Whole models on a grid compute what the one-process program computes: loss, every gradient, weights."""

import pytest

from support import hf_models, hybrid_plans, programs, tensor_plans
from support.covering import Case
from support.pool import Pool


def task_of(case: Case, steps: int = 2) -> programs.Task:
    """The second step has the first one's weights and optimizer states; a third one shows little more."""
    own = case["loss"] == "own"
    return programs.Task(hf_models.builder(case["family"]), steps=steps, own_loss=own)


def check_parity(pool: Pool, case: Case, steps: int = 2) -> None:
    task = task_of(case, steps)
    ranks = tensor_plans.num_ranks(case)
    ours = pool.run(programs.train_task, ranks, task, tensor_plans.plan_of(case))[0]
    oracle = programs.one_process_task(task, ours.first_weights, 1)
    programs.assert_same(ours, oracle)
    assert all(norm > 2 * programs.CLIP for norm in oracle.norms), "clipping was not active"


OF_HYBRID_PLANS = hybrid_plans.pairs_in(tensor_plans.FACTORS, tensor_plans.seen_in)


@pytest.mark.parametrize("case", tensor_plans.few_cases(OF_HYBRID_PLANS), ids=tensor_plans.name_of)
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, case: Case) -> None:
    check_parity(pool, case)


def test_rows_and_columns_that_share_heads_unevenly_sum_the_same_parts(pool: Pool) -> None:
    """Two of three columns share a kv head; under `sp` all of them share the norms, which rows cut."""
    case = {"family": "biased_llama", "tp": "2x3", "sp": "true", "data": "alone", "loss": "own"}
    check_parity(pool, case | {"recompute": "none"})


@pytest.mark.sweep
@pytest.mark.parametrize("case", tensor_plans.many_cases(OF_HYBRID_PLANS), ids=tensor_plans.name_of)
def test_under_many_plans_loss_gradients_and_weights_equal_the_one_process_programs(
    pool: Pool, case: Case
) -> None:
    check_parity(pool, case, steps=3)


@pytest.mark.parametrize("verb", ["all_reduce"])
@pytest.mark.parametrize("tp", ["2", "2x1"])
def test_without_communication_between_layers_the_numbers_are_others(pool: Pool, tp: str, verb: str) -> None:
    case = {"family": "llama", "tp": tp, "sp": "false", "data": "alone", "loss": "own", "recompute": "none"}
    task = task_of(case)
    ours = pool.run(programs.train_task, 2, task, tensor_plans.plan_of(case), (verb,))[0]
    oracle = programs.one_process_task(task, ours.first_weights, 1)
    with pytest.raises(AssertionError, match="differs by"):
        programs.assert_same(ours, oracle)
