"""The layout: which box of which full tensor each unit's flat storage holds, and at which offset.

The one table of sizes and places: parameters are bound to it, optimizer groups, checkpoint names and shapes,
and memory estimates come from it.

[Note: identical replicas]
Ranks that hold the same shard update it independently and must always get the same bits. Compressed
gradients share a scale per 256 elements, and bf16 states are rounded with noise derived from an element's
position. So replicas are at the same position on all their holders, with the same neighbours: shards held by
more ranks of the grid come first, and the next number of holders starts at a multiple of 256 elements. (Where
rows are sharded unevenly, what the rows of one column share may be at different positions in another column.)
"""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, product
from typing import NamedTuple

from plait.plan.axes import UnitKind
from plait.plan.quantized import FORMATS
from plait.plan.sharding import Boxes, ExpertDim, ParamSharding, TPPlan

# Every shard starts at a multiple of this many elements: 16 bytes of bf16, the pointer alignment of matrix
# units. Widths of real models are multiples of it, so gaps are rare. Gaps always hold zeros: no parameter is
# there, so their gradient is zero.
ALIGNMENT = 8

# Units are padded so that every rank of `shard` owns a multiple of this many elements. Norms are summed in
# runs of this length, so their bits do not depend on the number of ranks that share a unit.
RANGE_ALIGNMENT = 256


@dataclass(frozen=True)
class TPCoord:
    """A rank's coordinates on the tp axes and, out of `experts`, along EXPERTS; and the parameters that tp
    shards, by name."""

    row: int = 0
    col: int = 0
    rows: int = 1
    cols: int = 1
    shardings: Mapping[str, ParamSharding] = field(default_factory=dict)
    expert: int = 0
    experts: int = 1

    @classmethod
    def all_coords(cls, plan: TPPlan, experts: int = 1) -> "list[TPCoord]":
        """The coordinates of every rank with other parts of the same stages: those along EXPERTS outermost,
        columns fastest."""
        shardings = {sharding.name: sharding for sharding in plan.parameters}
        return [
            cls(row, col, plan.rows, plan.cols, shardings, expert, experts)
            for expert, row, col in product(range(experts), range(plan.rows), range(plan.cols))
        ]


@dataclass(frozen=True)
class ParamInfo:
    """Name, full shape and optimizer group of one parameter; `group` is None for a frozen one. `experts`: of
    those of kind EXPERT. `format`: of FORMATS, if it is quantized."""

    name: str
    shape: tuple[int, ...]
    group: int | None
    kind: UnitKind = UnitKind.DENSE
    experts: ExpertDim = field(default_factory=ExpertDim)
    format: str = ""

    def boxes_at(self, boxes: Boxes, coord: TPCoord) -> Boxes:
        """The parts of these boxes that the rank at `coord` along EXPERTS has."""
        dim = self.experts.dim
        own = self.experts.ranges(self.shape[dim], coord.expert, coord.experts)
        both = tuple(
            (max(a, start), min(b, stop))
            for a, b in boxes.ranges[dim]
            for start, stop in own
            if a < stop and start < b
        )
        return Boxes((*boxes.ranges[:dim], both or ((0, 0),), *boxes.ranges[dim + 1 :]))


@dataclass(frozen=True)
class UnitInfo:
    """Parameters that are communicated together: a block, the embedding, the head."""

    name: str
    tensors: tuple[ParamInfo, ...]


@dataclass(frozen=True)
class ParamShard:
    """The boxes of a full tensor that a rank holds, `numel` elements from `start` in its unit's storage.

    sharers     the `col` coordinates whose gradients of this shard are partial sums; () if nothing is summed
    counted     whether this rank is the first that holds the shard: it counts the shard in norms
    copies      number of ranks of the grid that hold it
    """

    name: str
    full_shape: tuple[int, ...]
    boxes: Boxes
    start: int
    sharers: tuple[int, ...] = ()
    counted: bool = True
    copies: int = 1

    @classmethod
    def at_coord(cls, param: ParamInfo, coord: TPCoord) -> "ParamShard":
        """The shard of the rank at `coord`, at offset 0."""
        sharding = coord.shardings.get(param.name)
        boxes = Boxes.full(param.shape)
        if sharding is not None:
            boxes = Boxes(sharding.ranges(param.shape, coord.row, coord.col))
        if param.kind is UnitKind.EXPERT:
            boxes = param.boxes_at(boxes, coord)
        if sharding is None:
            is_first, copies = coord.row == coord.col == 0, coord.rows * coord.cols
            return cls(param.name, param.shape, boxes, 0, counted=is_first, copies=copies)
        return cls(
            param.name,
            param.shape,
            boxes,
            0,
            sharding.sharers(coord.cols, coord.col),
            sharding.is_first(coord.row, coord.col),
            sharding.copies(coord.rows, coord.cols, coord.col),
        )

    @property
    def stop(self) -> int:
        return self.start + self.boxes.numel


