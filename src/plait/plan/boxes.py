"""Boxes: which elements of a whole tensor somebody holds, as plain numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from plait.plan.tensor import Range


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a whole tensor: start and stop per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def edges(self) -> tuple[Range, ...]:
        """Start and stop of each dim."""
        return tuple(zip(self.start, self.stop, strict=True))

    def within(self, outer: "Box") -> "Box":
        """The same box, counted from where `outer` starts."""
        return Box(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)),
            tuple(a - b for a, b in zip(self.stop, outer.start, strict=True)),
        )

    def __and__(self, other: "Box") -> "Box":
        """What both boxes hold; a box without elements where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(max(lo, min(a, b)) for lo, a, b in zip(start, self.stop, other.stop, strict=True))
        return Box(start, stop)


@dataclass(frozen=True)
class Boxes:
    """A grid of boxes of a whole tensor: of each dim some ranges. A rank holds them as one tensor."""

    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Boxes":
        return cls(tuple(((0, size),) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that holds them."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[Box]:
        for ranges in product(*self.ranges):
            yield Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))

    def parts(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """`box` is of the tensor that holds them: (box of the whole tensor, where it lies in `box`)."""
        for ranges in product(*(_overlaps(r, *edge) for r, edge in zip(self.ranges, box.edges, strict=True))):
            whole = Box(tuple(w for w, _, _ in ranges), tuple(w + n for w, _, n in ranges))
            yield whole, Box(tuple(at for _, at, _ in ranges), tuple(at + n for _, at, n in ranges))


def _overlaps(ranges: Sequence[Range], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(start in the whole, start from `start`, length) of what [start, stop) of the ranges, end to end,
    holds."""
    edges = accumulate((high - low for low, high in ranges), initial=0)
    found = []
    for (low, high), edge in zip(ranges, edges, strict=False):
        first, last = max(start, edge), min(stop, edge + high - low)
        if first < last:
            found.append((low + first - edge, first - start, last - first))
    return found


def runs(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [start, stop) of a flattened tensor are, in their order: of n dims at most
    2 n - 1."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _in_row(first, shape, skipped, rest)
        return
    if skipped:
        yield from _in_row(first, shape, skipped, inner)
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    yield from _in_row(last, shape, 0, rest)


def _in_row(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in runs(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))
