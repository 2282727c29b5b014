"""How layers are sharded over the grid's `row` and `col` axes: index arithmetic, no tensors.

[Note: one-dimensional tp as a special case]
The residual stream's features are sharded over `row`; heads and ffn features over `col`.

  style    weight: out, in     input      summed over: forward, backward    output
  COLUMN   col, row            over row   row, col                          over col
  ROW      row, col            over col   col, row                          over row

A ROW layer takes the output layout of a COLUMN layer and vice versa, so nothing is redistributed between
them. With one row this is Megatron-LM (Shoeybi et al. 1909.08053, section 3); with ZeRO 3 along `shard` it is
AxoNN's grid (Singh et al. 2305.13525, section 3): X = col, Y = row, Z = shard.

[Note: uneven and shared shards]
Every coordinate of an axis has ranges of a tensor's dim: one, or several (a packed projection has one per
part), of any length. Coordinates with equal ranges hold the same shard, as with fewer kv heads than columns.
Each of them computes a partial sum of its gradient.

[Note: grouped query heads]
Query heads share a key and value head in groups of heads / kv_heads. A rank has complete groups or a part
of one group, never parts of two. So on every rank the number of query heads is a multiple of the number of
key heads, and attention pairs them by the same rule as in the full model.

Boxes: which elements of a full tensor a rank holds, as plain numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, product

from plait.errors import PlanError
from plait.plan.axes import FEATURES, HIDDEN

Range = tuple[int, int]  # start and stop

ALIGNED = 8  # elements: shards of wide dims start at a multiple of it


def split(size: int, parts: int, unit: int = 1, *, of: str = "features") -> tuple[Range, ...]:
    """Split `size` into contiguous ranges, one per part, as even as multiples of `unit` allow; none is empty.

    The first parts get the units that do not divide, the last one the incomplete unit. Raises PlanError for
    fewer units than parts; `of` names what is split.
    """
    units = size // unit
    if units < parts:
        raise PlanError(
            f"cannot split {of} into {parts} shards",
            given=f"{size} in units of {unit}",
            expected="at least one unit on every rank",
            hint=f"tp with at most {units} ranks along that axis",
        )
    each, extra = divmod(units, parts)
    stops = [(each * (part + 1) + min(part + 1, extra)) * unit for part in range(parts - 1)] + [size]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def split_width(size: int, parts: int, *, of: str = "features") -> tuple[Range, ...]:
    """Split a width (hidden, ffn, vocabulary): the same ranges wherever the width is `size`.

    In multiples of eight if every shard has at least about sixty-four, for the sake of matrix products.
    """
    return split(size, parts, ALIGNED if size >= 8 * ALIGNED * parts else 1, of=of)


@dataclass(frozen=True)
class HeadSplit:
    """Ranges of query heads and of key and value heads, by coordinate."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """Query heads per key head, by coordinate."""
        pairs = zip(self.queries, self.keys, strict=True)
        return tuple((q_stop - q) // (k_stop - k) for (q, q_stop), (k, k_stop) in pairs)


def split_heads(heads: int, kv_heads: int, parts: int, *, rows: int = 1, of: str = "attention") -> HeadSplit:
    """Assign heads to columns. See [Note: grouped query heads].

    Raises PlanError for fewer heads than parts, and for heads that are not a multiple of kv heads; `rows`:
    the grid's, for the hint.
    """
    if parts == 1:
        return HeadSplit(((0, heads),), ((0, kv_heads),))
    given = f"heads={heads} kv heads={kv_heads} columns={parts}"
    if heads % kv_heads:
        raise PlanError(
            f"cannot shard the heads of {of}: num_heads is not a multiple of num_kv_heads",
            given=given,
            expected="num_heads divisible by num_kv_heads",
            hint=f"{_grid(rows, 1)}, or a tensor_plan that replicates {of}",
        )
    if heads < parts:
        raise PlanError(
            f"cannot shard the heads of {of} over {parts} columns",
            given=given,
            expected="at least one head on every column",
            hint=" or ".join(_grid(rows, cols) for cols in _divisors(heads, parts)),
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


def _divisors(heads: int, parts: int) -> list[int]:
    """The largest two numbers of columns, less than `parts`, that divide `heads`."""
    below = range(min(heads, parts - 1), 0, -1)
    return [cols for cols in below if heads % cols == 0][:2]


class Style(Enum):
    """How a module is sharded. See [Note: one-dimensional tp as a special case]."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"  # an embedding: vocabulary over col, features over row; output summed over col
    FEATURE_EMBEDDING = (
        "table"  # an embedding replicated over col: features over row (positions, token types)
    )
    NORM = "norm"  # statistics over a sharded feature dim; see LayerSharding.out
    PER_HEAD_NORM = "head norm"  # normalizes each head: replicated weight, gradient summed over col
    MLA_LATENT = "latent"  # DeepSeek's kv_a_proj: replicated, with a part that all heads read: see `summed`
    EXPERTS = "experts"  # a module of expert tensors: full input, output summed or gathered over col
    WEIGHT_NORM = "weight norm"  # DoRA's magnitudes: norms of a layer's weight, whose sharding they have
    DEPTHWISE = "depthwise"  # a convolution of each channel separately: channels over col
    REPLICATE = "replicated"  # unchanged, full features


