"""Layers and parameters that no table of styles knows: sharded and marked as a run shows.

A wrapper around a layer that has a style (an adapter) passes the style on to that layer: the largest one in
it. What the wrapper adds is placed by what it meets; see columns.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.parameter_adapters import is_wrapper, parameter_adapters
from plait.models.sharding.builder import TPPlanBuilder, add_linear, linear_features
from plait.models.sharding.columns import Columns, misfit
from plait.models.sharding.features import Source
from plait.models.sharding.heads import shard_over_col
from plait.models.sharding.styles import StyleSpec
from plait.plan.axes import FEATURES
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
    for name, spec in [*builder.specs.items()]:  # one of two layers runs: peft's modules_to_save, or theirs
        wrapper, _, rest = name.partition(".original_module")
        copies = builder.inside(f"{wrapper}.modules_to_save") if name != wrapper and not rest else []
        for copy in copies:
            if _is_layer(builder.modules[copy], spec.style):
                builder.specs.setdefault(copy, spec)
                builder.heads |= {copy} if name in builder.heads else set()


def add_parameter_adapters(builder: TPPlanBuilder) -> None:
    """Shard the factors of adapters of experts as [Note: factors of experts] in `parameter_adapters.py` says.

    Raises ModelError for an adapter of another layer's parameter.
    """
    for name, module in builder.modules.items():
        if is_wrapper(module) and module.get_param().ndim != 3:  # type: ignore[operator]
            raise ModelError(
                "an adapter of a layer's parameter cannot be sharded",
                given=f"target_parameters of {name}, tp={builder.rows}x{builder.cols}",
                expected="target_parameters of experts, of three dims",
                hint="target_modules in their place, or tp=1",
            )
    for adapter in parameter_adapters(builder.model):
        if adapter.parameter in builder.parameters and builder.cols > 1:
            _, *dims = builder.parameters[adapter.parameter].dims
            out, inp = dims[::-1] if adapter.transposed else dims
            builder.shard_parameter(adapter.factor_A, (None, inp), partial=inp is None)
            builder.shard_parameter(adapter.factor_B, (out, None), partial=out is None)


def adapted_layer(builder: TPPlanBuilder, name: str, style: Style | None) -> str | None:
    """The layer that the module `name` with this style is or wraps: the largest one."""
    layers = [path for path in builder.inside(name) if _is_layer(builder.modules[path], style)]
    return max(layers, key=lambda path: _weight(builder.modules[path]).numel(), default=None)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "a layer with a weight"
    return weight


def _is_layer(module: nn.Module, style: Style | None) -> bool:
    return (
        isinstance(module, nn.Embedding) if style is Style.VOCABULARY else linear_features(module) is not None
    )


def place_layers(builder: TPPlanBuilder, columns: Columns, *, sequence: bool) -> None:
    """Shard what has got a style in the run. Raises MisfitError if no sum of a gradient is right."""
    if both := columns.complete & (columns.summed | columns.placed.keys()):
        given = "is used with features or tokens that only this column has, and with those of all"
        raise misfit(builder, min(both), given, sequence=sequence)
    for name, first in _with_equal(columns, columns.placed):
        style, features = columns.placed[first]
        sizes = builder.shapes.get(name) or linear_features(builder.modules[name]) or ()
        size = sizes[0 if style is Style.COLUMN else 1]
        counts = {} if features is None else dict(sorted(features.sources))
        block = builder.block_of(name)
        near = {of: counts[to] for of, to in _with_equal(columns, counts) if builder.block_of(of) == block}
        sharding = _sharding(builder, near.items(), size)
        if sharding is None and features is not None:
            raise misfit(builder, name, f"{size} features of unknown order", sequence=sequence)
        if name in builder.shapes:
            builder.shard_parameter(name, (sharding, *[None] * (len(sizes) - 1)))
            continue
        like = [builder.specs[of] for of in near if of in builder.layers and style is Style.COLUMN]
        spec = builder.specs[name] = like[0] if like else StyleSpec(style, splits=features is None)
        add_linear(builder, name, spec, partial(_or_shard, sharding, builder, name, spec))


def _or_shard(
    sharding: DimSharding | None, builder: TPPlanBuilder, name: str, spec: StyleSpec, size: int
) -> DimSharding:
    return sharding or shard_over_col(builder, name, spec, size)


def _with_equal(columns: Columns, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names, and those in equal blocks with the name that they are equal to."""
    for name in names:
        yield name, name
        for block, first in columns.equal:
            if name.startswith(f"{first}."):
                yield block + name[len(first) :], name


