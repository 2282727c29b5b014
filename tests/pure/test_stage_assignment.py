"""How blocks are assigned to stages: no other way makes the slowest stage faster."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.plan.stages import StageAssignment, balance_blocks

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def slowest(costs: list[int], numbers: tuple[int, ...], first: float, last: float) -> float:
    stops = list(itertools.accumulate(numbers))
    sums = [sum(costs[stop - number : stop]) for stop, number in zip(stops, numbers, strict=True)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def all_ways(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *inner, num_blocks))) for inner in cuts]


@settings(max_examples=200)
@given(COSTS, st.integers(1, 8), st.integers(0, 20), st.integers(0, 20))
def test_no_other_assignment_makes_the_slowest_stage_faster(
    costs: list[int], num_stages: int, first: int, last: int
) -> None:
    num_stages = min(num_stages, len(costs))
    numbers = balance_blocks(costs, num_stages, first=first, last=last)
    assert len(numbers) == num_stages
    assert sum(numbers) == len(costs)
    assert min(numbers) >= 1
    best = min(slowest(costs, way, first, last) for way in all_ways(len(costs), num_stages))
    assert slowest(costs, numbers, first, last) == best


def test_equal_blocks_are_assigned_evenly_and_the_head_counts_as_some() -> None:
    assert balance_blocks([1.0] * 8, 4) == (2, 2, 2, 2)
    assert sorted(balance_blocks([1.0] * 7, 3)) == [2, 2, 3]
    assert balance_blocks([1.0] * 8, 2, last=4.0) == (6, 2)
    assert balance_blocks([1.0] * 8, 2, first=4.0) == (2, 6)


def test_among_equally_slow_assignments_the_first_stage_is_the_heavier() -> None:
    assert balance_blocks([1.0] * 8, 2, last=1.0) == (5, 3)
    assert balance_blocks([1.0] * 7, 3) == (3, 2, 2)


@settings(max_examples=100)
@given(COSTS, st.integers(1, 4), st.integers(0, 20), st.booleans())
@example(costs=[7, 8, 6, 2, 7, 0], num_ranks=2, last=7, v_shaped=False)
def test_assigning_two_stages_per_rank_together_is_no_slower_than_one_by_one(
    costs: list[int], num_ranks: int, last: int, v_shaped: bool
) -> None:
    num_ranks = min(num_ranks, len(costs) // 2)
    if not num_ranks:
        return
    ranks = [*range(num_ranks), *(reversed(range(num_ranks)) if v_shaped else range(num_ranks))]

    def slowest_rank(numbers: tuple[int, ...]) -> float:
        loads = [0.0] * num_ranks
        start = 0
        for stage, number in enumerate(numbers):
            loads[ranks[stage]] += sum(costs[start : start + number])
            start += number
        loads[ranks[-1]] += last
        return max(loads)

    alone = balance_blocks(costs, 2 * num_ranks, last=last)
    assert slowest_rank(balance_blocks(costs, 2 * num_ranks, last=last, ranks=ranks)) <= slowest_rank(alone)


def test_a_rank_with_two_stages_is_levelled() -> None:
    assert balance_blocks([1.0] * 8, 4, last=1.4, ranks=[0, 1, 0, 1]) in ((2, 2, 3, 1), (3, 2, 2, 1))


def test_a_heavy_block_is_alone_where_it_can_be() -> None:
    assert balance_blocks([1, 1, 9, 1, 1], 3) == (2, 1, 2)


def test_more_stages_than_blocks_are_ours_to_refuse_before() -> None:
    with pytest.raises(AssertionError, match="2 blocks on 3 stages"):
        balance_blocks([1.0, 1.0], 3)
    with pytest.raises(AssertionError, match="2 blocks on 5 stages"):
        balance_blocks([1.0, 1.0], 5, bare_ends=True)


@settings(max_examples=200)
@given(COSTS.map(lambda costs: [1 + cost for cost in costs]), *[st.integers(1, 8)] * 3)
def test_ends_are_bare_where_all_other_assignments_are_slower(
    costs: list[int], num_stages: int, first: int, last: int
) -> None:
    num_stages = min(num_stages, len(costs) + 2)
    numbers = balance_blocks(costs, num_stages, first=first, last=last, bare_ends=True)
    bare = [
        (0,) * start + way + (0,) * stop
        for start, stop in itertools.product((0, 1), (0, 1))
        if 1 <= num_stages - start - stop <= len(costs)
        for way in all_ways(len(costs), num_stages - start - stop)
    ]
    assert numbers in bare
    best = min(slowest(costs, way, first, last) for way in bare)
    assert slowest(costs, numbers, first, last) == best
    if num_stages <= len(costs):
        full = balance_blocks(costs, num_stages, first=first, last=last)
        assert numbers == full or slowest(costs, full, first, last) > best


def test_a_heavy_head_is_alone_and_many_stages_have_one_block_each() -> None:
    assert balance_blocks([1.0] * 4, 4, last=1.5, bare_ends=True) == (2, 1, 1, 0)
    assert balance_blocks([1.0] * 4, 4, last=1.0, bare_ends=True) == (1, 1, 1, 1)  # no faster
    assert balance_blocks([1.0] * 126, 128, last=0.7, bare_ends=True) == (0, *(1,) * 126, 0)
    assert balance_blocks([1.0] * 4, 4, last=2.5, ranks=[0, 1, 1, 0], bare_ends=True) == (1, 1, 2, 0)


def test_a_cut_tells_whose_blocks_and_parameters_are() -> None:
    cut = StageAssignment(((0, 2), (2, 3)), {"a": 0, "b": 1, "tied": 0}, {"tied": (0, 1)})
    assert cut.num_stages == 2
    assert cut.blocks == ((0, 2), (2, 3))
    assert [cut.stages_with(name) for name in ("a", "b", "tied")] == [(0,), (1,), (0, 1)]
