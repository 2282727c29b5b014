"""Sharding of dims over columns: by the heads of an attention, or by declared units.

[Note: heads of a layer]
A layer's heads are those of the nearest module that contains it and

1. is declared to have numbers of its own, `local:num_heads,width` (a user's plan), or
2. is an attention by its name or its class's, and has a head count itself or in its configuration.

In the first case the number of heads is the greatest common divisor of those numbers, unless layers declare
the width of a head (`/64`). In the second, there are `num_attention_heads` query heads, and
`num_key_value_groups` times fewer key heads, under any of the known names; the layers of keys and values are
recognized by their names. A head's width is the layer's width divided by the heads, so that gates next to
queries, and latent projections, are sharded correctly too.

[Note: packed sizes]
Projections of mixers pack parts of unequal width. `64x64+64x64+1x128+1x128+64x1` is 64 heads of 64 features,
twice, then two parts of 128 features, then a number for each head. The heads (or groups of heads) of all
parts are split alike. A part that is one unit is read in full on every column, with the heads of that column:

  - of a COLUMN layer, the weight is sharded all the same: the part's features are split over the columns, and
    the output's are gathered. Their gradient is a sum over columns.
  - of a convolution, which has few weights, every column has all of them, and reads those of its channels.
    The gradient is a partial sum on every column.

Also norms of queries and keys.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import ModelError, PlanError
from plait.models.sharding.builder import (
    TPPlanBuilder,
    concatenated,
    linear_features,
    one_range_each,
    part_width,
)
from plait.models.sharding.styles import Sizes, StyleSpec, replicate_hint, sizes_text
from plait.plan.axes import FEATURES
from plait.plan.sharding import (
    DimSharding,
    HeadSplit,
    LayerSharding,
    Style,
    split,
    split_heads,
    split_width,
)

NUM_HEADS_NAMES = ("num_heads", "num_attention_heads", "n_head", "n_heads")
NUM_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
NUM_GROUPS_NAMES = ("num_key_value_groups", "n_rep")
TOTAL_WIDTH_NAMES = ("split_size", "embed_dim", "all_head_size")  # of all heads together

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_KV_LAYER_NAMES = {"k_proj", "v_proj", "k", "v", "key", "value", "key_proj", "value_proj", "wk", "wv"}


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module. `is_declared`: by the user's plan."""

    module: str
    num_heads: int
    num_kv_heads: int
    split: HeadSplit
    is_declared: bool = False

    def queries(self, width: int) -> DimSharding:
        """The sharding of a dim in which every query head has `width` elements."""
        return one_range_each(FEATURES, [(start * width, stop * width) for start, stop in self.split.queries])

    def keys(self, width: int) -> DimSharding:
        return one_range_each(FEATURES, [(start * width, stop * width) for start, stop in self.split.keys])

    def grouped(self, width: int) -> DimSharding:
        """The sharding of [kv head][its query heads, key, value], each `width` wide, by kv heads."""
        return self.keys((self.num_heads // self.num_kv_heads + 2) * width)


def find_heads(builder: TPPlanBuilder, name: str) -> Heads | None:
    """Return the heads of the attention that contains a layer or parameter: [Note: heads of a layer]."""
    path = attention_of(builder, name)
    if path is None:
        return None
    spec = builder.specs.get(path)
    if spec is not None and spec.attributes:
        return _declared_heads(builder, path, spec.attributes)
    counts = head_counts(builder, path)
    assert counts is not None, "an attention has a head count"
    return Heads(path, *counts, split_heads(*counts, builder.cols, rows=builder.rows, of=path))


def attention_of(builder: TPPlanBuilder, name: str) -> str | None:
    """Return the nearest module with heads that contains a layer or parameter: [Note: heads of a layer]."""
    block = builder.block_of(name)
    for path in builder.ancestors(name):
        spec = builder.specs.get(path)
        if spec is not None and spec.attributes:
            return path
        if path == block:
            return None
        names = path.rpartition(".")[2], type(builder.modules[path]).__name__
        if (
            path not in builder.wrappers
            and any(map(_ATTENTION.search, names))
            and head_counts(builder, path) is not None
        ):
            return path
    return None


def head_counts(builder: TPPlanBuilder, attention: str) -> tuple[int, int] | None:
    """(query heads, key heads) of an attention module; None if neither it nor the configuration has them."""
    module = builder.modules[attention]
    heads, groups, keys = (
        _first_positive_int(module, names)
        for names in (NUM_HEADS_NAMES, NUM_GROUPS_NAMES, NUM_KV_HEADS_NAMES)
    )
    heads = heads or _first_positive_int(builder.config, NUM_HEADS_NAMES)
    if heads is None:
        return None
    if groups and heads % groups == 0:
        return heads, heads // groups
    if keys is None and _has_narrow_keys(builder, attention):
        keys = _first_positive_int(builder.config, NUM_KV_HEADS_NAMES)
    return heads, keys or heads


def _has_narrow_keys(builder: TPPlanBuilder, attention: str) -> bool:
    """Return whether its key layer is narrower than another: the configured key heads may be unused."""
    widths = {
        name: features[0]
        for name in builder.inside(attention)
        if (features := linear_features(builder.modules[name])) is not None
    }
    keys = [width for name, width in widths.items() if name.rpartition(".")[2] in _KV_LAYER_NAMES]
    return bool(keys) and min(keys) < max(widths.values())


def _first_positive_int(of: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(of, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _declared_heads(builder: TPPlanBuilder, module: str, attributes: tuple[str, ...]) -> Heads:
    values = _attribute_values(builder, module, attributes)
    counts = _declared_head_counts(builder, module)
    num_heads, num_kv_heads = (max(counts), min(counts)) if counts else (math.gcd(*values),) * 2
    heads = split_heads(num_heads, num_kv_heads, builder.cols, rows=builder.rows, of=module)
    return Heads(module, num_heads, num_kv_heads, heads, is_declared=True)


def _attribute_values(builder: TPPlanBuilder, module: str, attributes: tuple[str, ...]) -> list[int]:
    values = []
    for key in attributes:
        value = getattr(builder.modules[module], key, None)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(
                f"the tensor plan divides an attribute of {module} that is not a positive integer",
                given=f"{key}={value!r}",
                expected="an integer that counts heads or their features",
                hint=replicate_hint(module),
            )
        values.append(value)
    return values


def _declared_head_counts(builder: TPPlanBuilder, module: str) -> list[int]:
    """The numbers of heads of the module's layers that declare the width of one."""
    counts = []
    for name in builder.inside(module):
        spec, features = builder.specs.get(name), linear_features(builder.modules[name])
        if spec is not None and spec.multiple and features is not None:
            width = part_width(features[0 if spec.style is Style.COLUMN else 1], spec.parts, name)
            if width % spec.multiple:
                raise PlanError(
                    f"cannot shard {name} by heads",
                    given=f"{width} features, heads of {spec.multiple}",
                    expected=f"a multiple of {spec.multiple} features",
                    hint=replicate_hint(name),
                )
            counts.append(width // spec.multiple)
    return counts


def shard_over_col(builder: TPPlanBuilder, name: str, spec: StyleSpec, size: int) -> DimSharding:
    """Shard the features of a layer or parameter, `size` in all, over the columns."""
    if spec.sizes:
        return _shard_sizes(builder, name, spec.sizes, size, is_replicated=False)
    width = part_width(size, spec.parts, name)
    sharding = _shard_part_over_col(builder, name, spec, width)
    return concatenated([(sharding, width)] * spec.parts)


def used_sizes(builder: TPPlanBuilder, name: str, sizes: Sizes, size: int) -> DimSharding:
    """The features of a packed dim that the code of each column reads. See [Note: packed sizes]."""
    return _shard_sizes(builder, name, sizes, size, is_replicated=True)


def _shard_sizes(
    builder: TPPlanBuilder, name: str, sizes: Sizes, size: int, *, is_replicated: bool
) -> DimSharding:
    if sum(units * width for units, width in sizes) != size:
        raise ModelError(
            f"the tensor plan's sizes are not those of {name}",
            given=f"{sizes_text(sizes)}, of {size} features",
            expected="sizes that add up to its features",
            hint=replicate_hint(name),
        )
    parts = []
    for units, width in sizes:
        count, each = (width, 1) if units == 1 else (units, width)
        ranges = split(count, builder.cols, of=f"the heads of {name}")
        if is_replicated and units == 1:
            ranges = ((0, width),) * builder.cols
        own = one_range_each(FEATURES, [(start * each, stop * each) for start, stop in ranges])
        parts.append((own, units * width))
    return concatenated(parts)


def _shard_part_over_col(builder: TPPlanBuilder, name: str, spec: StyleSpec, width: int) -> DimSharding:
    cols = builder.cols
    if spec.gathers or spec.splits or spec.head:
        return one_range_each(FEATURES, split_width(width, cols, of=name))
    heads = find_heads(builder, name)
    if spec.multiple and (heads is None or not heads.is_declared):
        return one_range_each(FEATURES, split(width, cols, spec.multiple, of=name))
    if heads is None:
        return one_range_each(FEATURES, split_width(width, cols, of=name))
    if spec.grouped:
        if cols > heads.num_kv_heads:
            raise PlanError(
                f"cannot shard {name}: it packs queries with their keys, which columns then cannot share",
                given=f"kv heads={heads.num_kv_heads} columns={cols}",
                expected=f"at most {heads.num_kv_heads} columns",
                hint=f"tp=1x{heads.num_kv_heads}, or colwise_gather_output",
            )
        return heads.grouped(_head_width(width, heads.num_heads + 2 * heads.num_kv_heads, name, heads))
    is_key = spec.style is Style.COLUMN and bool(_KV_LAYER_NAMES & set(name[len(heads.module) :].split(".")))
    if heads.is_declared:
        is_key = spec.multiple is not None and width // spec.multiple == heads.num_kv_heads != heads.num_heads
    if is_key:
        return heads.keys(_head_width(width, heads.num_kv_heads, name, heads))
    return heads.queries(_head_width(width, heads.num_heads, name, heads))


def is_of_heads(builder: TPPlanBuilder, name: str, size: int) -> bool:
    """Return whether a layer's features in an attention, `size` in all, can be sharded by its heads."""
    try:
        _shard_part_over_col(builder, name, StyleSpec(Style.COLUMN), size)
    except PlanError:
        return False
    return True


def _head_width(size: int, count: int, name: str, heads: Heads) -> int:
    if size % count:
        raise PlanError(
            f"cannot shard {name} by heads",
            given=f"{size} features, heads={heads.num_heads} kv heads={heads.num_kv_heads}",
            expected="a multiple of the heads, or a tensor_plan that declares how it is packed",
            hint=replicate_hint(f"{heads.module}.*"),
        )
    return size // count


def check_heads(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Raise ModelError for a ROW layer with one output per head: sharded code expects its own heads' only."""
    features = linear_features(builder.modules[name])
    is_by_heads = spec.style is Style.ROW and not (spec.splits or spec.sizes or spec.is_inner)
    if not is_by_heads or features is None or builder.cols == 1:
        return
    heads = find_heads(builder, name)
    if heads is not None and not heads.is_declared and features[0] in (heads.num_heads, heads.num_kv_heads):
        raise ModelError(
            f"{name} outputs one number per head, but each column has only its own heads",
            given=f"{features[0]} features, heads={heads.num_heads} kv heads={heads.num_kv_heads} "
            f"columns={builder.cols}",
            expected="a rowwise layer whose output is the residual stream's features",
            hint=replicate_hint(f"{heads.module}.*"),
        )


def add_head_attributes(builder: TPPlanBuilder, heads: Heads) -> None:
    """Add the head counts and widths that an attention module keeps as attributes, per column."""
    module, head_split = builder.modules[heads.module], heads.split
    queries = [stop - start for start, stop in head_split.queries]
    keys = [stop - start for start, stop in head_split.keys]

    def put(key: str, values: Sequence[int]) -> None:
        builder.attributes[heads.module, key] = tuple(values)

    if heads.is_declared:
        for key in builder.specs[heads.module].attributes:
            put(key, _scale_to_columns(heads, key, getattr(module, key), queries, keys))
        return
    head_dim = getattr(module, "head_dim", None) or 0
    for names, value, values in (
        (NUM_HEADS_NAMES, heads.num_heads, queries),
        (NUM_KV_HEADS_NAMES, heads.num_kv_heads, keys),
        (NUM_GROUPS_NAMES, heads.num_heads // heads.num_kv_heads, head_split.groups),
        (TOTAL_WIDTH_NAMES, heads.num_heads * head_dim, [head_dim * count for count in queries]),
    ):
        for key in names:
            if getattr(module, key, None) == value:
                put(key, values)


def _scale_to_columns(heads: Heads, key: str, value: int, queries: list[int], keys: list[int]) -> list[int]:
    if value % heads.num_heads == 0:
        return [value // heads.num_heads * count for count in queries]
    if value % heads.num_kv_heads == 0 and heads.num_kv_heads != heads.num_heads:
        return [value // heads.num_kv_heads * count for count in keys]
    if value == heads.num_heads // heads.num_kv_heads:
        return list(heads.split.groups)
    raise PlanError(
        f"an attribute of {heads.module} cannot be divided like its heads",
        given=f"{key}={value}, heads={heads.num_heads}, at {len(queries)} columns",
        expected="a multiple of the number of heads",
        hint=f"a plan without local:{key}, or tp=1",
    )


_QK_NORM = re.compile(r"^(q|k|query|key)_?(layer_?)?(norm|ln)$")


def add_head_norm(builder: TPPlanBuilder, name: str) -> None:
    """Add a norm of each head separately: one weight for all heads, or one for each."""
    builder.layers[name] = LayerSharding(name, Style.PER_HEAD_NORM)
    heads = find_heads(builder, name)
    columns = _sibling_column_layers(builder, name)
    for full_name in builder.own_parameters(name).values() if columns else ():
        shape = builder.shapes[full_name]
        over_heads = _shard_heads_dim(heads, shape)
        if over_heads is not None:
            builder.shard_parameter(full_name, (over_heads, *([None] * (len(shape) - 1))))
        else:
            builder.shard_parameter(full_name, [None] * len(shape), partial=True)


def is_head_norm(builder: TPPlanBuilder, name: str) -> bool:
    """Return whether it is a norm of queries or keys, by its name: it reads the outputs of projections."""
    return _QK_NORM.match(name.rpartition(".")[2]) is not None and builder.is_norm(name)


def add_undeclared_head_norms(builder: TPPlanBuilder) -> None:
    """Add norms that are named like norms of queries or keys but have no style in the plan.

    As wide as a head: a norm per head. As wide as all heads together, it needs them all: raises ModelError.
    """
    for name in builder.modules:
        if name in builder.specs or not is_head_norm(builder, name):
            continue
        columns = _sibling_column_layers(builder, name)
        heads, own = find_heads(builder, name), builder.own_parameters(name)
        if not columns or heads is None or not own:
            continue
        shape = builder.shapes[next(iter(own.values()))]
        widths = [
            features[0] for layer in columns if (features := linear_features(builder.modules[layer.module]))
        ]
        count = heads.num_kv_heads if name.rpartition(".")[2].startswith("k") else heads.num_heads
        if shape[0] * count in widths or _shard_heads_dim(heads, shape) is not None:
            add_head_norm(builder, name)
        elif shape[0] in widths and builder.cols > 1:
            raise ModelError(
                f"{name} takes its statistics over all heads, which are sharded over columns",
                given=f"{shape[0]} features, heads={heads.num_heads}, columns={builder.cols}",
                expected="a norm per head, or projections that are gathered",
                hint="colwise_gather_output for the projections and rowwise_split_input for the last layer",
            )


def _sibling_column_layers(builder: TPPlanBuilder, name: str) -> list[LayerSharding]:
    """The layers in the same module whose output is this column's own heads."""
    parent = name.rpartition(".")[0]
    return [
        layer
        for key, layer in builder.layers.items()
        if key.startswith(f"{parent}.") and layer.style is Style.COLUMN and not layer.gathers
    ]


def _shard_heads_dim(heads: Heads | None, shape: tuple[int, ...]) -> DimSharding | None:
    if heads is None or len(shape) < 2:
        return None
    if shape[0] == heads.num_heads:
        return heads.queries(1)
    return heads.keys(1) if shape[0] == heads.num_kv_heads else None
