"""The mesh: process groups along the grid's axes, made when first asked for."""

from collections.abc import Sequence

from plait.comm.collectives import Group
from plait.comm.world import World
from plait.plan import AXES, Grid


class Mesh:
    """This rank's place on the grid, and its groups.

    Groups are made on first use, and only by their own members: all of them must ask for a group at
    the same point of the program.
    """

    def __init__(self, world: World, grid: Grid) -> None:
        assert world.size == grid.num_ranks, f"{world.size} ranks for a grid of {grid.num_ranks}"
        self.world = world
        self.grid = grid
        self.coord = grid.coord(world.rank)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}

    def group(self, *axes: str, lane: str = "") -> Group:
        """The ranks that differ from this one along `axes` only.

        Groups of the same ranks in different lanes have connections (NCCL: a stream) of their own: what is
        started in one neither waits for what is under way in the other, nor has to be in one order with it.
        """
        return self._group_of(self.grid.group(self.world.rank, *axes), lane, axes)

    def part(self, axis: str, coords: Sequence[int], *, lane: str = "") -> Group:
        """Of the ranks along one axis those at these coordinates, this one among them."""
        along = self.grid.group(self.world.rank, axis)
        return self._group_of(tuple(along[coord] for coord in coords), lane, (axis,))

    def _group_of(self, ranks: tuple[int, ...], lane: str, axes: Sequence[str]) -> Group:
        key = (ranks, lane if len(ranks) > 1 else "")
        if key not in self._groups:
            used = tuple(axis for axis in AXES if axis in axes and self.grid.degree(axis) > 1)
            self._groups[key] = self.world.group_of(*key, used)
        return self._groups[key]
