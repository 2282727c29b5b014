"""Tensor plans of models that have none, derived from a run of the model on meta.

[Note: derived plans]
A linear layer may be sharded over its outputs in two ways.

- `colwise_gather_output`: the layer's output is all-gathered, and everything around the layer stays as it is.
  It is right in any code that calls the layer as a module, whatever the code does with the output.
- `colwise`, without a gather, if every use of the output keeps features apart (features.py), up to linear
  layers, which are then `rowwise`: the feed-forward and the attention of most models. Parameters with a
  number for each feature are sharded with them. Any other use (a norm, a sum with the residual stream, the
  model's result) ends the search.

What features meet may be the same for all of them and depend on a parameter, or on a layer whose output is
full: then its gradient is a sum over columns (uses.py [Note: parts]). Only the recording shows which outputs
are full. So it is read again with full outputs of the layers that ended the search, and others may get
further.

Layers that end the search gather, unless they are small next to their block, or to what is divided in their
region: these are replicated, and so are layers that the run does not call, or whose weight is read outside of
them.

[Note: the same run on shards]
Code may contain numbers of heads and widths. So the model runs once more with the weights of one column, and
with the attributes of attentions that count heads divided (heads.py). Every operator has to be the same one
as before, with the same numbers, and results of the same shape, or of a shard's where they have features.
Otherwise all layers of attentions gather; if it is then still another run, all layers do.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain

from torch import Tensor, nn

from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.heads import attention_of, head_counts, is_of_heads
from plait.models.sharding.styles import STYLES, StyleSpec
from plait.models.sharding.uses import FeatureUses, TracedResult, feature_uses, record_uses
from plait.models.trace.prepare import traced_batches
from plait.models.trace.recorder import ModelTrace
from plait.plan.sharding import Range, Style

# Layers are replicated if the linear ones of their block have this many times as many weights: one that would
# gather, two or more that would sum.
_SMALL, _TINY = 16, 64
_MAX_ROUNDS = 4


def derive_styles(builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None) -> dict[str, StyleSpec]:
    """Return styles of layers and parameters, by name; see [Note: derived plans].

    `batch`: an example; None: token ids. Raises whatever the model's code raises on meta.
    """
    full_outputs = {name for name in builder.modules if not _num_weights(builder, name)}
    traced, trace = _recorded(builder, batch)
    uses = feature_uses(builder, trace, full_outputs)
    for _ in range(_MAX_ROUNDS):
        full_outputs |= uses.first_escaped
        if full_outputs.issuperset(name for name in uses.called if name in uses.escaped):
            break
        uses = feature_uses(builder, trace, full_outputs)
    builder.needs_all_features |= uses.escaped | full_outputs
    in_blocks = {name for name in uses.called if builder.block_of(name) is not None}
    layers = in_blocks - uses.read_elsewhere
    styles = _divided(builder, uses, layers, full_outputs, traced)
    styles |= _gathered(builder, [name for name in uses.called if name in layers], styles)
    if not styles:
        return {}
    styled = {_weight_id(builder, name): styles[name] for name in uses.called if name in styles}
    for name, module in builder.modules.items():  # one that shares its weight, and is not called
        if name not in uses.called and linear_features(module) and _weight_id(builder, name) in styled:
            styles[name] = styled[_weight_id(builder, name)]
    return styles | dict.fromkeys(uses.read_elsewhere, STYLES["replicate"])


def _gathered(
    builder: TPPlanBuilder, layers: Iterable[str], divided: Mapping[str, StyleSpec]
) -> dict[str, StyleSpec]:
    """Return styles of the other layers in blocks, without small ones and the rest of what is divided."""
    of_blocks = _weights(builder, layers, builder.block_of)
    of_regions = _weights(builder, [name for name in layers if name in divided], builder.region_of)
    weights = {name: _num_weights(builder, name) for name in layers if name not in divided}
    return {
        name: STYLES["colwise_gather_output"]
        for name, size in weights.items()
        if size * _SMALL >= of_blocks[builder.block_of(name)] and size > of_regions[builder.region_of(name)]
    }


def _weights(
    builder: TPPlanBuilder, layers: Iterable[str], key: Callable[[str], str | None]
) -> Counter[str | None]:
    """Count the weights of linear layers, by block or region."""
    weights = Counter[str | None]()
    for name in layers:
        weights[key(name)] += _num_weights(builder, name)
    return weights


def _weight_id(builder: TPPlanBuilder, name: str) -> int:
    return id(builder.modules[name].weight)


def _num_weights(builder: TPPlanBuilder, name: str) -> int:
    """Return the size of a linear layer's weight; 0 if it has fewer outputs than there are columns."""
    features = linear_features(builder.modules[name]) if name in builder.modules else None
    out_features, in_features, _ = features or (0, 0, False)
    return out_features * in_features if out_features >= builder.cols else 0


