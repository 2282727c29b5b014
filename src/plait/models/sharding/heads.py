"""Where heads are cut: how many an attention module has, and which features of its layers are whose.

[Note: whose heads]
A layer's heads are those of the nearest module around it that

1. is said to have numbers of its own, `local:num_heads,width` (a user's plan), or
2. is an attention by its name or its class's, and counts its heads itself or has a configuration that does.

In the first case the heads are as many as all those numbers are multiples of, unless layers say how wide a
head is (`/64`). In the second, queries have `num_attention_heads`, and keys as many as attention repeats
`num_key_value_groups` times, under whatever name; the layers of keys and values are known by theirs. A head's
width is the layer's over the heads, so that gates beside queries, and latent projections, are cut rightly
too.

What has weights and stands between layers that are cut: norms of queries and keys, activations.
"""

import math
import re
from dataclasses import dataclass

from plait.errors import ModelError, PlanError
from plait.models.sharding.builder import (
    TPPlanBuilder,
    linear_features,
    one_range_each,
    part_width,
    repeat_per_part,
)
from plait.models.sharding.styles import StyleSpec, replicate_hint
from plait.plan.sharding import DimSharding, HeadSplit, LayerSharding, Style, split, split_heads, split_width

NUM_HEADS_NAMES = ("num_heads", "num_attention_heads", "n_head", "n_heads")
NUM_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
NUM_GROUPS_NAMES = ("num_key_value_groups", "n_rep")
TOTAL_WIDTH_NAMES = ("split_size", "embed_dim", "all_head_size")  # of all heads together

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_KV_LAYER_NAMES = {"k_proj", "v_proj", "k", "v", "key", "value", "key_proj", "value_proj", "wk", "wv"}


