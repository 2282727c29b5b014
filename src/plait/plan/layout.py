"""The layout: which box of which whole tensor each unit's flat storage holds, and where.

One table, read by whoever needs it: the units bind parameters to it, the optimizer takes its groups
from it, the checkpointer its names and shapes, the memory arithmetic its sizes.

[Note: copies stay equal]
Ranks that hold the same piece update it each for itself, and must get the same bits for ever. Gradients that
travel in codes share a scale per 256 elements, and states in bf16 are rounded by noise that follows from an
element's place: so copies lie at the same place on all their holders, among the same neighbours. What more
ranks of the grid hold comes first, and what as many do begins at a multiple of 256 elements. (Where rows are
cut unevenly, what each column's rows share may lie at different places.)
"""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import groupby, product

from plait.plan.sharding import Boxes, ParamSharding, TPPlan

# A piece starts at a multiple of this many elements: 16 bytes of bf16, which is what matrix units ask
# of a pointer. Widths of real models are multiples of it, so gaps are rare. They hold zeros for ever:
# no parameter lies there, so their gradient is zero.
ALIGNMENT = 8

# A unit is padded so that every rank of `shard` owns a multiple of this many elements. Norms are summed
# in runs of this length, so their bits do not depend on how many ranks share a unit.
RANGE_ALIGNMENT = 256


@dataclass(frozen=True)
class TPCoord:
    """A rank's coordinates on the axes that cut layers, and which parameters are cut there, by name."""

    row: int = 0
    col: int = 0
    rows: int = 1
    cols: int = 1
    cuts: Mapping[str, ParamSharding] = field(default_factory=dict)

    @classmethod
    def all_coords(cls, plan: TPPlan) -> "list[TPCoord]":
        """Of every rank of a grid, columns fastest."""
        cuts = {cut.name: cut for cut in plan.parameters}
        return [cls(*at, plan.rows, plan.cols, cuts) for at in product(range(plan.rows), range(plan.cols))]


@dataclass(frozen=True)
class ParamInfo:
    """What a plan needs to know of one parameter. `group`: the optimizer's; None for a frozen one."""

    name: str
    shape: tuple[int, ...]
    group: int | None


@dataclass(frozen=True)
class UnitInfo:
    """Parameters that are communicated together: a block, the embedding, the head."""

    name: str
    tensors: tuple[ParamInfo, ...]


@dataclass(frozen=True)
class ParamShard:
    """The boxes of a whole tensor that a rank holds, `numel` elements from `start` in its unit's storage.

    sharers     the `col` coordinates that compute parts of this piece's gradient; () where nothing is summed
    counted     this rank is the first of those that hold the piece
    copies      how many ranks of the grid hold it
    """

    name: str
    full_shape: tuple[int, ...]
    boxes: Boxes
    start: int
    sharers: tuple[int, ...] = ()
    counted: bool = True
    copies: int = 1

    @classmethod
    def at_coord(cls, fact: ParamInfo, place: TPCoord) -> "ParamShard":
        """What the rank at `place` holds, at the beginning of a storage."""
        cut = place.cuts.get(fact.name)
        if cut is None:
            is_first, copies = place.row == place.col == 0, place.rows * place.cols
            boxes = Boxes.full(fact.shape)
            return cls(fact.name, fact.shape, boxes, 0, counted=is_first, copies=copies)
        return cls(
            fact.name,
            fact.shape,
            Boxes(cut.ranges(fact.shape, place.row, place.col)),
            0,
            cut.sharers(place.cols, place.col),
            cut.is_first(place.row, place.col),
            cut.copies(place.rows, place.cols, place.col),
        )

    @property
    def stop(self) -> int:
        return self.start + self.boxes.numel


_ORIGIN = TPCoord()


