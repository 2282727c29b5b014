"""Regions and the residual stream between them: what cutting its features or its tokens asks of a model."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from plait.errors import ModelError
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.heads import is_head_norm
from plait.plan.sharding import DimSharding, LayerSharding, ParamSharding, Style

_SHARDED = (Style.COLUMN, Style.ROW, Style.EXPERTS)


def find_regions(draft: TPPlanBuilder) -> tuple[str, ...]:
    """The modules in which features are cut over `col`; see `TensorPlan.regions`."""
    found: dict[str, None] = {}
    for name, cut in draft.layers.items():
        region = draft.region_of(name)
        if cut.style in _SHARDED and region is not None and not (region == name and cut.style is Style.ROW):
            found[region] = None
    for name in draft.parameters:
        owner = draft.region_of(name)
        if owner is not None and owner not in draft.layers and any(draft.parameters[name].dims):
            found.setdefault(owner)
    return tuple(found)


def pure_regions(draft: TPPlanBuilder, regions: Sequence[str]) -> frozenset[str]:
    """Those in which nothing whole can read the region's input."""
    harmless = (Style.COLUMN, Style.ROW, Style.PER_HEAD_NORM, Style.NORM)
    return frozenset(
        region
        for region in regions
        if all(
            _has_style(draft, name, *harmless)
            or is_head_norm(draft, name)
            or all(full in draft.parameters for full in draft.own_parameters(name).values())
            for name in draft.inside(region)
        )
        and not any(_has_style(draft, name, Style.EXPERTS) for name in draft.inside(region))
    )


def _has_style(draft: TPPlanBuilder, name: str, *styles: Style) -> bool:
    return name in draft.layers and draft.layers[name].style in styles


def _is_in_any(draft: TPPlanBuilder, name: str, regions: frozenset[str]) -> bool:
    return name in regions or not regions.isdisjoint(draft.ancestors(name))


# Features of the stream over `row`


def add_residual_layers(draft: TPPlanBuilder, regions: Sequence[str]) -> None:
    """What is in the stream and of which nothing is said, where its features are cut.

    Norms take their statistics over the rows, tables are cut; a linear layer from the stream to the stream,
    or between it and an embedding's width, stays whole and is given all features. Raises ModelError for a
    parameter of which nobody knows what it does to the features.
    """
    for name, cut in draft.layers.items():
        if cut.style in (Style.EXPERTS, Style.MLA_LATENT):
            raise _row_error(draft, name, f"style {cut.style.value}")
    around = frozenset(regions)
    widths = {residual_width(draft)} | {
        draft.modules[name].embedding_dim
        for name, cut in draft.layers.items()
        if cut.style is Style.VOCABULARY
    }
    for name, module in draft.modules.items():
        if name in draft.layers or _is_in_any(draft, name, around):
            continue
        own = draft.own_parameters(name)
        if isinstance(module, nn.Embedding):
            out = draft.over_row(module.embedding_dim, name)
            draft.layers[name] = LayerSharding(name, Style.FEATURE_EMBEDDING, out)
            draft.shard_parameter(own["weight"], (None, out))
        elif draft.is_norm(name) and (own or not list(module.children())):
            _add_norm(draft, name, own)
        elif not own:
            continue
        elif isinstance(module, nn.Linear) and {module.in_features, module.out_features} <= widths:
            out, inp = draft.over_row(module.out_features, name), draft.over_row(module.in_features, name)
            draft.layers[name] = LayerSharding(name, Style.REPLICATE, out, inp)
        else:
            raise _row_error(
                draft, name or type(module).__name__, f"{type(module).__name__} with {', '.join(own)}"
            )


