"""Context parallelism: the one-process program's numbers, for every method, mask and mix."""

import functools
from dataclasses import replace

import pytest

from plait.plan import Plan
from support import hf_models, pipeline_plans, programs
from support.pool import Pool

PLANS = (
    "cp=2 zero=1",
    "cp=2 cp_method=ulysses",
    "cp=4 zero=2",
    "cp=3 zero=1 recompute=full",
    "cp=2 dp=2 zero=3",
    "cp=2 dp=2 zero=1 shard=1",
    "cp=2 pp=2 micro=2 schedule=zb-h1",
    "cp=2 tp=2 sp=true",
    "cp=2 tp=2x2 cp_method=ulysses",
)
FAMILIES = ("gpt2", "gemma2", "mistral", "opt", "gpt_neox", "phi", "mixtral", "deepseek_v3", "one_kv_llama", "qwen3", "gpt_oss")


def check_parity(pool: Pool, task: programs.Task, plan: str) -> None:
    ours, *others = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, plan)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


@pytest.mark.parametrize("words", PLANS)
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, words: str) -> None:
    task = replace(pipeline_plans.task("llama", 3, 4), own_loss=True)
    check_parity(pool, task, f"{words} precision=fp64")


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_as_in_one_process(pool: Pool, family: str, method: str) -> None:
    data = functools.partial(programs.batches, sequences=2, length=21)
    task = programs.Task(hf_models.builder(family), data, steps=2, own_loss=True)
    check_parity(pool, task, f"cp=2 cp_method={method} precision=fp64")
