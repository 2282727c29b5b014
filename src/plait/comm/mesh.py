"""Process groups along the grid's axes: communicators created at once, other groups on first use."""

from collections.abc import Sequence
from dataclasses import replace

from plait.comm.collectives import Group
from plait.comm.world import World
from plait.plan import Grid
from plait.plan.communicators import Communicator


class Mesh:
    """This rank's coordinates on the grid, and its groups.

    Groups are created on first use, and only by their own members: all of them must request a group at the
    same point of the program.
    """

    def __init__(self, world: World, grid: Grid, communicators: Sequence[Communicator] = ()) -> None:
        """`communicators`: of the plan. With `World.shares_communicators` they are created here, by all ranks
        at the same point of the program, and other groups have no communicators of their own."""
        assert world.size == grid.num_ranks, f"{world.size} ranks for a grid of {grid.num_ranks}"
        self.world = world
        self.grid = grid
        self.coord = grid.coord(world.rank)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        for each in communicators if world.shares_communicators else ():
            ranks = grid.group(world.rank, *each.axes)
            self._groups[ranks, each.channel] = world.split_group(
                ranks, each.channel, each.axes, each.max_ctas
            )

    def group(self, *axes: str, channel: str = "") -> Group:
        """Return the group of the ranks that differ from this one along `axes` only.

        Groups of the same ranks on different channels have separate connections (NCCL: streams): what is
        started on one neither waits for work in flight on another, nor must be in one order with it. On NCCL
        this holds for the plan's communicators; the channels of other groups share one.
        """
        return self._cached_group(self.grid.group(self.world.rank, *axes), channel, axes)

    def subgroup(self, axis: str, coords: Sequence[int], *, channel: str = "") -> Group:
        """Return the group of the ranks at these coordinates of one axis, which include this rank."""
        axis_ranks = self.grid.group(self.world.rank, axis)
        return self._cached_group(tuple(axis_ranks[coord] for coord in coords), channel, (axis,))

    def message_group(
        self, axis: str, source: int, target: int, *, channel: str, shared_channel: str
    ) -> tuple[Group, int]:
        """Return a group for messages from one coordinate of an axis to another, and the other rank's index
        in it. `shared_channel`: of the communicator of the axis that they use if communicators are shared."""
        is_source = self.coord[axis] == source
        axis_ranks = self.grid.group(self.world.rank, axis)
        shared = self._groups.get((axis_ranks, shared_channel))
        if shared is not None:
            return replace(shared, axes=(axis,), channel=channel), target if is_source else source
        group = self.subgroup(axis, sorted((source, target)), channel=channel)
        return group, 1 - group.rank

    def _cached_group(self, ranks: tuple[int, ...], channel: str, axes: Sequence[str]) -> Group:
        key = (ranks, channel if len(ranks) > 1 else "")
        if key not in self._groups:
            self._groups[key] = self.world.subgroup(*key, self.grid.used(*axes))
        return self._groups[key]