_ORIGIN = TPCoord()
_SUFFIXES = {UnitKind.DENSE: "", UnitKind.EXPERT: " (experts)"}  # of the names of units
_FROZEN = {"": " (frozen)", **{form: f" ({form})" for form in FORMATS}}
_STORED = ((False, ""), *((True, form) for form in _FROZEN))  # whether a unit is frozen, and its format


@dataclass(frozen=True)
class Overlap:
    """Elements [start, stop) of a flattened shard, found at offset `at` of a range of its unit."""

    shard: ParamShard
    start: int
    stop: int
    at: int

    @property
    def place(self) -> slice:
        """The elements in the range."""
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True)
class UnitLayout:
    """One flat storage, split into equal ranges: range r is owned by the rank at `shard` coordinate r.

    Shards of one optimizer group are contiguous, so each group is one range of the storage, and at most one
    range of what a rank owns. On a tp grid there may be several of each: see [Note: identical replicas].
    There, shards whose gradients are summed over the same columns are contiguous. Trainable, frozen and
    quantized parameters are in separate units, and so are parameters of different kinds.
    """

    name: str
    block: str  # name of its UnitInfo
    params: tuple[ParamShard, ...]
    groups: tuple[tuple[int, int, int], ...]  # (optimizer group, start, stop); none in a frozen unit
    numel: int
    num_shards: int
    kind: UnitKind = UnitKind.DENSE
    format: str = ""  # of FORMATS, if its parameters are quantized

    @classmethod
    def build(
        cls, unit: UnitInfo, num_shards: int = 1, block: str | None = None, coord: TPCoord = _ORIGIN
    ) -> "UnitLayout":
        """Place the tensors one after the other: group by group, in model order. Padded once, at the end."""
        params: list[ParamShard] = []
        groups: list[tuple[int, int, int]] = []
        position = 0
        shards = [(tensor.group, ParamShard.at_coord(tensor, coord)) for tensor in unit.tensors]
        in_order = sorted(shards, key=_storage_order)
        for (_, group), run in groupby(in_order, key=lambda entry: _storage_order(entry)[:2]):
            of_group = [shard for _, shard in run]
            if params and of_group[0].copies != params[-1].copies:  # see [Note: identical replicas]
                position = _round_up(position, RANGE_ALIGNMENT)
            start = position
            for shard in of_group:
                params.append(replace(shard, start=position))
                position = _round_up(params[-1].stop, ALIGNMENT)
            if group >= 0 and position > start:
                groups.append((group, start, position))
        numel = _round_up(position, num_shards * RANGE_ALIGNMENT)
        first, named = unit.tensors[0], block or unit.name
        parts = (tuple(params), tuple(groups), numel, num_shards, first.kind, first.format)
        return cls(unit.name, named, *parts)

    @property
    def trains(self) -> bool:
        """True if its parameters are trainable; False for a unit of frozen ones."""
        return bool(self.groups)

    @property
    def range_numel(self) -> int:
        """Number of elements that each rank owns."""
        return self.numel // self.num_shards

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes in which `numel` elements are stored and gathered: of codes and absmax, if quantized."""
        return FORMATS[self.format].num_bytes(numel) if self.format else numel * itemsize

    def owned_range(self, rank: int) -> tuple[int, int]:
        """Start and stop of the range owned by the rank at this `shard` coordinate."""
        return rank * self.range_numel, (rank + 1) * self.range_numel

    def owned_groups(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(optimizer group, start, stop) within the rank's owned range: what its optimizer updates."""
        low, high = self.owned_range(rank)
        clipped = (
            (group, max(start, low) - low, min(stop, high) - low) for group, start, stop in self.groups
        )
        return tuple((group, start, stop) for group, start, stop in clipped if stop > start)

    def overlaps(self, start: int, stop: int) -> tuple[Overlap, ...]:
        """The parts of shards within [start, stop) of the storage."""
        return tuple(
            Overlap(shard, low - shard.start, high - shard.start, low - start)
            for shard in self.params
            if (low := max(shard.start, start)) < (high := min(shard.stop, stop))
        )

    @cached_property
    def partial(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """(columns, start, stop): ranges whose gradients are partial sums over these columns. Adjacent ranges
        are not merged: on another of the columns, something else may be between them."""
        runs = groupby(self.params, key=lambda p: (p.sharers, p.copies, self._group_at(p.start)))
        ranges = [(sharers, list(shards)) for (sharers, _, _), shards in runs if sharers]
        return tuple((sharers, shards[0].start, shards[-1].stop) for sharers, shards in ranges)

    def group_of(self, shard: ParamShard) -> int | None:
        """The optimizer group of a parameter; None if it is frozen, or empty."""
        return self._group_at(shard.start)

    def _group_at(self, position: int) -> int | None:
        return next((group for group, start, stop in self.groups if start <= position < stop), None)

    @cached_property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the storage that another rank counts in norms."""
        return tuple((shard.start, shard.stop) for shard in self.params if not shard.counted)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the storage that no shard covers."""
        edges = [0, *(edge for shard in self.params for edge in (shard.start, shard.stop)), self.numel]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, stop) for start, stop in pairs if stop > start)


