"""State-space and recurrent mixers, sharded by channels or heads, compute what one process computes."""

import pytest

from plait.plan import Plan
from support import hf_models, mixer_configs, programs
from support.pool import Pool

STEPS = 2
WITH_EXPERTS = {"lfm2_moe", "jamba", "granitemoehybrid", "nemotron_h", "qwen3_next", "kimi_linear"}
LINEAR_BETWEEN_BLOCKS = {"zamba", "zamba2"}


def check_parity(pool: Pool, family: str, plan: str) -> None:
    task = programs.Task(hf_models.builder(family), steps=STEPS)
    ours = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, f"{plan} precision=fp64")[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", mixer_configs.CONFIGS)
def test_columns_train_as_one_process(pool: Pool, family: str, tp: int) -> None:
    check_parity(pool, family, f"tp={tp}")


@pytest.mark.parametrize("family", sorted({*mixer_configs.CONFIGS} - WITH_EXPERTS - LINEAR_BETWEEN_BLOCKS))
def test_columns_of_sharded_tokens_train_as_one_process(pool: Pool, family: str) -> None:
    check_parity(pool, family, "tp=3 sp=true")
