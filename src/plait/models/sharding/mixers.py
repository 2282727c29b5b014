"""Sharding inside of state-space and recurrent mixers: by channels, or by heads and groups of heads.

[Note: packed sizes]
Projections of mixers pack parts of unequal width. `64x64+64x64+1x128+1x128+64x1` is 64 heads of 64 features,
twice, then two parts of 128 features, then a number for each head. The heads (or groups of heads) of all
parts are split alike. A part that is one unit is read in full on every column, with the heads of that column:

  - of a COLUMN layer, the weight is sharded all the same: the part's features are split over the columns, and
    the output's are gathered. Their gradient is a sum over columns.
  - of a convolution, which has few weights, every column has all of them, and reads those of its channels.
    The gradient is a partial sum on every column.
"""

from dataclasses import replace

from torch import nn

from plait.errors import ModelError
from plait.models.sharding.builder import TPPlanBuilder, add_linear, linear_features
from plait.models.sharding.heads import shard_over_col
from plait.models.sharding.styles import Sizes, StyleSpec, replicate_hint, sizes_text
from plait.plan.axes import FEATURES
from plait.plan.sharding import DimSharding, LayerSharding, Range, Style, split


def shard_sizes(builder: TPPlanBuilder, name: str, sizes: Sizes, size: int) -> DimSharding:
    """Shard a packed dim, `size` wide, over the columns. See [Note: packed sizes]."""
    return _shard_sizes(builder, name, sizes, size, is_replicated=False)


def used_sizes(builder: TPPlanBuilder, name: str, sizes: Sizes, size: int) -> DimSharding:
    """The features of a packed dim that the code of each column reads."""
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
    ranges: list[list[Range]] = [[] for _ in range(builder.cols)]
    first = 0
    for units, width in sizes:
        count, each = (width, 1) if units == 1 else (units, width)
        parts = split(count, builder.cols, of=f"the heads of {name}")
        for own, (start, stop) in zip(ranges, parts, strict=True):
            is_all = is_replicated and units == 1
            own.append((first, first + width) if is_all else (first + start * each, first + stop * each))
        first += units * width
    return DimSharding(FEATURES, tuple(map(tuple, ranges)))


def add_mixer_linear(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a COLUMN or ROW layer with packed sizes, or a ROW layer that every column's channels read."""

    def over_col(size: int) -> DimSharding:
        return (
            shard_sizes(builder, name, spec.sizes, size)
            if spec.sizes
            else shard_over_col(builder, name, spec, size)
        )

    add_linear(builder, name, spec, over_col)
    features = linear_features(builder.modules[name])
    if features is None or builder.cols == 1:
        return
    if spec.is_inner:
        builder.layers[name] = replace(builder.layers[name], summed=((0, features[0]),))
    elif spec.style is Style.COLUMN and any(units == 1 for units, _ in spec.sizes):
        uses = used_sizes(builder, name, spec.sizes, features[0])
        builder.layers[name] = replace(builder.layers[name], uses=uses)


def add_depthwise(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a convolution of each channel separately."""
    module = builder.modules[name]
    if not isinstance(module, nn.Conv1d) or not module.groups == module.in_channels == module.out_channels:
        raise ModelError(
            f"{name} is not a depthwise convolution, and cannot be sharded over its channels",
            given=str(module),
            expected="nn.Conv1d with as many groups as channels",
            hint=replicate_hint(name),
        )
    own, channels = builder.own_parameters(name), module.groups
    is_full = any(units == 1 for units, _ in spec.sizes) and builder.cols > 1
    if spec.sizes:
        used = used_sizes(builder, name, spec.sizes, channels)
    else:
        used = shard_over_col(builder, name, spec, channels)
    builder.layers[name] = LayerSharding(
        name, Style.DEPTHWISE, uses=used if is_full else None, fused=spec.fused
    )
    for full_name in own.values():
        rest = [None] * (len(builder.shapes[full_name]) - 1)
        builder.shard_parameter(full_name, (None if is_full else used, *rest), partial=is_full)
    for key in ("in_channels", "out_channels", "groups"):
        builder.attributes[name, key] = used.sizes


def add_norm_over_columns(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a norm whose statistics are taken over the features of all columns, and its attributes that are as
    wide."""
    for full_name in builder.own_parameters(name).values():
        (size,) = builder.shapes[full_name]
        sharding = shard_sizes(builder, name, spec.sizes or ((size, 1),), size)
        builder.layers[name] = LayerSharding(name, Style.NORM, sharding)
        builder.shard_parameter(full_name, (sharding,))
        widths = [key for key, value in vars(builder.modules[name]).items() if value == size]
        builder.attributes |= {(name, key): sharding.sizes for key in widths}


def add_divided_attributes(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add attributes of a mixer that count what its columns read."""
    for key, sizes in spec.divided:
        value = getattr(builder.modules[name], key, None)
        if not isinstance(value, int):
            raise ModelError(
                f"the tensor plan divides an attribute of {name} that is not a positive integer",
                given=f"{key}={value!r}",
                expected="an integer that counts heads or their features",
                hint=replicate_hint(name),
            )
        builder.attributes[name, key] = used_sizes(builder, f"{name}.{key}", sizes, value).sizes


def add_mixer_parameter(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a parameter of a mixer with numbers for each head or channel, along the first dim of that size."""
    shape, size = builder.shapes[name], sum(units * width for units, width in spec.sizes)
    over = shape.index(size) if size in shape else 0
    sharding = shard_sizes(builder, name, spec.sizes, shape[over])
    builder.shard_parameter(name, [sharding if dim == over else None for dim in range(len(shape))])
