"""Layers and parameters that no table of styles knows: sharded and marked as a run shows.

A wrapper around a layer that has a style (an adapter) passes the style on to that layer: the largest one in
it. What the wrapper adds is placed by what it meets; see columns.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from plait.models.sharding.builder import TPPlanBuilder, add_linear, linear_features
from plait.models.sharding.columns import Columns, misfit
from plait.models.sharding.features import Features
from plait.models.sharding.heads import shard_over_col
from plait.models.sharding.styles import StyleSpec
from plait.plan.sharding import DimSharding, LayerSharding, ParamSharding, Style


def find_adapted(builder: TPPlanBuilder) -> None:
    """Give the styles of wrapped linear layers and embeddings to the layers inside."""
    for name, spec in [*builder.specs.items()]:
        module = builder.modules.get(name)
        is_moved = module is not None and spec.style in (Style.COLUMN, Style.ROW, Style.VOCABULARY)
        inner = adapted_layer(builder, name, spec.style) if is_moved else None
        if inner not in (None, name):
            del builder.specs[name]
            builder.wrappers.add(name)
            builder.specs.setdefault(inner, spec)


def adapted_layer(builder: TPPlanBuilder, name: str, style: Style | None) -> str | None:
    """The layer that the module `name` with this style is or wraps: the largest one."""
    layers = [path for path in builder.inside(name) if _is_layer(builder.modules[path], style)]
    return max(layers, key=lambda path: builder.modules[path].weight.numel(), default=None)


def _is_layer(module: nn.Module, style: Style | None) -> bool:
    return isinstance(module, nn.Embedding) if style is Style.VOCABULARY else linear_features(module) is not None


def place_layers(builder: TPPlanBuilder, columns: Columns, *, sequence: bool) -> None:
    """Shard what has got a style in the run."""
    both = columns.complete & (columns.summed | columns.placed.keys())
    if both:
        given = "is used with features or tokens that only this column has, and with those of all"
        raise misfit(builder, min(both), given, sequence=sequence)
    for name, (style, features) in _in_equal_blocks(columns, columns.placed).items():
        sharding = None
        if features is not None:
            size = _size(builder, name, style)
            sharding = _sharding(builder, features, size)
            if sharding is None:
                raise misfit(builder, name, f"{size} features of unknown order", sequence=sequence)
        if name in builder.shapes:
            assert sharding is not None
            builder.shard_parameter(name, (sharding, *[None] * (len(builder.shapes[name]) - 1)))
            continue
        spec = StyleSpec(style, splits=features is None)
        if style is Style.COLUMN and features is not None:
            like = [of for of, _ in sorted(features.sources) if of in builder.specs and of in builder.layers]
            spec = builder.specs[like[0]] if like else spec
        builder.specs[name] = spec
        add_linear(
            builder, name, spec, lambda size, s=sharding, n=name, of=spec: s or shard_over_col(builder, n, of, size)
        )


def _in_equal_blocks(columns: Columns, placed: Mapping[str, tuple[Style, Features | None]]) -> dict[str, tuple[Style, Features | None]]:
    found = dict(placed)
    for block, first in columns.equal.items():
        for name, (style, features) in placed.items():
            if name.startswith(f"{first}."):
                if features is not None:
                    sources = frozenset((block + of[len(first) :] if of.startswith(f"{first}.") else of, count) for of, count in features.sources)
                    features = replace(features, sources=sources)
                found[block + name[len(first) :]] = style, features
    return found


def _size(builder: TPPlanBuilder, name: str, style: Style) -> int:
    if name in builder.shapes:
        return builder.shapes[name][0]
    features = linear_features(builder.modules[name])
    assert features is not None, "a linear layer"
    return features[0] if style is Style.COLUMN else features[1]


def _sharding(builder: TPPlanBuilder, features: Features, size: int) -> DimSharding | None:
    """The sharding of a dim of this size that holds such features; None if it is unknown."""
    found: list[tuple[bool, DimSharding]] = []
    for name, parts in sorted(features.sources):
        if name in builder.layers:
            sharding, layer = builder.layers[name].out, linear_features(builder.modules[name])
            full = 0 if layer is None else layer[0]
        elif name in builder.parameters:
            dims = builder.parameters[name].dims
            at = next(index for index, dim in enumerate(dims) if dim is not None and dim.axis == "col")
            sharding, full = dims[at], builder.shapes[name][at]
        else:
            continue
        width = full // parts
        if sharding is None or not width:
            continue
        own = [[edge for edge in ranges if edge[1] <= width] for ranges in sharding.ranges]
        if all(position * size % width == 0 for ranges in own for edge in ranges for position in edge):
            scaled = tuple(tuple((a * size // width, b * size // width) for a, b in ranges) for ranges in own)
            found.append((width != size, DimSharding("col", scaled)))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def mark_sums(builder: TPPlanBuilder, columns: Columns, pure: frozenset[str], *, sequence: bool) -> None:
    """Mark parameters whose gradients are sums over columns: see `plan.py` [Note: partial gradients]."""
    for region in columns.streams - pure:
        raise misfit(builder, region, "its input meets features that only this column has", sequence=sequence)
    for table in [name for name in builder.layers if builder.style_of(name) is Style.VOCABULARY]:
        for name in builder.inside(table):
            for full_name in builder.own_parameters(name).values():
                _mark_partial(builder, full_name)
    summed = set(columns.summed)
    for block, first in columns.equal.items():
        summed |= {block + name[len(first) :] for name in columns.summed if name.startswith(f"{first}.")}
    for name in sorted(summed):
        if name in builder.modules:
            features = linear_features(builder.modules[name])
            assert features is not None, "a linear layer"
            ranges = ((0, features[0]),)
            builder.specs[name] = StyleSpec(Style.MLA_LATENT, summed=ranges)
            builder.layers[name] = LayerSharding(name, Style.MLA_LATENT, summed=ranges)
        else:
            _mark_partial(builder, name)


def columns_by_names(builder: TPPlanBuilder, regions: Sequence[str], *, sequence: bool) -> Columns:
    """The sums of a model that does not run on meta: parameters between regions, and biases of ROW layers.

    Raises ModelError for a parameter in a region that has no style, unless the model is as its family builds it.
    """
    columns, is_family = Columns(), _is_as_built(builder.pretrained)
    for module in builder.modules:
        for key, name in builder.own_parameters(module).items():
            is_inside = any(name.startswith(f"{region}.") for region in regions)
            is_bias = key == "bias" and builder.style_of(module) is Style.ROW
            if builder.block_of(name) is not None and sequence and (is_bias or not is_inside):
                columns.summed.add(name)
            is_known = name in builder.parameters or is_bias or {name, module} & builder.specs.keys()
            if is_inside and not is_known and not is_family:
                given = "has no style, and the model does not run on meta; example_batch= may change that"
                raise misfit(builder, name, given, sequence=sequence)
    return columns


def _is_as_built(model: nn.Module | None) -> bool:
    """Return whether a model of transformers has the modules and parameters that its configuration gives."""
    if model is None:
        return False
    with torch.device("meta"):
        built = type(model)(model.config)  # type: ignore[call-arg]

    def contents(of: nn.Module) -> dict[str, object]:
        types = {name: type(module) for name, module in of.named_modules()}
        return types | {name: tuple(parameter.shape) for name, parameter in of.named_parameters()}

    return contents(built) == contents(model)


def _mark_partial(builder: TPPlanBuilder, full_name: str) -> None:
    """Mark a parameter, unless its shards differ between columns."""
    unsharded = ParamSharding(full_name, (None,) * len(builder.shapes[full_name]))
    param = builder.parameters.get(full_name, unsharded)
    is_over_col = any(sharding is not None and sharding.axis == "col" for sharding in param.dims)
    builder.parameters[full_name] = replace(param, partial=not is_over_col)
