"""Coordinates, ranks and groups of the grid, on grids of every shape."""

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from plait.plan import AXES, Grid, Plan

grids = st.builds(Grid, st.tuples(*[st.sampled_from([1, 1, 2, 3])] * len(AXES)))


@given(grids)
def test_rank_and_coordinate_are_each_others_inverse(grid: Grid) -> None:
    coords = [grid.coord(rank) for rank in range(grid.num_ranks)]
    assert [grid.rank(coord) for coord in coords] == list(range(grid.num_ranks))
    assert len({tuple(coord.values()) for coord in coords}) == grid.num_ranks


@given(grids, st.sets(st.sampled_from(AXES)))
def test_groups_along_any_axes_contain_every_rank_once(grid: Grid, axes: set[str]) -> None:
    groups = {grid.group(rank, *axes) for rank in range(grid.num_ranks)}
    assert sorted(itertools.chain(*groups)) == list(range(grid.num_ranks))
    for group in groups:
        assert len(group) == grid.degree(*axes)
        assert list(group) == sorted(group)
        others = [{a: c for a, c in grid.coord(rank).items() if a not in axes} for rank in group]
        assert all(other == others[0] for other in others)


def test_neighbours_on_the_innermost_axis_are_neighbouring_ranks() -> None:
    grid = Grid.from_degrees(pp=2, replicate=2, row=2, col=2)
    assert grid.group(0, "col") == (0, 1)
    assert grid.group(5, "row") == (5, 7)
    assert grid.group(5, "row", "col") == (4, 5, 6, 7)
    assert grid.group(1, "replicate") == (1, 5)
    assert grid.group(3, "pp") == (3, 11)


def test_data_parallel_ranks_are_on_the_replicate_axis() -> None:
    grid = Grid.from_plan(Plan(dp=6))
    assert grid.degree("replicate") == grid.num_ranks == 6
    assert grid.group(4, "replicate", "shard") == tuple(range(6))


def test_a_large_grid_answers_without_listing_its_ranks() -> None:
    grid = Grid.from_degrees(pp=16, replicate=8, shard=16, col=8)
    assert grid.num_ranks == 16_384
    assert grid.rank(grid.coord(16_383)) == 16_383
    assert grid.group(16_383, "col") == tuple(range(16_376, 16_384))


def test_coordinates_of_16384_ranks_take_milliseconds() -> None:
    grid = Grid.from_degrees(pp=16, replicate=8, shard=16, col=8)
    begun_s = time.process_time()
    places = {tuple(grid.coord(rank).values()) for rank in range(grid.num_ranks)}
    assert time.process_time() - begun_s < 0.5  # some 40 ms; a shared core may be slow
    assert len(places) == grid.num_ranks