class UnitTotals(NamedTuple):
    """Number of some units, their elements and their tensors."""

    kind: UnitKind
    format: str
    trains: bool
    number: int
    numel: int
    tensors: int


@dataclass(frozen=True)
class Layout:
    """Every unit of a rank, in forward order."""

    units: tuple[UnitLayout, ...]

    @classmethod
    def build(
        cls,
        units: Iterable[UnitInfo],
        num_shards: int | Mapping[UnitKind, int] = 1,
        coord: TPCoord = _ORIGIN,
        elsewhere: Set[str] = frozenset(),
    ) -> "Layout":
        """Place every unit.

        num_shards   ranks that share one copy of a unit's storage; or by the unit's kind
        coord        this rank's coordinates on the tp grid
        elsewhere    parameters that another pipeline stage counts"""
        layouts = []
        for unit in units:
            for kind, (frozen, form) in product(UnitKind, _STORED):
                wanted = kind, frozen, form
                tensors = tuple(t for t in unit.tensors if (t.kind, t.group is None, t.format) == wanted)
                if tensors:
                    shards = num_shards if isinstance(num_shards, int) else num_shards[kind]
                    named = UnitInfo(f"{unit.name}{_SUFFIXES[kind]}{_FROZEN[form] * frozen}", tensors)
                    layout = UnitLayout.build(named, shards, unit.name, coord)
                    params = [
                        replace(p, counted=p.counted and p.name not in elsewhere) for p in layout.params
                    ]
                    layouts.append(replace(layout, params=tuple(params)))
        return cls(tuple(layouts))

    @cached_property
    def equal_units(self) -> tuple[tuple[UnitLayout, int], ...]:
        """Units, and how often each occurs. (The planner has all equal blocks as one object.)"""
        counts: dict[int, tuple[UnitLayout, int]] = {}
        for unit in self.units:
            counts[id(unit)] = unit, counts.get(id(unit), (unit, 0))[1] + 1
        return tuple(counts.values())

    @cached_property
    def totals(self) -> "tuple[UnitTotals, ...]":
        """The totals of units of one kind, format, and use, in order of the first ones."""
        found: dict[tuple[UnitKind, str, bool], tuple[int, int, int]] = {}
        for unit, times in self.equal_units:
            key = unit.kind, unit.format, unit.trains
            number, numel, tensors = found.get(key, (0, 0, 0))
            found[key] = number + times, numel + times * unit.numel, tensors + times * len(unit.params)
        return tuple(UnitTotals(*key, *sums) for key, sums in found.items())

    @cached_property
    def numel(self) -> int:
        """Number of stored elements, gaps included."""
        return sum(unit.numel for unit in self.units)

    @cached_property
    def expert_numel(self) -> int:
        """Number of stored elements in units of kind EXPERT."""
        return sum(unit.numel for unit in self.units if unit.kind is UnitKind.EXPERT)

    @cached_property
    def trained_numel(self) -> int:
        """Number of elements in trainable units, gaps included."""
        return sum(unit.numel for unit in self.units if unit.trains)

    @cached_property
    def owned_numel(self) -> int:
        """Number of elements of trainable units that a rank owns, gaps included."""
        return sum(unit.range_numel for unit in self.units if unit.trains)

    @property
    def num_parameters(self) -> int:
        """Trainable elements of full tensors, each counted once."""
        return sum(math.prod(p.full_shape) for unit in self.units if unit.trains for p in unit.params)


def _storage_order(entry: tuple[int | None, ParamShard]) -> tuple[int, int, tuple[int, ...]]:
    """Sort key: shards with more copies first. See [Note: identical replicas]."""
    group, shard = entry
    return -shard.copies, -1 if group is None else group, shard.sharers


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
