"""Context parallelism: the one-process program's numbers, for every method and mask."""

from dataclasses import replace

import pytest

from support import pipeline_plans, programs
from support.pool import Pool


@pytest.mark.parametrize("words", ["cp=2", "cp=2 cp_method=ulysses", "cp=4", "cp=2 dp=2 zero=3", "cp=2 pp=2 micro=2","cp=2 tp=2 sp=true", "cp=3 zero=1"])
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, words: str) -> None:
    task = replace(pipeline_plans.task("llama", 3, 4), own_loss=True)
    plan = f"{words} precision=fp64"
    ranks = programs.plait.Plan.parse(plan).num_ranks
    ours, *others = pool.run(programs.train_task, ranks, task, plan)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))
