"""`Engine.generate` continues prompts as transformers does, under every plan."""

import pytest

from support import generation
from support.pool import Pool

PLANS = {  # and the number of ranks
    "dp=2": 2,
    "dp=2 zero=1": 2,
    "dp=2 zero=2 micro=2": 2,
    "dp=2 zero=3": 2,
    "dp=2 zero=3 reshard=step": 2,
    "dp=3 zero=3": 3,
    "tp=2": 2,
    "tp=2 sp=true": 2,
    "tp=2x1": 2,
    "tp=2x2": 4,
    "pp=2": 2,
    "pp=2 dp=2 zero=3 micro=2": 4,
    "pp=2 tp=2 sp=true": 4,
    "cp=2": 2,
}


def check_greedy(pool: Pool, family: str, plan: str, precision: str = "fp64", **more: object) -> None:
    expected = generation.plain_greedy(family, precision, **more)
    assert len({token for ids in expected for token in ids}) > 3, expected
    num_ranks = PLANS.get(plan, 2)
    found = pool.run(
        generation.on_ranks, num_ranks, family, f"{plan} precision={precision}", generation.GREEDY, more
    )
    data_ranks = 1 + max(rank for rank, _ in found)
    for rank, texts in found:
        assert [ids for ids, _, _ in texts] == expected[rank::data_ranks]
        assert all(len(ids) == len(log_probs) for ids, _, log_probs in texts)
        ends = ["length" if len(ids) == generation.TOKENS else "stop" for ids, _, _ in texts]
        assert [finish for _, finish, _ in texts] == ends


@pytest.mark.parametrize("plan", PLANS)
def test_greedy_tokens_are_those_of_transformers_under_every_plan(pool: Pool, plan: str) -> None:
    check_greedy(pool, "llama", plan)
