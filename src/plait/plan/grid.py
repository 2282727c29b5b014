"""The grid: ranks arranged along named axes, the last axis running fastest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from plait.plan.axes import AXES, TABLE, Axes, Degrees


@dataclass(frozen=True)
class Grid:
    """Degrees along AXES. An axis that the plan does not use has degree 1."""

    degrees: tuple[int, ...]

    @classmethod
    def from_plan(cls, plan: Degrees) -> "Grid":
        """The grid of a plan whose dp is a number."""
        return cls(tuple(axis.degree(plan) for axis in TABLE))

    @classmethod
    def from_degrees(cls, **degrees: int) -> "Grid":
        """`Grid.from_degrees(replicate=2, col=4)`: 8 ranks."""
        unknown = set(degrees) - set(AXES)
        assert not unknown, f"no such axis: {sorted(unknown)}"
        return cls(tuple(degrees.get(axis, 1) for axis in AXES))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degrees)

    def degree(self, *axes: str) -> int:
        """Number of ranks along these axes together."""
        return math.prod(self.degrees[AXES.index(axis)] for axis in axes)

    def used(self, *axes: str) -> Axes:
        """Return those of the axes that have several ranks, outermost first."""
        assert {*axes} <= {*AXES}, f"no such axis among {axes}"
        along = zip(AXES, self.degrees, strict=True)
        return tuple([axis for axis, degree in along if degree > 1 and axis in axes])

    def coord(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on every axis."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        along = zip(AXES, self._strides, self.degrees, strict=True)
        return {axis: rank // stride % degree for axis, stride, degree in along}

    def index(self, rank: int, *axes: str) -> int:
        """The rank's index among those that differ from it only along `axes`."""
        assert {*axes} <= {*AXES}, f"no such axis among {axes}"
        index = 0
        for axis, stride, degree in zip(AXES, self._strides, self.degrees, strict=True):
            if axis in axes:
                index = index * degree + rank // stride % degree
        return index

    def rank(self, coord: Mapping[str, int]) -> int:
        """The rank at a coordinate; axes that are not given are 0."""
        rank = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            index = coord.get(axis, 0)
            assert 0 <= index < degree, f"{axis}={index} of {degree}"
            rank = rank * degree + index
        return rank

    def first(self, rank: int, *axes: str) -> int:
        """The first of the ranks that differ from `rank` only along `axes`."""
        steps = zip(AXES, self._strides, self.degrees, strict=True)
        return rank - sum(rank // stride % degree * stride for axis, stride, degree in steps if axis in axes)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on an axis."""
        return self._strides[AXES.index(axis)]

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in rank order."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        wanted = [number for number, axis in enumerate(AXES) if axis in axes]
        assert len(wanted) == len(axes), f"no such axis among {axes}"
        steps = [(self._strides[number], self.degrees[number]) for number in wanted]
        ranks = [self.first(rank, *axes)]
        for stride, degree in steps:
            ranks = [first + index * stride for first in ranks for index in range(degree)]
        return tuple(ranks)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Distance in ranks between neighbours on each axis."""
        return tuple(math.prod(self.degrees[number + 1 :]) for number in range(len(AXES)))


def expert_rows(capacity: str, choices: int, experts: int) -> int:
    """Return the rows that an expert takes of a rank that has so many choices, under the plan's key."""
    return math.ceil(Fraction(capacity) * choices / experts)


def share(size: int, rank: int, num_ranks: int, unit: int = 1) -> slice:
    """Return the part of `size` elements, a multiple of `unit`, that a rank takes: consecutive, and a
    multiple of `unit`; the parts of two ranks differ by at most one `unit`."""
    num_units = size // unit
    return slice(unit * (num_units * rank // num_ranks), unit * (num_units * (rank + 1) // num_ranks))
