"""Regions and the residual stream between them, with features sharded over `row` or tokens over `col`."""

from collections.abc import Sequence

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.heads import is_head_norm
from plait.plan.sharding import LayerSharding, Style

_LINEAR = (Style.COLUMN, Style.ROW)
_SHARDED = (*_LINEAR, Style.EXPERTS)


def find_regions(builder: TPPlanBuilder) -> tuple[str, ...]:
    """Return the modules in which features are sharded over `col`; see `TPPlan.regions`."""
    regions: dict[str, None] = {}
    for name, layer in builder.layers.items():
        region = builder.region_of(name)
        is_lone_row = region == name and layer.style is Style.ROW
        if layer.style in _SHARDED and region is not None and not is_lone_row:
            regions[region] = None
    for name, param in builder.parameters.items():
        region = builder.region_of(name)
        if region is not None and region not in builder.layers and any(param.dims):
            regions.setdefault(region)
    return tuple(regions)


def pure_regions(builder: TPPlanBuilder, regions: Sequence[str]) -> frozenset[str]:
    """The regions in which no replicated weight can read the region's input."""
    harmless = (Style.COLUMN, Style.ROW, Style.PER_HEAD_NORM, Style.NORM, Style.DEPTHWISE)
    return frozenset(
        region
        for region in regions
        if all(
            builder.style_of(name) in harmless
            or is_head_norm(builder, name)
            or (not builder.unsharded(name) and builder.style_of(name) is not Style.EXPERTS)
            for name in builder.inside(region)
        )
    )


def _is_in_any(builder: TPPlanBuilder, name: str, regions: frozenset[str]) -> bool:
    return name in regions or not regions.isdisjoint(builder.ancestors(name))


# Features of the residual stream over `row`


def add_residual_layers(builder: TPPlanBuilder, regions: Sequence[str]) -> None:
    """Add the modules of the residual stream that have no style yet, where its features are sharded.

    Norms reduce their statistics over the rows, embeddings are sharded; a linear layer from the stream to the
    stream, or between it and an embedding's width, stays replicated and is given all features. Raises
    ModelError for a parameter whose effect on the features is unknown.
    """
    for name, layer in builder.layers.items():
        if layer.style in (Style.EXPERTS, Style.MLA_LATENT) or layer.summed or layer.uses is not None:
            raise _row_error(builder, name, f"style {layer.style.value}")
    sharded = frozenset(regions)
    widths = {residual_width(builder)} | {
        builder.modules[name].embedding_dim
        for name, layer in builder.layers.items()
        if layer.style is Style.VOCABULARY
    }
    for name, module in builder.modules.items():
        if name in builder.layers or _is_in_any(builder, name, sharded):
            continue
        own = builder.own_parameters(name)
        if isinstance(module, nn.Embedding):
            out = builder.shard_over_row(module.embedding_dim, name)
            builder.layers[name] = LayerSharding(name, Style.FEATURE_EMBEDDING, out)
            builder.shard_parameter(own["weight"], (None, out))
        elif builder.is_norm(name) and (own or not list(module.children())):
            _add_norm(builder, name, own)
        elif not own:
            _refuse_table(builder, name, module)
        elif (
            _is_on_stream(builder, name, sharded)
            and isinstance(module, nn.Linear)
            and {module.in_features, module.out_features} <= widths
        ):
            out = builder.shard_over_row(module.out_features, name)
            inp = builder.shard_over_row(module.in_features, name)
            builder.layers[name] = LayerSharding(name, Style.REPLICATE, out, inp)
        else:
            kind = type(module).__name__
            raise _row_error(builder, name or kind, f"{kind} with {', '.join(own)}")


def _is_on_stream(builder: TPPlanBuilder, name: str, regions: frozenset[str]) -> bool:
    """Return whether a module's output may be the stream, or added to it. One of several linear layers of a
    module in a block is not, as in an attention that is not sharded, unless others of its class are: then
    this one does not run (the attention to an encoder, in a decoder by itself)."""
    parent, block = builder.modules[name.rpartition(".")[0]], builder.block_of(name)
    linears = [child for child in parent.children() if isinstance(child, nn.Linear)]
    is_inner = block is not None and parent is not builder.modules[block] and len(linears) > 1
    return not is_inner or any(type(builder.modules[region]) is type(parent) for region in regions)


def _refuse_table(builder: TPPlanBuilder, name: str, module: nn.Module) -> None:
    """Raise ModelError for a table of the stream's width that is no parameter: positions, which the model's
    code adds to embeddings."""
    for key, value in {**vars(module), **module._buffers}.items():
        is_table = isinstance(value, Tensor) and value.ndim > 1 and value.is_floating_point()
        if is_table and value.shape[-1] == residual_width(builder):
            kind = type(module).__name__
            raise _row_error(
                builder, name or kind, f"{kind} with {key}, a table of {value.shape[-1]} features"
            )


