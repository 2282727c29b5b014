"""How layers are cut over the grid's `row` and `col` axes: the algebra, without a tensor.

[Note: one axis is a special case of two]
The residual stream's features are cut over `row`; heads and the feed-forward's features over `col`.

  style    weight: out, in     input      summed over: forward, backward    output
  COLUMN   col, row            over row   row, col                          over col
  ROW      row, col            over col   col, row                          over row

A ROW layer takes what a COLUMN layer gives and the other way round, so nothing is re-laid between them.
With one row this is Megatron-LM (Shoeybi et al. 1909.08053, section 3); with ZeRO 3 along `shard` it is
AxoNN's grid (Singh et al. 2305.13525, section 3): X = col, Y = row, Z = shard.

[Note: uneven pieces, shared pieces]
Every coordinate of an axis has ranges of a tensor's dim: one, several (a packed projection gives one of each
part), of any length. Coordinates that have the same ranges hold the same piece: kv heads fewer than columns.
What each of them adds to its gradient is a part of it.

[Note: heads and their keys]
Query heads share a key and value head in groups of heads / kv_heads. A rank has whole groups or a part of
one group, never parts of two, so that on every rank the number of its query heads is a multiple of that of
its key heads, and attention finds the right key for each of its heads by the same rule as in the whole model.

Boxes: which elements of a whole tensor somebody holds, as plain numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, product

from plait.errors import PlanError

Range = tuple[int, int]  # start and stop

ALIGNED = 8  # elements: pieces of wide dims start at a multiple of it


def split(size: int, parts: int, unit: int = 1, *, of: str = "features") -> tuple[Range, ...]:
    """Contiguous ranges of `size`, one for each part, as even as whole units allow; none is empty.

    The first parts get the units that do not divide, the last one what is left of a unit. Raises PlanError
    where there are fewer units than parts; `of` says whose they are.
    """
    units = size // unit
    if units < parts:
        raise PlanError(
            f"{of} cannot be cut into {parts} pieces",
            given=f"{size} in units of {unit}",
            expected="at least one unit on every rank",
            hint=f"tp with at most {units} ranks along that axis",
        )
    each, extra = divmod(units, parts)
    stops = [(each * (part + 1) + min(part + 1, extra)) * unit for part in range(parts - 1)] + [size]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def split_width(size: int, parts: int, *, of: str = "features") -> tuple[Range, ...]:
    """How a width (hidden, feed-forward, vocabulary) is cut: the same wherever it is `size`.

    In multiples of eight where every piece has at least about sixty-four, for the sake of matrix products.
    """
    return split(size, parts, ALIGNED if size >= 8 * ALIGNED * parts else 1, of=of)


@dataclass(frozen=True)
class HeadSplit:
    """Of every coordinate, its range of query heads and its range of key and value heads."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """Query heads to a key head, of every coordinate."""
        pairs = zip(self.queries, self.keys, strict=True)
        return tuple((q_stop - q) // (k_stop - k) for (q, q_stop), (k, k_stop) in pairs)


def split_heads(heads: int, kv_heads: int, parts: int, *, rows: int = 1, of: str = "attention") -> HeadSplit:
    """Deals heads out. See [Note: heads and their keys].

    Raises PlanError for fewer heads than parts, and for kv heads that do not divide them; `rows` are the
    grid's, for what it says to try.
    """
    if parts == 1:
        return HeadSplit(((0, heads),), ((0, kv_heads),))
    given = f"heads={heads} kv heads={kv_heads} columns={parts}"
    if heads % kv_heads:
        raise PlanError(
            f"the heads of {of} cannot be cut, as each has not one key head",
            given=given,
            expected="kv heads that divide the heads",
            hint=f"{_grid(rows, 1)}, or a tensor_plan that leaves {of} whole",
        )
    if heads < parts:
        raise PlanError(
            f"the heads of {of} cannot be cut over {parts} columns",
            given=given,
            expected="at least one head on every column",
            hint=" or ".join(_grid(rows, cols) for cols in _fitting(heads, parts)),
        )
    group = heads // kv_heads
    if parts <= kv_heads:
        keys = split(kv_heads, parts)
        return HeadSplit(tuple((start * group, stop * group) for start, stop in keys), keys)
    queries: list[Range] = []
    shared: list[Range] = []
    for key, (first, last) in enumerate(split(parts, kv_heads)):  # the columns that share this key head
        ranges = split(group, last - first)
        queries += [(key * group + start, key * group + stop) for start, stop in ranges]
        shared += [(key, key + 1)] * (last - first)
    return HeadSplit(tuple(queries), tuple(shared))


def _grid(rows: int, cols: int) -> str:
    return "tp=1" if rows == cols == 1 else f"tp={rows}x{cols}"


def _fitting(heads: int, parts: int) -> list[int]:
    """The largest two numbers of columns, below `parts`, over which `heads` divide."""
    below = range(min(heads, parts - 1), 0, -1)
    return [cols for cols in below if heads % cols == 0][:2]


class Style(Enum):
    """What becomes of a module. See [Note: one axis is a special case of two]."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"  # an embedding: vocabulary over col, features over row; summed over col
    FEATURE_EMBEDDING = (
        "table"  # an embedding that every column holds: features over row (positions, token types)
    )
    NORM = "norm"  # statistics over all of a feature dim that is cut; see LayerSharding.out
    PER_HEAD_NORM = "head norm"  # of each head by itself: whole weight, which every column adds to
    MLA_LATENT = "latent"  # DeepSeek's kv_a_proj: whole; of its output the rotary part is shared by all heads
    EXPERTS = "experts"  # a module of expert tensors: input whole, output summed over col
    REPLICATE = "whole"  # as it is, given whole features