@dataclass(frozen=True)
class Overlap:
    """Elements [start, stop) of a flattened piece, which lie at `at` in some range of its unit."""

    piece: ParamShard
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class UnitLayout:
    """One flat storage, cut into equal ranges: range r is owned by the rank at `shard` coordinate r.

    Pieces of one optimizer group stand together, so each group is one range of the storage, and at most
    one range of what a rank owns. On a grid there may be several of each: see [Note: copies stay equal].
    There, pieces whose gradients are summed over the same columns stand together. Parameters that train and
    frozen ones are units of their own.
    """

    name: str
    block: str  # the UnitInfo that it is of
    params: tuple[ParamShard, ...]
    groups: tuple[tuple[int, int, int], ...]  # (optimizer group, start, stop); none in a frozen unit
    numel: int
    shards: int

    @classmethod
    def build(
        cls, unit: UnitInfo, shards: int = 1, block: str | None = None, place: TPCoord = _ORIGIN
    ) -> "UnitLayout":
        """Lays the tensors one behind the other: group by group, in the model's order. Padded once."""
        pieces: list[ParamShard] = []
        groups: list[tuple[int, int, int]] = []
        position = 0
        held = [(tensor.group, ParamShard.at_coord(tensor, place)) for tensor in unit.tensors]
        for (_, order), run in groupby(sorted(held, key=_storage_order), key=lambda h: _storage_order(h)[:2]):
            parts = [piece for _, piece in run]
            if pieces and parts[0].copies != pieces[-1].copies:  # see [Note: copies stay equal]
                position = _round_up(position, RANGE_ALIGNMENT)
            start = position
            for piece in parts:
                pieces.append(replace(piece, start=position))
                position = _round_up(pieces[-1].stop, ALIGNMENT)
            if order >= 0 and position > start:
                groups.append((order, start, position))
        numel = _round_up(position, shards * RANGE_ALIGNMENT)
        return cls(unit.name, block or unit.name, tuple(pieces), tuple(groups), numel, shards)

    @property
    def trains(self) -> bool:
        """False for a unit of frozen parameters."""
        return bool(self.groups)

    @property
    def range_numel(self) -> int:
        """Elements that each rank owns."""
        return self.numel // self.shards

    def owned(self, rank: int) -> tuple[int, int]:
        """Start and stop of the range that the rank at this `shard` coordinate owns."""
        return rank * self.range_numel, (rank + 1) * self.range_numel

    def owned_group_ranges(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(optimizer group, start, stop) within the rank's range: what its optimizer updates."""
        low, high = self.owned(rank)
        cut = ((group, max(start, low) - low, min(stop, high) - low) for group, start, stop in self.groups)
        return tuple((group, start, stop) for group, start, stop in cut if stop > start)

    def overlaps(self, start: int, stop: int) -> tuple[Overlap, ...]:
        """What of which piece lies in [start, stop) of the storage."""
        return tuple(
            Overlap(piece, low - piece.start, high - piece.start, low - start)
            for piece in self.params
            if (low := max(piece.start, start)) < (high := min(piece.stop, stop))
        )

    @property
    def partial(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """(columns, start, stop): where gradients are parts, which these columns sum. Runs that touch stay
        two: on another of the columns something else may lie between them."""
        runs = groupby(self.params, key=lambda p: (p.sharers, p.copies, self._group_at(p.start)))
        found = [(sharers, list(pieces)) for (sharers, _, _), pieces in runs if sharers]
        return tuple((sharers, pieces[0].start, pieces[-1].stop) for sharers, pieces in found)

    def _group_at(self, position: int) -> int | None:
        return next((group for group, start, stop in self.groups if start <= position < stop), None)

    @property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the storage that another rank counts in norms."""
        return tuple((piece.start, piece.stop) for piece in self.params if not piece.counted)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the storage that no piece covers."""
        edges = [0, *(edge for piece in self.params for edge in (piece.start, piece.stop)), self.numel]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, stop) for start, stop in pairs if stop > start)


@dataclass(frozen=True)
class Layout:
    """Every unit of a rank, in the order in which forward uses them."""

    units: tuple[UnitLayout, ...]

    @classmethod
    def build(
        cls,
        units: Iterable[UnitInfo],
        shards: int = 1,
        place: TPCoord = _ORIGIN,
        elsewhere: Set[str] = frozenset(),
    ) -> "Layout":
        """`shards`: ranks that share one copy of each unit's storage. `place`: of this rank where layers are
        cut. `elsewhere`: parameters that another pipeline stage counts."""
        found = []
        for unit in units:
            for name, frozen in ((unit.name, False), (f"{unit.name} (frozen)", True)):
                tensors = tuple(tensor for tensor in unit.tensors if (tensor.group is None) == frozen)
                if tensors:
                    laid = UnitLayout.build(UnitInfo(name, tensors), shards, unit.name, place)
                    pieces = [replace(p, counted=p.counted and p.name not in elsewhere) for p in laid.params]
                    found.append(replace(laid, params=tuple(pieces)))
        return cls(tuple(found))

    @property
    def numel(self) -> int:
        """Elements that the units store, gaps included."""
        return sum(unit.numel for unit in self.units)

    @property
    def trained_numel(self) -> int:
        """Elements of the units that train, gaps included."""
        return sum(unit.numel for unit in self.units if unit.trains)

    @property
    def num_parameters(self) -> int:
        """Trainable elements of whole tensors, each counted once."""
        return sum(math.prod(p.full_shape) for unit in self.units if unit.trains for p in unit.params)


def _storage_order(held: tuple[int | None, ParamShard]) -> tuple[int, int, tuple[int, ...]]:
    """What more ranks hold comes first."""
    group, piece = held
    return -piece.copies, -1 if group is None else group, piece.sharers


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