def _add_norm(builder: TPPlanBuilder, name: str, own: dict[str, str]) -> None:
    shapes = {builder.shapes[full_name] for full_name in own.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise _row_error(builder, name, f"parameters of shapes {sorted(shapes)}")
    size = next(iter(shapes))[0] if shapes else residual_width(builder)
    out = builder.shard_over_row(size, name)
    builder.layers[name] = LayerSharding(name, Style.NORM, out)
    for full_name in own.values():
        builder.shard_parameter(full_name, (out,))


def residual_width(builder: TPPlanBuilder) -> int:
    """The residual-side width of the sharded layers in blocks. Raises ModelError if they differ."""
    widths: dict[int, str] = {}
    for name, layer in builder.layers.items():
        features = linear_features(builder.modules[name])
        if features is not None and layer.style in _LINEAR and builder.block_of(name) is not None:
            widths.setdefault(features[1] if layer.style is Style.COLUMN else features[0], name)
    if not widths:
        raise _row_error(builder, "the model", "no block has a colwise or rowwise layer")
    if len(widths) != 1:
        raise _row_error(builder, next(iter(widths.values())), f"residual streams of widths {sorted(widths)}")
    return next(iter(widths))


def check_rows(builder: TPPlanBuilder, regions: Sequence[str]) -> None:
    """Raise ModelError if a module in a region would need features that are on other rows."""
    residual_width(builder)
    for region in regions:
        layers = [builder.layers[name] for name in builder.inside(region) if name in builder.layers]
        if not any(layer.style is Style.ROW for layer in layers) and region not in builder.layers:
            raise _row_error(builder, region, "a region whose output is not sharded over rows")
        is_gathered = any(layer.gathers for layer in layers)
        for name in builder.inside(region):
            if name in builder.layers or (is_gathered and builder.is_norm(name)):
                continue
            if unsharded := builder.unsharded(name):
                kind = type(builder.modules[name]).__name__
                raise _row_error(builder, name, f"{kind} with {', '.join(unsharded)}")


def _row_error(builder: TPPlanBuilder, name: str, given: str) -> ModelError:
    return ModelError(
        f"{name} does not support hidden features that are sharded over rows",
        given=f"{given}, tp={builder.rows}x{builder.cols}",
        expected="norms, embeddings and linear layers on the residual stream; sharded layers and norms of "
        "heads in sharded modules (attention, mlp)",
        hint=f"tp=1x{builder.rows * builder.cols}",
    )


# Tokens of the residual stream over `col`


def check_sequence(builder: TPPlanBuilder, regions: Sequence[str]) -> None:
    """Raise ModelError if a module may need all tokens but would get one column's.

    In a block, everything with parameters has to be a region that ends in a ROW layer, or a norm, which
    treats every token separately.
    """
    sharded = frozenset(regions)
    for name, module in builder.modules.items():
        block = builder.block_of(name)
        if block is None or name == block or _is_in_any(builder, name, sharded):
            continue
        is_harmless = builder.style_of(name) is Style.ROW or builder.is_norm(name)
        if not is_harmless and builder.own_parameters(name):
            raise _sequence_error(builder, name, f"{type(module).__name__}, which is not sharded")
    for name, layer in builder.layers.items():
        is_head = layer.head or name in builder.heads
        if layer.style in _SHARDED and not is_head and builder.block_of(name) is None:
            raise _sequence_error(builder, name, "a sharded layer outside of the known blocks")
    for region in regions:
        styles = [builder.layers[name].style for name in builder.inside(region) if name in builder.layers]
        if region not in builder.layers and not {Style.ROW, Style.EXPERTS} & {*styles}:
            raise _sequence_error(builder, region, "a region that does not end in a rowwise layer")
        parent = region.rpartition(".")[0]
        siblings = (f"{parent}.{child}" for child, _ in builder.modules[parent].named_children())
        if region in builder.layers and all(builder.style_of(name) is not Style.ROW for name in siblings):
            raise _sequence_error(builder, region, f"a lone layer, with no rowwise one in {parent}")


def _sequence_error(builder: TPPlanBuilder, name: str, given: str) -> ModelError:
    return ModelError(
        f"{name} may need all tokens, but sequence parallelism shards them over columns",
        given=f"{given}, tp={builder.rows}x{builder.cols} sp=true",
        expected="blocks of norms, and of sharded attention and mlp",
        hint=f"tp={builder.rows}x{builder.cols} without sp",
    )