# --- layers that need no gather


def _divided(
    builder: TPPlanBuilder,
    uses: FeatureUses,
    layers: set[str],
    full_outputs: Set[str],
    batch: Mapping[str, Tensor],
) -> dict[str, StyleSpec]:
    """Return styles of what needs no gather, as far as the run on shards repeats the full one:
    [Note: the same run on shards]."""
    for with_heads in (True, False):
        styles = _pairs(builder, uses, layers, with_heads)
        if not styles or _is_repeated(builder, uses, full_outputs, styles, batch):
            return styles
    return {}


def _pairs(
    builder: TPPlanBuilder, uses: FeatureUses, layers: set[str], with_heads: bool
) -> dict[str, StyleSpec]:
    parts: dict[str, set[int]] = {}
    sources: dict[str, frozenset[str]] = {}  # of the features that a layer sums over
    units: dict[str, int] = {}
    bad = set(uses.called) - layers | uses.escaped | uses.returned
    for name, inputs in uses.inputs.items():
        found = [features for features in inputs if features is not None]
        if not found:
            continue
        counted = {source for features in found for source in features.sources}
        for source, count in counted:
            parts.setdefault(source, set()).add(count)
        sources[name] = frozenset(source for source, _ in counted)
        units[name] = math.gcd(*(features.units for features in found))
        if name not in layers or len(found) < len(inputs):
            bad |= sources[name]
    bad |= {source for source, counts in parts.items() if len(counts) > 1}
    of_source = {source: min(counts) for source, counts in parts.items()}
    linear = _weights(builder, uses.called, builder.block_of)
    for name, of_layer in sources.items():
        members = [*((source, of_source[source]) for source in of_layer), (name, 0)]
        widths = {of: _unit_width(builder, of, count, units[name]) for of, count in members}
        is_small = sum(_num_weights(builder, of) for of in widths) * _TINY < linear[builder.block_of(name)]
        if is_small or not _can_divide(widths, units[name], builder, with_heads):
            bad |= of_layer
    while True:
        before = len(bad)
        columns: dict[str, int] = {}
        rows: set[str] = set()
        for name, of_layer in sources.items():
            if of_layer & (bad | rows) or name in columns:
                bad |= of_layer
            else:
                rows.add(name)
                columns |= dict.fromkeys(sorted(of_layer), units[name])  # one order on every rank
        summed = _summed_parts(builder, uses, layers - rows, columns.keys(), bad)
        if len(bad) == before:
            break
    styles = {}
    for name, num_units in columns.items():
        width = _unit_width(builder, name, of_source[name], num_units)
        owner, multiple = name.rpartition(".")[0], _multiple(builder, name, width)
        if name in builder.shapes and isinstance(builder.modules[owner], nn.Conv1d):
            styles[owner] = StyleSpec(Style.DEPTHWISE, multiple=multiple)
        else:
            styles[name] = StyleSpec(Style.COLUMN, parts=of_source[name], multiple=multiple)
    for name in sorted(rows):
        width = _unit_width(builder, name, 0, units[name])
        styles[name] = StyleSpec(Style.ROW, multiple=_multiple(builder, name, width))
    for name, ranges in summed.items():
        is_layer = name in builder.modules
        styles[name] = (
            StyleSpec(Style.MLA_LATENT, summed=tuple(_joined(ranges)))
            if is_layer
            else STYLES["replicated_with_grad_allreduce"]
        )
    return styles