@dataclass(frozen=True)
class DimSharding:
    """The ranges of one dim of a full tensor at every coordinate of an axis."""

    axis: str  # row or col
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements at each coordinate."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    def sharers(self, coord: int) -> tuple[int, ...]:
        """The coordinates with the same ranges as this one, itself included."""
        return tuple(c for c, ranges in enumerate(self.ranges) if ranges == self.ranges[coord])


@dataclass(frozen=True)
class LayerSharding:
    """How one module is sharded.

    out, inp    the sharding of its output and input features; None: full. For an embedding, `inp` is the
                vocabulary; a norm has only `out`, whose axis its statistics are taken over; a REPLICATE layer
                gathers its input if it has `inp` and keeps its shard of the output if it has `out`
    transposed  the weight is stored (in, out), as in transformers' Conv1D
    gathers     COLUMN: the output is all-gathered over `col`
    splits      ROW: the input is full; this rank takes its shard of the features. EXPERTS: each column has
                other experts, and takes its share of the tokens
    head        COLUMN: the output is the logits; they stay sharded over the vocabulary unless full ones are
                needed
    summed      ranges of a full output that every column reads with heads or channels of its own, so that
                their gradient is a sum over columns. A COLUMN layer sums its input's gradient itself
    uses        features that each column's code reads, if these are others than `out`. COLUMN: the others are
                gathered, and their gradients summed; DEPTHWISE: every column has all weights
    fused       DEPTHWISE: while training, the module around it would call one kernel for several layers
    """

    module: str
    style: Style
    out: DimSharding | None = None
    inp: DimSharding | None = None
    transposed: bool = False
    gathers: bool = False
    splits: bool = False
    head: bool = False
    summed: tuple[Range, ...] = ()
    uses: DimSharding | None = None
    fused: bool = False


@dataclass(frozen=True)
class ParamSharding:
    """How one parameter is sharded.

    dims        the sharding of each of its dims, None for a full one
    partial     every column computes a partial sum of its gradient, although all hold the same shard
    """

    name: str
    dims: tuple[DimSharding | None, ...]
    partial: bool = False

    def ranges(self, shape: Sequence[int], row: int, col: int) -> tuple[tuple[Range, ...], ...]:
        """The ranges of every dim of the full tensor that the rank at (row, col) holds."""
        assert len(shape) == len(self.dims), f"{self.name}: {len(self.dims)} dims for shape {tuple(shape)}"
        coord = {HIDDEN: row, FEATURES: col}
        return tuple(
            ((0, size),) if sharding is None else sharding.ranges[coord[sharding.axis]]
            for size, sharding in zip(shape, self.dims, strict=True)
        )

    def sharers(self, cols: int, col: int) -> tuple[int, ...]:
        """The `col` coordinates whose gradients of this shard are partial sums; () if there are none."""
        over_col = self._along(FEATURES)
        same = over_col.sharers(col) if over_col is not None else tuple(range(cols)) if self.partial else ()
        return same if len(same) > 1 else ()

    def copies(self, rows: int, cols: int, col: int) -> int:
        """Number of ranks of the grid that hold this shard."""
        over_col = self._along(FEATURES)
        along_row = 1 if self._along(HIDDEN) is not None else rows
        return along_row * (cols if over_col is None else len(over_col.sharers(col)))

    def is_first(self, row: int, col: int) -> bool:
        """True if this rank is the first that holds its shard: the one that counts it in a norm."""
        over_row, over_col = self._along(HIDDEN), self._along(FEATURES)
        first_row = row if over_row is not None else 0
        first_col = over_col.sharers(col)[0] if over_col is not None else 0
        return (row, col) == (first_row, first_col)

    def _along(self, axis: str) -> DimSharding | None:
        return next((dim for dim in self.dims if dim is not None and dim.axis == axis), None)