@dataclass(frozen=True)
class Heads:
    """Of one attention module. `is_said`: by the user's plan."""

    module: str
    count: int
    kv: int
    split: HeadSplit
    is_said: bool = False

    def queries(self, width: int) -> DimSharding:
        """The cut of a dim in which every query head has `width` elements."""
        return one_range_each("col", [(start * width, stop * width) for start, stop in self.split.queries])

    def keys(self, width: int) -> DimSharding:
        return one_range_each("col", [(start * width, stop * width) for start, stop in self.split.keys])

    def grouped(self, width: int) -> DimSharding:
        """Of [kv head][its query heads, key, value], each `width` wide, in whole groups."""
        return self.keys((self.count // self.kv + 2) * width)


def find_heads(draft: TPPlanBuilder, name: str) -> Heads | None:
    """The heads of the attention around a layer or a parameter. See [Note: whose heads]."""
    block = draft.block_of(name)
    for around in draft.ancestors(name):
        said = draft.words.get(around)
        if said is not None and said.attributes:
            return _declared_heads(draft, around, said.attributes)
        if around == block:
            return None
        module = draft.modules[around]
        if _ATTENTION.search(around.rpartition(".")[2]) or _ATTENTION.search(type(module).__name__):
            counts = head_counts(draft, around)
            if counts is not None:
                return Heads(around, *counts, split_heads(*counts, draft.cols, rows=draft.rows, of=around))
    return None


def head_counts(draft: TPPlanBuilder, around: str) -> tuple[int, int] | None:
    """(query heads, key heads) of an attention module; None where neither it nor the configuration tells."""
    module = draft.modules[around]
    heads = _first_positive_int(module, NUM_HEADS_NAMES) or _first_positive_int(draft.config, NUM_HEADS_NAMES)
    if heads is None:
        return None
    groups, keys = (
        _first_positive_int(module, NUM_GROUPS_NAMES),
        _first_positive_int(module, NUM_KV_HEADS_NAMES),
    )
    if groups and heads % groups == 0:
        return heads, heads // groups
    if keys is None and _has_narrow_keys(draft, around):
        keys = _first_positive_int(draft.config, NUM_KV_HEADS_NAMES)
    return heads, keys or heads


def _has_narrow_keys(draft: TPPlanBuilder, around: str) -> bool:
    """Whether its layer of keys is narrower than another: what a configuration says of keys may be idle."""
    widths = {
        name: features[0]
        for name in draft.inside(around)
        if (features := linear_features(draft.modules[name])) is not None
    }
    keys = [width for name, width in widths.items() if name.rpartition(".")[2] in _KV_LAYER_NAMES]
    return bool(keys) and min(keys) < max(widths.values())


def _first_positive_int(of: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(of, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _declared_heads(draft: TPPlanBuilder, module: str, attributes: tuple[str, ...]) -> Heads:
    values = _attribute_values(draft, module, attributes)
    units = _declared_head_counts(draft, module)
    count, kv = (max(units), min(units)) if units else (math.gcd(*values),) * 2
    cut = split_heads(count, kv, draft.cols, rows=draft.rows, of=module)
    return Heads(module, count, kv, cut, is_said=True)


def _attribute_values(draft: TPPlanBuilder, module: str, attributes: tuple[str, ...]) -> list[int]:
    values = [getattr(draft.modules[module], key, None) for key in attributes]
    for key, value in zip(attributes, values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(
                f"the tensor plan divides an attribute of {module} that is no number",
                given=f"{key}={value!r}",
                expected="a whole number that counts heads or their features",
            )
    return [value for value in values if value is not None]


def _declared_head_counts(draft: TPPlanBuilder, module: str) -> list[int]:
    """How many heads the layers of a module have that say how wide one is."""
    found = []
    for name in draft.inside(module):
        word, features = draft.words.get(name), linear_features(draft.modules[name])
        if word is not None and word.multiple and features is not None:
            width = part_width(features[0 if word.style is Style.COLUMN else 1], word.parts, name)
            if width % word.multiple:
                raise PlanError(
                    f"{name} cannot be cut at heads", given=f"{width} features, heads of {word.multiple}"
                )
            found.append(width // word.multiple)
    return found


def shard_over_col(draft: TPPlanBuilder, name: str, word: StyleSpec, size: int) -> DimSharding:
    """How the features of a layer or parameter, `size` in all, are cut over the columns."""
    width = part_width(size, word.parts, name)
    cut = _shard_part_over_col(draft, name, word, width)
    return repeat_per_part(cut, width, word.parts) if word.parts > 1 else cut


def _shard_part_over_col(draft: TPPlanBuilder, name: str, word: StyleSpec, width: int) -> DimSharding:
    cols = draft.cols
    if word.gathers or word.splits or word.head:
        return one_range_each("col", split_width(width, cols, of=name))
    heads = find_heads(draft, name)
    if heads is None:
        if word.multiple:
            return one_range_each("col", split(width, cols, word.multiple, of=name))
        return one_range_each("col", split_width(width, cols, of=name))
    if word.grouped:
        if cols > heads.kv:
            raise PlanError(
                f"{name} packs queries with their keys, which cannot be shared there",
                given=f"kv heads={heads.kv} columns={cols}",
                hint=f"tp=1x{heads.kv}, or colwise_gather_output",
            )
        return heads.grouped(_head_width(width, heads.count + 2 * heads.kv, name, heads))
    is_key = word.style is Style.COLUMN and bool(_KV_LAYER_NAMES & set(name[len(heads.module) :].split(".")))
    if heads.is_said:
        is_key = word.multiple is not None and width // word.multiple == heads.kv != heads.count
    if is_key:
        return heads.keys(_head_width(width, heads.kv, name, heads))
    return heads.queries(_head_width(width, heads.count, name, heads))


def _head_width(size: int, count: int, name: str, heads: Heads) -> int:
    if size % count:
        raise PlanError(
            f"{name} cannot be cut at heads",
            given=f"{size} features, heads={heads.count} kv heads={heads.kv}",
            expected="a whole number of features for every head, or a tensor_plan that says how it is made",
            hint=replicate_hint(f"{heads.module}.*"),
        )
    return size // count


def check_heads(draft: TPPlanBuilder, name: str, word: StyleSpec) -> None:
    """Refuses a ROW layer that gives a number for every head: where heads are cut, code wants its own."""
    features = linear_features(draft.modules[name])
    if word.style is not Style.ROW or word.splits or features is None or draft.cols == 1:
        return
    heads = find_heads(draft, name)
    if heads is not None and not heads.is_said and features[0] in (heads.count, heads.kv):
        raise ModelError(
            f"{name} gives a number for every head, of which each column has its own alone",
            given=f"{features[0]} features, heads={heads.count} kv heads={heads.kv} columns={draft.cols}",
            expected="a rowwise layer that gives features of the stream",
            hint=replicate_hint(f"{heads.module}.*"),
        )


def add_head_attributes(draft: TPPlanBuilder, heads: Heads) -> None:
    """What an attention module, whose layers are cut at heads, counts itself."""
    module, cut = draft.modules[heads.module], heads.split
    queries = [stop - start for start, stop in cut.queries]
    keys = [stop - start for start, stop in cut.keys]

    def put(key: str, values: list[int]) -> None:
        draft.attributes[heads.module, key] = tuple(values)

    if heads.is_said:
        for key in draft.words[heads.module].attributes:
            put(key, _scale_to_columns(heads, key, getattr(module, key), queries, keys))
        return
    for key in NUM_HEADS_NAMES:
        if getattr(module, key, None) == heads.count:
            put(key, queries)
    for key in NUM_KV_HEADS_NAMES:
        if getattr(module, key, None) == heads.kv:
            put(key, keys)
    for key in NUM_GROUPS_NAMES:
        if getattr(module, key, None) == heads.count // heads.kv:
            put(key, list(cut.groups))
    for key in TOTAL_WIDTH_NAMES:
        value = getattr(module, key, None)
        if isinstance(value, int) and value == heads.count * getattr(module, "head_dim", 0):
            put(key, [value // heads.count * found for found in queries])


def _scale_to_columns(heads: Heads, key: str, value: int, queries: list[int], keys: list[int]) -> list[int]:
    if value % heads.count == 0:
        return [value // heads.count * found for found in queries]
    if value % heads.kv == 0 and heads.kv != heads.count:
        return [value // heads.kv * found for found in keys]
    if value == heads.count // heads.kv:
        return list(heads.split.groups)
    raise PlanError(
        f"a number of {heads.module} does not divide like its heads",
        given=f"{key}={value}, heads={heads.count}, at {len(queries)} columns",
        expected="a multiple of the heads",
        hint=f"a plan without local:{key}, or tp=1",
    )


_ACTIVATION = re.compile(r"^act(ivation)?(_fn)?$")
_QK_NORM = re.compile(r"^(q|k|query|key)_?(layer_?)?(norm|ln)$")


def add_head_norm(draft: TPPlanBuilder, name: str) -> None:
    """A norm of each head by itself: one weight for all heads, or one for each."""
    draft.layers[name] = LayerSharding(name, Style.PER_HEAD_NORM)
    heads = find_heads(draft, name)
    columns = _sibling_column_layers(draft, name)
    for full in draft.own_parameters(name).values():
        shape = draft.shapes[full]
        over_heads = _shard_heads_dim(heads, shape) if columns else None
        if over_heads is not None:
            draft.shard_parameter(full, (over_heads, *([None] * (len(shape) - 1))))
        elif columns:
            draft.shard_parameter(full, [None] * len(shape), partial=True)


def is_head_norm(draft: TPPlanBuilder, name: str) -> bool:
    """Whether it is a norm of queries or keys, by its name: what it reads is what projections give."""
    return _QK_NORM.match(name.rpartition(".")[2]) is not None and draft.is_norm(name)


def add_undeclared_head_norms(draft: TPPlanBuilder) -> None:
    """Norms that are named as of queries or keys, of which the plan says nothing.

    As wide as a head: one of each head. As wide as all heads together, it needs them all: a ModelError.
    """
    for name in draft.modules:
        if name in draft.words or not is_head_norm(draft, name):
            continue
        columns, heads, own = (
            _sibling_column_layers(draft, name),
            find_heads(draft, name),
            draft.own_parameters(name),
        )
        if not columns or heads is None or not own:
            continue
        shape = draft.shapes[next(iter(own.values()))]
        widths = [features[0] for cut in columns if (features := linear_features(draft.modules[cut.module]))]
        count = heads.kv if name.rpartition(".")[2].startswith("k") else heads.count
        if shape[0] * count in widths or _shard_heads_dim(heads, shape) is not None:
            add_head_norm(draft, name)
        elif shape[0] in widths and draft.cols > 1:
            raise ModelError(
                f"{name} takes its statistics over all heads, which are on several columns",
                given=f"{shape[0]} features, heads={heads.count}, columns={draft.cols}",
                expected="a norm of each head, or projections that are gathered",
                hint="colwise_gather_output for the projections and rowwise_split_input for the last layer",
            )


def add_activations(draft: TPPlanBuilder) -> None:
    """Numbers that an activation learns: every column applies them to its features, and adds to them."""
    for name in draft.modules:
        is_said = name in draft.words or not _ACTIVATION.match(name.rpartition(".")[2])
        if not is_said and _sibling_column_layers(draft, name):
            for full in draft.own_parameters(name).values():
                draft.shard_parameter(full, [None] * len(draft.shapes[full]), partial=True)


def _sibling_column_layers(draft: TPPlanBuilder, name: str) -> list[LayerSharding]:
    """The layers in the same module that leave this column its own heads."""
    around = name.rpartition(".")[0]
    return [
        cut
        for key, cut in draft.layers.items()
        if key.startswith(f"{around}.") and cut.style is Style.COLUMN and not cut.gathers
    ]


def _shard_heads_dim(heads: Heads | None, shape: tuple[int, ...]) -> DimSharding | None:
    """The cut of a weight whose first dim counts heads."""
    if heads is None or len(shape) < 2:
        return None
    if shape[0] == heads.count:
        return heads.queries(1)
    return heads.keys(1) if shape[0] == heads.kv else None
