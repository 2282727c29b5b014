"""What has weights and stands between layers that are cut: norms of queries and keys, activations."""

import re

from plait.errors import ModelError
from plait.models.tensor_draft import Draft, linear_features
from plait.models.tensor_heads import Heads, heads_of
from plait.plan.tensor import DimCut, LayerCut, Style

_ACTIVATION = re.compile(r"^act(ivation)?(_fn)?$")
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


def is_head_norm(draft: Draft, name: str) -> bool:
    """Whether it is a norm of queries or keys, by its name: what it reads is what projections give."""
    return _NAMED.match(name.rpartition(".")[2]) is not None and draft.is_norm(name)


def add_unsaid_head_norms(draft: Draft) -> None:
    """Norms that are named as of queries or keys, of which the plan says nothing.

    As wide as a head: one of each head. As wide as all heads together, it needs them all: a ModelError.
    """
    for name in draft.modules:
        if name in draft.words or not is_head_norm(draft, name):
            continue
        columns, heads, own = _columns_beside(draft, name), heads_of(draft, name), draft.own_parameters(name)
        if not columns or heads is None or not own:
            continue
        shape = draft.shapes[next(iter(own.values()))]
        widths = [features[0] for cut in columns if (features := linear_features(draft.modules[cut.module]))]
        count = heads.kv if name.rpartition(".")[2].startswith("k") else heads.count
        if shape[0] * count in widths or _over_heads(heads, shape) is not None:
            add_head_norm(draft, name)
        elif shape[0] in widths and draft.cols > 1:
            raise ModelError(
                f"{name} takes its statistics over all heads, which are on several columns",
                given=f"{shape[0]} features, heads={heads.count}, columns={draft.cols}",
                expected="a norm of each head, or projections that are gathered",
                hint="colwise_gather_output for the projections and rowwise_split_input for the last layer",
            )


def add_activations(draft: Draft) -> None:
    """Numbers that an activation learns: every column applies them to its features, and adds to them."""
    for name in draft.modules:
        is_said = name in draft.words or not _ACTIVATION.match(name.rpartition(".")[2])
        if not is_said and _columns_beside(draft, name):
            for full in draft.own_parameters(name).values():
                draft.cut_parameter(full, [None] * len(draft.shapes[full]), partial=True)


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