@dataclass(frozen=True)
class ExpertDim:
    """The dim of a parameter that has the experts of a layer, `repeats` times one after another. It has
    those of one of several equal parts: of this `index`, out of so many `parts`."""

    index: int = 0
    parts: int = 1
    dim: int = 0
    repeats: int = 1

    def ranges(self, size: int, rank: int, ranks: int) -> tuple[Range, ...]:
        """The elements of the dim, of this size, that one of several ranks has."""
        each = size // self.repeats
        start, stop = (
            min(max(self.parts * each * at // ranks - self.index * each, 0), each) for at in (rank, rank + 1)
        )
        if start >= stop:
            return ()
        return tuple((at * each + start, at * each + stop) for at in range(self.repeats))


@dataclass(frozen=True)
class ArgumentSharding:
    """An argument with values for all heads, of which a module takes those of its own heads, such as ALiBi's
    slopes.

    argument    its keyword
    dim         the dim of the heads, or of batch and heads folded into one, heads inner. If its size is not a
                multiple of `heads`, the argument has no per-head values and is passed unchanged
    heads       number of heads of the full model
    sharding    the heads of each column
    """

    module: str
    argument: str
    dim: int
    heads: int
    sharding: DimSharding


@dataclass(frozen=True)
class StyleLine:
    """A line of a plan's text: the style of a module or parameter, and of all that match the pattern.

    dims    the names of its weight's dims, or of the one that is sharded
    """

    name: str
    pattern: str
    style: str
    dims: str = ""


@dataclass(frozen=True)
class TPPlan:
    """How a model is sharded on a grid of `rows` x `cols`. Parameters that are not listed are replicated.

    layers      modules with a changed forward
    parameters  by their names in the model's `named_parameters` (a tied one once)
    regions     modules in which features are sharded over `col` (heads, ffn): attention, mlp, or a lone
                COLUMN layer, whose lone ROW layer ends it. Everything outside is the residual stream
    pure        regions in which every weight that reads the region's input is sharded (COLUMN), so that the
                gradients of the input are partial sums on every column
    attributes  (module, attribute, its value at each `col` coordinate): counts that modules store
    arguments   per-head arguments of modules
    lines       the styles that the plan was built from; `layout`: the rules that they follow from, if any
    """

    rows: int
    cols: int
    layers: tuple[LayerSharding, ...] = ()
    parameters: tuple[ParamSharding, ...] = ()
    regions: tuple[str, ...] = ()
    pure: frozenset[str] = frozenset()
    attributes: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    arguments: tuple[ArgumentSharding, ...] = ()
    lines: tuple[StyleLine, ...] = ()
    layout: str = ""

    def within(self, has: Callable[[str], bool]) -> "TPPlan":
        """The part of the plan about modules for which `has(name)` is true."""
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if has(layer.module)),
            regions=tuple(name for name in self.regions if has(name)),
            attributes=tuple(entry for entry in self.attributes if has(entry[0])),
            arguments=tuple(entry for entry in self.arguments if has(entry.module)),
        )

    @property
    def own_experts(self) -> frozenset[str]:
        """The modules whose experts are divided over columns."""
        return frozenset(
            layer.module for layer in self.layers if layer.style is Style.EXPERTS and layer.splits
        )

    def with_own_experts(
        self,
        module: str,
        dims: Mapping[str, ExpertDim],
        shapes: Mapping[str, Sequence[int]],
        number: int,
        ranks: int,
    ) -> "TPPlan":
        """The plan in which each column has other experts of a module; unchanged if they do not divide.
        `dims`: of its parameters, of these `shapes`. `ranks`: divide the experts first."""
        total = ranks * self.cols
        if number % total or self.cols == 1 or self.rows > 1:
            return self

        def over_col(dim: ExpertDim, size: int) -> DimSharding:
            ranges = [
                [r for rank in range(ranks) for r in dim.ranges(size, rank * self.cols + col, total)]
                for col in range(self.cols)
            ]
            return DimSharding(FEATURES, tuple(tuple(sorted(own)) for own in ranges))

        sharded = []
        for key, dim in dims.items():
            of_dim = over_col(dim, shapes[key][dim.dim])
            own = (of_dim if at == dim.dim else None for at in range(len(shapes[key])))
            sharded.append(ParamSharding(key, tuple(own)))
        layer = LayerSharding(module, Style.EXPERTS, splits=True)
        return replace(
            self,
            layers=(*(each for each in self.layers if each.module != module), layer),
            parameters=(*(each for each in self.parameters if each.name not in dims), *sharded),
        )

    @property
    def logit_columns(self) -> tuple[Range, ...] | None:
        """(start, stop) of the vocabulary at each `col` coordinate; None for unsharded logits."""
        head = next((layer for layer in self.layers if layer.head), None)
        if head is None or head.out is None:
            return None
        assert all(len(ranges) == 1 for ranges in head.out.ranges), "logits in several ranges per column"
        return tuple(ranges[0] for ranges in head.out.ranges)