def _add_norm(draft: TPPlanBuilder, name: str, own: dict[str, str]) -> None:
    shapes = {draft.shapes[full] for full in own.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise _row_error(draft, name, f"parameters of shapes {sorted(shapes)}")
    size = next(iter(shapes))[0] if shapes else residual_width(draft)
    out = draft.over_row(size, name)
    draft.layers[name] = LayerSharding(name, Style.NORM, out)
    for full in own.values():
        draft.shard_parameter(full, (out,))


def residual_width(draft: TPPlanBuilder) -> int:
    """The features that layers inside of blocks read and give; a ModelError where they differ."""
    widths: dict[int, str] = {}
    for name, cut in draft.layers.items():
        features = linear_features(draft.modules[name])
        if (
            features is not None
            and cut.style in (Style.COLUMN, Style.ROW)
            and draft.block_of(name) is not None
        ):
            widths.setdefault(features[1] if cut.style is Style.COLUMN else features[0], name)
    if not widths:
        raise _row_error(draft, "the model", "no block has a colwise or rowwise layer")
    if len(widths) != 1:
        raise _row_error(draft, next(iter(widths.values())), f"streams of widths {sorted(widths)}")
    return next(iter(widths))


def check_rows(draft: TPPlanBuilder, regions: Sequence[str]) -> None:
    """Raises ModelError where something in a region would need features that are on other rows."""
    residual_width(draft)
    for region in regions:
        columns = [draft.layers[name] for name in draft.inside(region) if name in draft.layers]
        if not any(cut.style is Style.ROW for cut in columns) and region not in draft.layers:
            raise _row_error(draft, region, "a region that gives the stream all its features")
        is_gathered = any(cut.gathers for cut in columns)
        for name in draft.inside(region):
            if name in draft.layers or (is_gathered and draft.is_norm(name)):
                continue
            unsaid = [key for key, full in draft.own_parameters(name).items() if full not in draft.parameters]
            if unsaid:
                raise _row_error(
                    draft, name, f"{type(draft.modules[name]).__name__} with {', '.join(unsaid)}"
                )


def _row_error(draft: TPPlanBuilder, name: str, given: str) -> ModelError:
    return ModelError(
        f"{name} cannot be part of a model whose hidden features are cut over rows",
        given=f"{given}, tp={draft.rows}x{draft.cols}",
        expected="of the stream norms, embeddings and linear layers; in what is cut (attention, mlp) cut "
        "layers, and norms of heads",
        hint=f"tp=1x{draft.rows * draft.cols}",
    )


# Tokens of the stream over `col`


def check_sequence(draft: TPPlanBuilder, regions: Sequence[str]) -> None:
    """Raises ModelError where sequence parallelism would hand a module tokens of one column alone.

    In a block, all that has parameters has to be a region that ends in a ROW layer, or a norm, which treats
    every token by itself.
    """
    around = frozenset(regions)
    for name, module in draft.modules.items():
        block = draft.block_of(name)
        if block is None or name == block or _is_in_any(draft, name, around):
            continue
        if not _has_style(draft, name, Style.ROW) and not draft.is_norm(name) and draft.own_parameters(name):
            raise _sequence_error(draft, name, f"{type(module).__name__}, which is not cut")
    for name, cut in draft.layers.items():
        if cut.style in _SHARDED and not cut.head and draft.block_of(name) is None:
            raise _sequence_error(draft, name, "cut, and in none of the blocks that are known")
    for region in regions:
        styles = [draft.layers[name].style for name in draft.inside(region) if name in draft.layers]
        if Style.EXPERTS in styles:
            raise _sequence_error(draft, region, "a mixture of experts")
        for name in draft.inside(region):
            if draft.config is None and draft.is_norm(name) and _is_residual_norm(draft, name):
                raise _sequence_error(draft, region, f"{name}, a norm of the stream, inside of what is cut")
        if region not in draft.layers and Style.ROW not in styles:
            raise _sequence_error(draft, region, "a region that does not end in a rowwise layer")
        beside = region.rpartition(".")[0]
        ends = (f"{beside}.{child}" for child, _ in draft.modules[beside].named_children())
        if region in draft.layers and not any(_has_style(draft, end, Style.ROW) for end in ends):
            raise _sequence_error(draft, region, f"a lone layer, with no rowwise one in {beside}")


def _is_residual_norm(draft: TPPlanBuilder, name: str) -> bool:
    """Whether a norm of a user's own has the stream's width, and is of no head."""
    own = draft.own_parameters(name).values()
    whole = [full for full in own if full not in draft.parameters]
    return name not in draft.layers and any(draft.shapes[full] == (residual_width(draft),) for full in whole)


def _sequence_error(draft: TPPlanBuilder, name: str, given: str) -> ModelError:
    return ModelError(
        f"{name} may need all tokens, which sequence parallelism deals out to columns",
        given=f"{given}, tp={draft.rows}x{draft.cols} sp=true",
        expected="blocks of norms, and of attention and mlp that are cut",
        hint=f"tp={draft.rows}x{draft.cols} without sp",
    )


def mark_partial_grads(draft: TPPlanBuilder, regions: Sequence[str], *, sequence: bool) -> None:
    """Marks what sees only its column's tokens. See `models/tensor.py` [Note: which gradients are parts]."""
    if not sequence:
        return
    around = frozenset(regions)
    biases = {
        full
        for name, cut in draft.layers.items()
        if cut.style is Style.ROW and draft.block_of(name) is not None
        for key, full in draft.own_parameters(name).items()
        if key == "bias"
    }
    for full, shape in draft.shapes.items():
        is_between = draft.block_of(full) is not None and not _is_in_any(draft, full, around)
        if full in biases or is_between:
            cut = draft.parameters.get(full, ParamSharding(full, (None,) * len(shape)))
            draft.parameters[full] = replace(cut, partial=not _is_sharded_over_col(cut.dims))


def _is_sharded_over_col(dims: Sequence[DimSharding | None]) -> bool:
    return any(cut is not None and cut.axis == "col" for cut in dims)