def _sharding(builder: TPPlanBuilder, sources: Iterable[Source], size: int) -> DimSharding | None:
    """The sharding of a dim of this size that holds features of these layers; None if it is unknown."""
    found: list[tuple[bool, DimSharding]] = []
    for name, parts in sources:
        if name in builder.layers:
            sharding, layer = builder.layers[name].out, linear_features(builder.modules[name])
            full = 0 if layer is None else layer[0]
        elif name in builder.parameters:
            dims = builder.parameters[name].dims
            at = next(index for index, dim in enumerate(dims) if dim is not None and dim.axis == FEATURES)
            sharding, full = dims[at], builder.shapes[name][at]
        else:
            continue
        width = full // parts
        if sharding is None or not width:
            continue
        own = [[edge for edge in ranges if edge[1] <= width] for ranges in sharding.ranges]
        if all(position * size % width == 0 for ranges in own for edge in ranges for position in edge):
            scaled = tuple(tuple((a * size // width, b * size // width) for a, b in ranges) for ranges in own)
            found.append((width != size, DimSharding(FEATURES, scaled)))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def mark_sums(builder: TPPlanBuilder, columns: Columns, pure: frozenset[str], *, sequence: bool) -> None:
    """Mark parameters whose gradients are sums over columns: see `plan.py` [Note: partial gradients]."""
    for region in columns.streams - pure:
        raise misfit(builder, region, "its input meets features that only this column has", sequence=sequence)
    for table in [name for name in builder.layers if builder.style_of(name) is Style.VOCABULARY]:
        for name in builder.inside(table):
            for full_name in builder.own_parameters(name).values():
                _mark_partial(builder, full_name)
    for name, _ in _with_equal(columns, sorted(columns.summed)):
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

    Raises MisfitError for a parameter in a region that has no style, unless the model is as its family builds
    it.
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
                given = "has no style, and the model does not run on meta"
                raise misfit(builder, name, given, sequence=sequence, hint="example_batch=batch, ")
    return columns


def check_mixed(builder: TPPlanBuilder, columns: Columns, *, sequence: bool, trusts_styles: bool) -> None:
    """Raise MisfitError for code that may mix what columns have, in a model that its family does not build.

    `trusts_styles`: of features only what a family's table has not foreseen is an error.
    """
    found = [("tokens", columns.crossed), ("features", {} if trusts_styles else columns.mixed)]
    mixed = next(((what, *next(iter(of.items()))) for what, of in found if of), None)
    if mixed is not None and not _is_of_family(builder):
        what, region, operator = mixed
        raise misfit(builder, region, f"{operator} may mix {what} of several columns", sequence=sequence)


def _is_of_family(builder: TPPlanBuilder) -> bool:
    """Return whether the model is as its configuration builds it, without hooks and other forwards. Norms may
    have forwards of their own."""
    for name, module in builder.modules.items():
        has_forward = "forward" in vars(module) and not builder.is_norm(name)
        if module._forward_hooks or module._forward_pre_hooks or has_forward:
            return False
    return _is_as_built(builder.pretrained)


def _is_as_built(model: nn.Module | None) -> bool:
    """Return whether a model of transformers has the modules, but for norms, and the parameters that its
    configuration gives."""
    if model is None:
        return False
    with torch.device("meta"):
        built = type(model)(model.config)

    def contents(of: nn.Module) -> dict[str, object]:
        kinds = {name: type(module) for name, module in of.named_modules()}
        types = {
            name: (k.__module__, k.__qualname__) for name, k in kinds.items() if "Norm" not in k.__name__
        }
        return types | {name: tuple(parameter.shape) for name, parameter in of.named_parameters()}

    return contents(built) == contents(model)


def _mark_partial(builder: TPPlanBuilder, full_name: str) -> None:
    """Mark a parameter, unless its shards differ between columns."""
    unsharded = ParamSharding(full_name, (None,) * len(builder.shapes[full_name]))
    param = builder.parameters.get(full_name, unsharded)
    is_over_col = any(sharding is not None and sharding.axis == FEATURES for sharding in param.dims)
    builder.parameters[full_name] = replace(param, partial=not is_over_col)
