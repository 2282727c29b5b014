"""The covering set leaves out no pair, and the plans of ZeRO that are tested hold what they claim."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from plait.plan import Plan
from support import hybrid_plans, programs, zero_plans
from support.covering import Case, combined, covering

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
    assert len(few) < 30
    assert all(programs.SEQUENCES % zero_plans.micros_of(case) == 0 for case in cases)
    pairs = {pair for case in few for pair in combined(case, 2)}
    assert pairs == {pair for case in cases for pair in combined(case, 2)}
    plan = Plan.parse(
        zero_plans.plan_of({"dp": "4", "zero": "3", "shard": "half", "micro": "many", "build": "llama"})
    )
    assert plan == Plan(dp=4, zero=3, shard=2, micro=3, precision="fp64")


@given(products, st.integers(0, 99))
def test_pairs_that_are_shown_elsewhere_are_not_chosen_for_again(sizes: list[int], seed: int) -> None:
    cases = cases_of(sizes)
    elsewhere = covering(cases[::2], seed=seed)
    known = frozenset().union(*(combined(case, 2) for case in elsewhere))
    chosen = covering(cases, seed=seed, known=known)
    assert len(chosen) <= len(covering(cases, seed=seed))
    pairs = {pair for case in cases for pair in combined(case, 2)}
    assert pairs == known | {pair for case in chosen for pair in combined(case, 2)}


def test_the_plans_that_mix_all_strands_leave_out_no_pair_that_can_be() -> None:
    few = hybrid_plans.few_cases()
    assert len({hybrid_plans.name_of(case) for case in few}) == len(few)
    assert all(2 <= hybrid_plans.num_ranks(case) <= 8 for case in few)
    strands = [case for case in few if "1" not in (case["pp"], case["dp"], case["tp"])]
    assert len(strands) >= 24, "all three strands"
    for factor, found in hybrid_plans.FACTORS.items():
        possible = {"pp": {"2"}, "dp": {"2"}, "tp": {"2", "2x1"}, "shard": {"all", "one"}}
        met = {case[factor] for case in strands if factor in case}
        assert met == possible.get(factor, {*found}), factor
    chosen = {pair for case in few for pair in combined(case, 2)}
    options = [(factor, option) for factor, found in hybrid_plans.FACTORS.items() for option in found]
    for pair in combinations(options, 2):
        if len(dict(pair)) == 2:
            assert (frozenset(pair) in chosen) == _can_meet(dict(pair)), pair


def _can_meet(pair: Case) -> bool:
    """Return whether some plan of at most eight ranks has both options."""
    needs = {"half": {"dp": "4"}}.get(pair.get("shard", ""), {})
    if pair.get("dp", "4") != needs.get("dp", pair.get("dp", "4")):
        return False
    shape = {"pp": "1", "dp": "1", "tp": "1", **needs, **pair}
    zero, one_column = int(pair.get("zero", 3)), pair.get("tp") in ("1", "2x1")
    fixed = {"zb-h1": "1", "zbv": "2", "dualpipev": "2"}.get(pair.get("schedule", ""))
    return (
        hybrid_plans.num_ranks(shape) <= 8
        and not ("sp" in pair and one_column)
        and not (pair.get("dp") == "1" and pair.keys() & {"shard", "algorithm"})
        and not (zero == 0 and "shard" in pair)
        and not (zero < 2 and "accumulate" in pair)
        and not (zero < 3 and pair.keys() & {"prefetch", "reshard"})
        and not (fixed and pair.get("chunks", fixed) != fixed)
    )
