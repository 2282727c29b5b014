"""Process groups along the grid's axes, created on first use."""

from collections.abc import Sequence

from plait.comm.collectives import Group
from plait.comm.world import World
from plait.plan import AXES, Grid


class Mesh:
    """This rank's coordinates on the grid, and its groups.

    Groups are created on first use, and only by their own members: all of them must request a group at the
    same point of the program.
    """

    def __init__(self, world: World, grid: Grid) -> None:
        assert world.size == grid.num_ranks, f"{world.size} ranks for a grid of {grid.num_ranks}"
        self.world = world
        self.grid = grid
        self.coord = grid.coord(world.rank)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}

    @property
    def num_groups(self) -> int:
        """The number of groups created so far that communicate."""
        return sum(group.size > 1 for group in self._groups.values())

    def group(self, *axes: str, channel: str = "") -> Group:
        """Return the group of the ranks that differ from this one along `axes` only.

        Groups of the same ranks on different channels have separate connections (NCCL: streams): what is
        started on one neither waits for work in flight on another, nor must be in one order with it.
        """
        return self._cached_group(self.grid.group(self.world.rank, *axes), channel, axes)

    def subgroup(self, axis: str, coords: Sequence[int], *, channel: str = "") -> Group:
        """Return the group of the ranks at these coordinates of one axis, which include this rank."""
        axis_ranks = self.grid.group(self.world.rank, axis)
        return self._cached_group(tuple(axis_ranks[coord] for coord in coords), channel, (axis,))

    def _cached_group(self, ranks: tuple[int, ...], channel: str, axes: Sequence[str]) -> Group:
        key = (ranks, channel if len(ranks) > 1 else "")
        if key not in self._groups:
            used = tuple(axis for axis in AXES if axis in axes and self.grid.degree(axis) > 1)
            self._groups[key] = self.world.new_group(*key, used)
        return self._groups[key]
