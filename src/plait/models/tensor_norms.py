"""Norms of queries and keys, which stand between layers that are cut at heads."""

import re

from plait.errors import ModelError
from plait.models.tensor_draft import Draft, linear_features
from plait.models.tensor_heads import Heads, heads_of
from plait.plan.tensor import DimCut, LayerCut, Style

_NAMED = re.compile(r"^(q|k|query|key)_?(layer_?)?(norm|ln)$")


def add_head_norm(draft: Draft, name: str) -> None:
    """A norm of each head by itself: one weight for all heads, or one for each."""
    draft.layers[name] = LayerCut(name, Style.HEAD_NORM)
    heads = heads_of(draft, name)
    columns = _columns_beside(draft, name)
    for full in draft.own_parameters(name).values():
        shape = draft.shapes[full]
        over_heads = _over_heads(heads, shape) if columns else None
        if over_heads is not None:
            draft.cut_parameter(full, (over_heads, *([None] * (len(shape) - 1))))
        elif columns:
            draft.cut_parameter(full, [None] * len(shape), partial=True)


def add_unsaid_head_norms(draft: Draft) -> None:
    """Norms that are named as of queries or keys, of which the plan says nothing.

    As wide as a head: one of each head. As wide as all heads together: its statistics are of all columns.
    """
    for name in draft.modules:
        if name in draft.words or not _NAMED.match(name.rpartition(".")[2]) or not draft.is_norm(name):
            continue
        columns, heads, own = _columns_beside(draft, name), heads_of(draft, name), draft.own_parameters(name)
        if not columns or heads is None or not own:
            continue
        shape = draft.shapes[next(iter(own.values()))]
        widths = {_width(draft, cut): cut for cut in columns}
        head_widths = {width // count for width in widths for count in (heads.count, heads.kv)}
        if _over_heads(heads, shape) is not None or (len(shape) == 1 and shape[0] in head_widths):
            add_head_norm(draft, name)
        elif len(shape) == 1 and shape[0] in widths:
            _add_wide_norm(draft, name, widths[shape[0]])


def _width(draft: Draft, layer: LayerCut) -> int:
    """The whole width of a COLUMN layer's output."""
    features = linear_features(draft.modules[layer.module])
    assert features is not None, f"{layer.module} is no linear layer"
    return features[0]


def _add_wide_norm(draft: Draft, name: str, layer: LayerCut) -> None:
    assert layer.out is not None
    if len(set(layer.out.ranges)) < len(layer.out.ranges):
        raise ModelError(
            f"{name} takes its statistics over all heads, some of which are on several columns",
            given=f"columns={draft.cols}, of which {len(set(layer.out.ranges))} have keys of their own",
            hint=f"tp=1x{len(set(layer.out.ranges))}",
        )
    draft.layers[name] = LayerCut(name, Style.NORM, out=layer.out)
    for full in draft.own_parameters(name).values():
        draft.cut_parameter(full, (layer.out,))


def _columns_beside(draft: Draft, name: str) -> list[LayerCut]:
    """The layers in the same module that leave this column its own heads."""
    around = name.rpartition(".")[0]
    return [
        cut
        for key, cut in draft.layers.items()
        if key.startswith(f"{around}.") and cut.style is Style.COLUMN and not cut.gathers
    ]


def _over_heads(heads: Heads | None, shape: tuple[int, ...]) -> DimCut | None:
    """The cut of a weight whose first dim counts heads."""
    if heads is None or len(shape) < 2:
        return None
    if shape[0] == heads.count:
        return heads.queries(1)
    return heads.keys(1) if shape[0] == heads.kv else None
