"""The covering set leaves out no pair, and the plans of ZeRO that are tested hold what they claim."""

from hypothesis import given
from hypothesis import strategies as st

import programs
import zero_plans
from covering import combined, covering
from plait.plan import Plan

products = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def cases_of(sizes: list[int]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for factor, size in enumerate(sizes):
        found = [{**case, f"factor {factor}": str(option)} for case in found for option in range(size)]
    return found


@given(products, st.integers(0, 99))
def test_every_pair_that_occurs_is_chosen(sizes: list[int], seed: int) -> None:
    cases = cases_of(sizes)[seed % 3 :]  # some pairs may occur in no case
    chosen = covering(cases, seed=seed)
    assert all(case in cases for case in chosen)
    pairs = [pair for case in cases for pair in combined(case, 2)]
    assert set(pairs) == {pair for case in chosen for pair in combined(case, 2)}


@given(products, st.integers(0, 99))
def test_no_chosen_case_is_superfluous_when_it_is_chosen(sizes: list[int], seed: int) -> None:
    seen: set[object] = set()
    for case in covering(cases_of(sizes), seed=seed):
        assert combined(case, 2) - seen
        seen |= combined(case, 2)


def test_a_covering_is_far_smaller_than_the_product_and_the_same_for_the_same_seed() -> None:
    cases = cases_of([4, 4, 4, 4])
    assert 16 <= len(covering(cases, seed=1)) <= 32 < len(cases)
    assert covering(cases, seed=1) == covering(cases, seed=1)
    assert covering(cases, seed=1) != covering(cases, seed=2)
    assert len(covering(cases, seed=1, least=40)) == 40


def test_the_plans_of_zero_differ_can_be_and_meet_in_pairs() -> None:
    cases, few = zero_plans.all_cases(), zero_plans.few_cases()
    names = {zero_plans.name_of(case) for case in cases}
    assert len(names) == len(cases)
    alone, shards, transports, builds = 4 + 4 + 8 + 32, 2 + 1 + 2, 2, 3  # one rank; of dp 2, 3 and 4
    assert len(cases) == builds * (alone + transports * (3 * 4 + shards * (4 + 8 + 32)))
    assert zero_plans.NUM_COVERING <= len(few) <= 1.2 * zero_plans.NUM_COVERING
    assert all(programs.SEQUENCES % zero_plans.micros_of(case) == 0 for case in cases)
    pairs = {pair for case in few for pair in combined(case, 2)}
    assert pairs == {pair for case in cases for pair in combined(case, 2)}
    plan = Plan.parse(
        zero_plans.plan_of({"dp": "4", "zero": "3", "shard": "half", "micro": "many", "build": "llama"})
    )
    assert plan == Plan(dp=4, zero=3, shard=2, micro=3, precision="fp64")