@dataclass(frozen=True)
class TokenRegion:
    """A region under sequence parallelism. `is_closed`: nothing in it scatters tokens; `gathers`: its input's
    tokens are all-gathered."""

    is_closed: bool
    gathers: bool


def token_regions(
    layers: Sequence[LayerSharding], regions: Sequence[str], blocks: Sequence[str]
) -> dict[str, TokenRegion]:
    """Return the regions, and one for each linear layer of a block that is in none of them."""

    def is_in(name: str, ancestors: Sequence[str]) -> bool:
        return any(not of or name == of or name.startswith(f"{of}.") for of in ancestors)

    linear = {layer.module: layer for layer in layers if layer.style in (Style.COLUMN, Style.ROW)}
    lone = [name for name in linear if is_in(name, blocks) and not is_in(name, regions)]
    found = {}
    for name in (*regions, *lone):
        styles = {layer.style for layer in layers if is_in(layer.module, [name])}
        if name in linear:  # the input of a lone ROW layer has sharded features, and all tokens already
            is_column = linear[name].style is Style.COLUMN
            found[name] = TokenRegion(is_column and linear[name].gathers, is_column)
        else:
            found[name] = TokenRegion(Style.ROW not in styles or Style.EXPERTS in styles, gathers=True)
    return found


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a full tensor: start and stop per dim."""

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
        """The same box, in coordinates relative to the start of `outer`."""
        return Box(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)),
            tuple(a - b for a, b in zip(self.stop, outer.start, strict=True)),
        )

    def __and__(self, other: "Box") -> "Box":
        """The intersection; an empty box if they do not overlap."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(max(lo, min(a, b)) for lo, a, b in zip(start, self.stop, other.stop, strict=True))
        return Box(start, stop)


@dataclass(frozen=True)
class Boxes:
    """A grid of boxes of a full tensor: some ranges per dim. A rank holds them as one tensor."""

    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Boxes":
        return cls(tuple(((0, size),) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds them."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[Box]:
        for ranges in product(*self.ranges):
            yield Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))

    def parts(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """For `box` of the held tensor, yield (box of the full tensor, its position within `box`)."""
        for ranges in product(*(_overlaps(r, *edge) for r, edge in zip(self.ranges, box.edges, strict=True))):
            full = Box(tuple(w for w, _, _ in ranges), tuple(w + n for w, _, n in ranges))
            yield full, Box(tuple(at for _, at, _ in ranges), tuple(at + n for _, at, n in ranges))


def _overlaps(ranges: Sequence[Range], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(start in the full dim, start relative to `start`, length) of each part of [start, stop) of the
    concatenated ranges."""
    edges = accumulate((high - low for low, high in ranges), initial=0)
    parts = []
    for (low, high), edge in zip(ranges, edges, strict=False):
        first, last = max(start, edge), min(stop, edge + high - low)
        if first < last:
            parts.append((low + first - edge, first - start, last - first))
    return parts


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements [start, stop) of a flattened tensor, in order: at most 2 n - 1
    for n dims."""
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