def _summed_parts(
    builder: TPPlanBuilder, uses: FeatureUses, layers: set[str], columns: Set[str], bad: set[str]
) -> dict[str, list[Range]]:
    """The parts whose gradients are sums over columns, by layer or parameter; see `uses.py` [Note: parts].

    Adds to `bad` the sources of features that meet a part which cannot be summed.
    """
    summed: dict[str, list[Range]] = {}
    kept = uses.kept | {part for part, sources in uses.met if not sources <= columns}
    for part, sources in uses.met:
        can_sum = part.of in layers or (part.of in builder.shapes and builder.block_of(part.of) is not None)
        if sources <= columns and can_sum and not any(map(part.overlaps, kept)):
            summed.setdefault(part.of, []).append((part.start, part.stop))
        else:
            bad |= sources
    return summed


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The union of ranges, in order."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _unit_width(builder: TPPlanBuilder, name: str, parts: int, units: int) -> int:
    """Features of a unit, in each part of a layer's output; `parts` 0: in its input."""
    if name in builder.shapes:
        return builder.shapes[name][0] // parts // units
    out_features, in_features, _ = linear_features(builder.modules[name]) or (0, 0, False)
    return (out_features // parts if parts else in_features) // units


def _multiple(builder: TPPlanBuilder, name: str, width: int) -> int | None:
    """Return the number of features at multiples of which to split, if not at an attention's heads, or as a
    width is split anywhere."""
    is_in_attention = attention_of(builder, name) is not None
    if name in builder.modules and is_in_attention:
        return None
    return width if width > 1 or is_in_attention else None


def _can_divide(widths: Mapping[str, int], units: int, builder: TPPlanBuilder, with_heads: bool) -> bool:
    """Return whether columns get complete units, and the same ones of every layer. `widths`: of a unit."""
    if units < builder.cols:
        return False
    attentions = {name: path for name in widths if (path := attention_of(builder, name)) is not None}
    if not attentions and set(widths.values()) == {1}:
        return True
    counts = [head_counts(builder, path) or (0, 0) for path in attentions.values()]
    has_complete_heads = all(number % builder.cols == 0 for number in (units, *chain(*counts)))
    return (
        with_heads
        and has_complete_heads
        and all(is_of_heads(builder, of, units * widths[of]) for of in attentions if of in builder.modules)
    )


def _is_repeated(
    builder: TPPlanBuilder,
    uses: FeatureUses,
    full_outputs: Set[str],
    styles: Mapping[str, StyleSpec],
    batch: Mapping[str, Tensor],
) -> bool:
    """Return whether the model on the first column's shards runs the operators of the full run, on shards."""
    try:
        shards = feature_uses(builder, record_uses(builder, batch, styles), full_outputs)
    except Exception:  # any error of the model's code, whose views or sums do not fit
        return False
    columns = {name for name, spec in styles.items() if spec.style is Style.COLUMN}
    for name, spec in styles.items():
        columns |= {*builder.own_parameters(name).values()} if spec.style is Style.DEPTHWISE else set()

    def is_shard(full: TracedResult, result: TracedResult) -> bool:
        shape, expandable, features = full
        if features is None:  # where it is expanded, it has the same value for all features
            sizes = zip(shape, expandable, result[0], strict=False)
            is_alike = all(own == size or before == 1 < size for size, before, own in sizes)
            return len(shape) == len(result[0]) and is_alike
        is_sharded = columns.issuperset(name for name, _ in features.sources)
        return result[0] == (features.shard(shape, builder.cols) if is_sharded else shape)

    pairs = zip(uses.operators, shards.operators, strict=False)
    return len(uses.operators) == len(shards.operators) and all(
        key == of_shard and len(results) == len(own) and all(map(is_shard, results, own))
        for (key, results), (of_shard, own) in pairs
    )


def _recorded(
    builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None
) -> tuple[Mapping[str, Tensor], ModelTrace]:
    """Return the batch with which the model runs on meta, and the recording of the run."""
    failure: Exception | None = None
    for traced in traced_batches(builder.model, batch):
        try:
            return traced, record_uses(builder, traced)
        except Exception as error:  # any error of the model's code without values
            failure = error
    assert failure is not None, "there are batches"
    raise failure