@dataclass(frozen=True)
class DimSharding:
    """Which ranges of one dim of a whole tensor every coordinate along an axis has."""

    axis: str  # row or col
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each coordinate."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    def sharers(self, coord: int) -> tuple[int, ...]:
        """The coordinates that have what this one has, itself among them."""
        return tuple(c for c, ranges in enumerate(self.ranges) if ranges == self.ranges[coord])


@dataclass(frozen=True)
class LayerSharding:
    """What becomes of one module.

    out, inp    the cut of its output and of its input features; None: whole. An embedding's `inp` is its
                vocabulary; a norm has `out` alone, whose axis its statistics are taken over; a WHOLE layer
                gathers its input where it has `inp` and keeps its piece of the output where it has `out`
    transposed  its weight is stored (in, out), as transformers' Conv1D does
    gathers     COLUMN: its output is gathered over `col`, and whole on every rank
    splits      ROW: its input is whole; this rank takes its features of it
    head        COLUMN: gives the logits; they stay cut over the vocabulary where nobody asks for them whole
    """

    module: str
    style: Style
    out: DimSharding | None = None
    inp: DimSharding | None = None
    transposed: bool = False
    gathers: bool = False
    splits: bool = False
    head: bool = False


@dataclass(frozen=True)
class ParamSharding:
    """What becomes of one parameter.

    dims        the cut of each of its dims, None for a whole one
    partial     every column computes a part of its gradient, although all hold the same piece
    """

    name: str
    dims: tuple[DimSharding | None, ...]
    partial: bool = False

    def ranges(self, shape: Sequence[int], row: int, col: int) -> tuple[tuple[Range, ...], ...]:
        """Of every dim of the whole, what the rank at this place holds."""
        assert len(shape) == len(self.dims), f"{self.name}: {len(self.dims)} cuts for shape {tuple(shape)}"
        place = {"row": row, "col": col}
        return tuple(
            ((0, size),) if cut is None else cut.ranges[place[cut.axis]]
            for size, cut in zip(shape, self.dims, strict=True)
        )

    def sharers(self, cols: int, col: int) -> tuple[int, ...]:
        """The `col` coordinates whose gradients of this piece are parts of a sum; () where none is."""
        over_col = self._along("col")
        found = over_col.sharers(col) if over_col is not None else tuple(range(cols)) if self.partial else ()
        return found if len(found) > 1 else ()

    def copies(self, rows: int, cols: int, col: int) -> int:
        """How many ranks of the grid hold this piece."""
        over_col = self._along("col")
        along_row = 1 if self._along("row") is not None else rows
        return along_row * (cols if over_col is None else len(over_col.sharers(col)))

    def is_first(self, row: int, col: int) -> bool:
        """Whether this rank is the first that holds its piece: the one that counts it in a norm."""
        over_row, over_col = self._along("row"), self._along("col")
        first_row = row if over_row is not None else 0
        first_col = over_col.sharers(col)[0] if over_col is not None else 0
        return (row, col) == (first_row, first_col)

    def _along(self, axis: str) -> DimSharding | None:
        return next((cut for cut in self.dims if cut is not None and cut.axis == axis), None)


@dataclass(frozen=True)
class ArgumentSharding:
    """What a module is handed for all heads, and takes its own of: ALiBi's slopes.

    argument    its keyword
    dim         the dim that counts heads, or the batch and the heads folded into one, heads inner. Where its
                size is no multiple of `heads`, the argument has nothing of heads and stays
    heads       of the whole
    cut         which heads each column has
    """

    module: str
    argument: str
    dim: int
    heads: int
    cut: DimSharding


@dataclass(frozen=True)
class TPPlan:
    """What becomes of a model on a grid of `rows` x `cols`. Parameters that are not named are whole.

    layers      modules whose forward changes
    parameters  by the names that the model's `named_parameters` gives (a tied one once)
    regions     modules in which features are cut over `col` (heads, ffn): attention, mlp, or a lone COLUMN
                layer, whose lone ROW layer ends it. Outside of them lies the residual stream
    pure        of regions: every weight in it that reads the region's input is cut (COLUMN), so that the
                gradients of its input are parts on every column
    attributes  (module, attribute, its value at each `col` coordinate): what a module counts itself
    arguments   what modules are handed for all heads
    """

    rows: int
    cols: int
    layers: tuple[LayerSharding, ...] = ()
    parameters: tuple[ParamSharding, ...] = ()
    regions: tuple[str, ...] = ()
    pure: frozenset[str] = frozenset()
    attributes: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    arguments: tuple[ArgumentSharding, ...] = ()

    def within(self, has: Callable[[str], bool]) -> "TPPlan":
        """What of it is about modules that `has` says yes to, by name."""
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if has(layer.module)),
            regions=tuple(name for name in self.regions if has(name)),
            attributes=tuple(found for found in self.attributes if has(found[0])),
            arguments=tuple(found for found in self.arguments if has(found.module)),
        )

    @property
    def logit_columns(self) -> tuple[Range, ...] | None:
        """(start, stop) of the vocabulary at each `col` coordinate; None where logits are whole."""
        head = next((layer for layer in self.layers if layer.head), None)
        if head is None or head.out is None:
            return None
        assert all(len(ranges) == 1 for ranges in head.out.ranges), "logits in one run per column"
        return tuple(ranges[0] for ranges in head.out.ranges)


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a whole tensor: start and stop per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Box":
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
    def full(cls, shape: Sequence[int]) -> "Boxes":
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


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
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
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))
