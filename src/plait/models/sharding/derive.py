"""Tensor plans of models that have none, derived from a run of the model on meta.

[Note: derived plans]
A linear layer may be sharded over its outputs in two ways.

- `colwise_gather_output`: the layer's output is all-gathered, and everything around the layer stays as it is.
  It is right in any code that calls the layer as a module, whatever the code does with the output.
- `colwise`, without a gather, if every use of the output keeps features apart (features.py), up to linear
  layers, which are then `rowwise`: the feed-forward and the attention of most models. Any other use (a norm,
  a sum with the residual stream, the model's result) ends the search, and the layers gather. So does a
  number that all features are multiplied with and that depends on a parameter: its gradient would be a sum
  over columns.

Layers that the run does not call, or whose weight is read outside of them, are replicated, and so are those
that are small next to the block's largest.

[Note: the same run on shards]
Code may contain numbers of heads and widths. So the model runs once more with the weights of one column, and
with the attributes of attentions that count heads divided (heads.py). Every operator has to be the same one
as before, with the same numbers, and results of the same shape, or of a shard's where they have features.
Otherwise all layers of attentions gather; if it is then still another run, all layers do.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.models.activation_memory import DeviceKernelsOnMeta
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.features import Features, follow
from plait.models.sharding.heads import add_head_attributes, attention_of, find_heads, head_counts
from plait.models.sharding.styles import STYLES, StyleSpec
from plait.models.stages.dataflow import OperatorsOnMixed, borrowed_on_meta, traced_batches
from plait.models.task import forward_inputs
from plait.models.tensors import tensors_in
from plait.models.transformers_types import linear_forwards
from plait.plan.sharding import Style

# Which of these a reshape is depends on sizes.
_ATEN = torch.ops.aten
_LAYOUT = {_ATEN.view, _ATEN._unsafe_view, _ATEN._reshape_alias, _ATEN.clone, _ATEN.alias}
_SMALL = 16  # a layer is replicated if the largest in its block has this many times as many weights


def derive_styles(builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None) -> dict[str, StyleSpec]:
    """Return styles of layers, by name; see [Note: derived plans].

    `batch`: an example; None: token ids. Raises whatever the model's code raises on meta.
    """
    traced, uses = _traced(builder, batch)
    largest = _largest_in_blocks(builder)
    in_blocks = [name for name in uses.called if builder.block_of(name) in largest]
    layers = [name for name in in_blocks if name not in uses.read_elsewhere]
    builder.read_in_full |= uses.escaped
    styles = {
        name: STYLES["colwise_gather_output"]
        for name in layers
        if _num_weights(builder, name) * _SMALL >= largest[builder.block_of(name)]
    }
    styles |= _repeated_pairs(builder, uses, set(layers), traced)
    if not styles:
        return {}
    styled = {_weight_id(builder, name): style for name, style in styles.items()}
    for name, module in builder.modules.items():  # one that shares its weight, and is not called
        if name not in uses.called and linear_features(module) and _weight_id(builder, name) in styled:
            styles[name] = styled[_weight_id(builder, name)]
    return styles | dict.fromkeys(uses.read_elsewhere, STYLES["replicate"])


def _weight_id(builder: TPPlanBuilder, name: str) -> int:
    return id(builder.modules[name].weight)


def _num_weights(builder: TPPlanBuilder, name: str) -> int:
    """Return the size of a linear layer's weight; 0 if it has fewer outputs than there are columns."""
    features = linear_features(builder.modules[name])
    return features[0] * features[1] if features and features[0] >= builder.cols else 0


def _largest_in_blocks(builder: TPPlanBuilder) -> dict[str | None, int]:
    """Return the size of the largest weight of a linear layer, by block, for blocks that have any."""
    largest: dict[str | None, int] = {}
    for name in builder.modules:
        block, size = builder.block_of(name), _num_weights(builder, name)
        if block is not None and size > largest.get(block, 0):
            largest[block] = size
    return largest


# --- pairs of layers without a gather between them

Operator = tuple[tuple[Any, ...], list[tuple[tuple[int, ...], Features | None]]]


@dataclass
class _Uses:
    """Uses of layers in the run on meta, by name.

    called          layers, in the order of their first calls
    inputs          for each call of a layer, the features of its input
    escaped         layers whose output is used in a way that may need all features
    returned        layers whose output's features are in the model's result
    norms           for each call of a norm with parameters, the features of its input
    read_elsewhere  layers and embeddings whose weight is read outside of them
    operators       that compute outside of layers: name and numbers; of each result, shape and features
    """

    called: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, list[Features | None]] = field(default_factory=dict)
    escaped: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)
    read_elsewhere: set[str] = field(default_factory=set)
    norms: dict[str, list[Features | None]] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)


def _repeated_pairs(
    builder: TPPlanBuilder, uses: _Uses, layers: set[str], batch: Mapping[str, Tensor]
) -> dict[str, StyleSpec]:
    """Styles of layers that need no gather, and of those that sum over their features, as far as the run on
    shards repeats the full one: [Note: the same run on shards]."""
    for with_heads in (True, False):
        styles = _pairs(builder, uses, layers, with_heads)
        if not styles or _is_repeated(builder, uses, styles, batch):
            return styles
    return {}


def _pairs(builder: TPPlanBuilder, uses: _Uses, layers: set[str], with_heads: bool) -> dict[str, StyleSpec]:
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
    for name, of_layer in sources.items():
        members = [(source, of_source[source]) for source in of_layer]
        widths = [_unit_width(builder, *member, units[name]) for member in (*members, (name, 0))]
        if not _can_divide([name, *of_layer], widths, units[name], builder, with_heads):
            bad |= of_layer
    norms = _head_norms(uses)
    for name, of_norm in norms.items():
        parent = name.rpartition(".")[0]
        if None in uses.norms[name] or not any(source.startswith(f"{parent}.") for source in of_norm):
            bad |= of_norm
    while True:
        before = len(bad)
        columns: dict[str, int] = {}
        rows: set[str] = set()
        for of_norm in norms.values():
            bad |= of_norm if of_norm & bad else set()
        for name, of_layer in sources.items():
            if of_layer & (bad | rows) or name in columns:
                bad |= of_layer
            else:
                rows.add(name)
                columns |= dict.fromkeys(of_layer, units[name])
        if len(bad) == before:
            break
    styles = {}
    for name, num_units in columns.items():
        width = _unit_width(builder, name, of_source[name], num_units)
        styles[name] = StyleSpec(
            Style.COLUMN, parts=of_source[name], multiple=_multiple(builder, name, width)
        )
    for name in rows:
        width = _unit_width(builder, name, 0, units[name])
        styles[name] = StyleSpec(Style.ROW, multiple=_multiple(builder, name, width))
    per_head = (name for name, of_norm in norms.items() if of_norm <= columns.keys())
    return styles | dict.fromkeys(per_head, STYLES["replicated_with_grad_allreduce"])


def _head_norms(uses: _Uses) -> dict[str, set[str]]:
    """The layers whose features norms read that treat them alike: those of each head, mostly."""
    read = {
        name: {source for features in inputs if features is not None for source, _ in features.sources}
        for name, inputs in uses.norms.items()
    }
    return {name: sources for name, sources in read.items() if sources}


def _unit_width(builder: TPPlanBuilder, name: str, parts: int, units: int) -> int:
    """Features of a unit, in each part of a layer's output; `parts` 0: in its input."""
    out_features, in_features, _ = linear_features(builder.modules[name]) or (0, 0, False)
    return (out_features // parts if parts else in_features) // units


def _multiple(builder: TPPlanBuilder, name: str, width: int) -> int | None:
    """Return the number of features at multiples of which to split, if not at an attention's heads."""
    return width if width > 1 and attention_of(builder, name) is None else None


def _can_divide(
    names: Iterable[str], widths: Iterable[int], units: int, builder: TPPlanBuilder, with_heads: bool
) -> bool:
    """Return whether columns get whole units, and the same ones of every layer."""
    if units < builder.cols:
        return False
    attentions = [attention_of(builder, name) for name in names]
    if set(attentions) == {None} and set(widths) == {1}:
        return True
    counts = [head_counts(builder, path) or (0, 0) for path in attentions if path is not None]
    return with_heads and all(number % builder.cols == 0 for number in (units, *chain(*counts)))


def _is_repeated(
    builder: TPPlanBuilder, uses: _Uses, styles: Mapping[str, StyleSpec], batch: Mapping[str, Tensor]
) -> bool:
    """Return whether the model on the first column's shards runs the operators of the full run, on shards."""
    try:
        shards = _trace(builder, batch, styles)
    except Exception:  # any error of the model's code, whose views or sums do not fit
        return False
    columns = {name for name, spec in styles.items() if spec.style is Style.COLUMN}

    def shard_of(shape: tuple[int, ...], features: Features | None) -> tuple[int, ...]:
        is_sharded = features is not None and columns.issuperset(name for name, _ in features.sources)
        return features.shard(shape, builder.cols) if features is not None and is_sharded else shape

    expected = [(key, [shard_of(*result) for result in results]) for key, results in uses.operators]
    return expected == [(key, [shape for shape, _ in results]) for key, results in shards.operators]


# --- the run on meta


def _traced(builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None) -> tuple[Mapping[str, Tensor], _Uses]:
    """Return the batch with which the model runs on meta, and the uses of layers in the run."""
    failure: Exception | None = None
    for traced in traced_batches(builder.model, batch):
        try:
            return traced, _trace(builder, traced, {})
        except Exception as error:  # any error of the model's code without values
            failure = error
    assert failure is not None, "there are batches"
    raise failure


def _trace(builder: TPPlanBuilder, batch: Mapping[str, Tensor], styles: Mapping[str, StyleSpec]) -> _Uses:
    """`styles`: of layers that have the first column's shards of their weights in this run."""
    model, uses = builder.model, _Uses()
    attributes = _head_attributes(builder, styles)
    config: Any = torch.fx.experimental._config
    with borrowed_on_meta(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        _shard_on_meta(builder, styles)
        for (name, key), values in attributes.items():
            setattr(builder.modules[name], key, values[0])
        tracer = _Tracer(builder, uses)
        assumed = config.patch(meta_nonzero_assume_all_nonzero=True)
        with assumed, DeviceKernelsOnMeta(torch.device("cpu")), _WithoutDropout(), tracer:
            for is_training in (True, False):
                result = model.train(is_training)(**forward_inputs(model, batch))
                uses.returned |= tracer.sources_of(tensors_in(result))
    return uses


def _head_attributes(
    builder: TPPlanBuilder, styles: Mapping[str, StyleSpec]
) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """The attributes that count heads, by module and key, of each column."""
    scratch = TPPlanBuilder(builder.model, builder.rows, builder.cols, builder.blocks, dict(styles))
    for name, spec in styles.items():
        heads = find_heads(scratch, name) if spec.style is Style.COLUMN else None
        if heads is not None:
            add_head_attributes(scratch, heads)
    return scratch.attributes


def _shard_on_meta(builder: TPPlanBuilder, styles: Mapping[str, StyleSpec]) -> None:
    linear = {name: spec for name, spec in styles.items() if spec.style in (Style.COLUMN, Style.ROW)}
    for name, spec in linear.items():
        module = builder.modules[name]
        out_features, in_features, transposed = linear_features(module) or (0, 0, False)
        is_column = spec.style is Style.COLUMN
        size = out_features // spec.parts if is_column else in_features
        own = -(-size // builder.cols)
        if transposed and is_column:
            vars(module)["nf"] = own * spec.parts  # read by the forward of transformers' Conv1D
        for key, parameter in module._parameters.items():
            if parameter is not None and (is_column or parameter.ndim == 2):
                dim = (is_column == transposed) * 1 if parameter.ndim == 2 else 0
                shard = parameter.detach().narrow(dim, 0, own * spec.parts)
                module._parameters[key] = nn.Parameter(shard, requires_grad=False)


class _WithoutDropout(TorchFunctionMode):
    """Leave out dropout, which is element-wise, but not one operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("attn_mask", "dropout_p", "is_causal")
            args, kwargs = args[:3], {**dict(zip(names, args[3:], strict=False)), **kwargs, "dropout_p": 0.0}
        return args[0] if func is F.dropout else func(*args, **kwargs)


class _Tracer(OperatorsOnMixed):
    """Trace the features of linear layers' outputs through operators."""

    def __init__(self, builder: TPPlanBuilder, uses: _Uses) -> None:
        super().__init__()
        self._uses = uses
        self._features: dict[int, Features] = {}  # by tensor
        self._sources: dict[int, set[str]] = {}  # of features anywhere in a storage
        # What depends on parameters, by storage: the module whose they are, or "" for those of several.
        self._learned: dict[int, str] = {}
        self._readers: dict[int, set[str]] = {}  # layers and embeddings, by the storage of a parameter
        self._running: list[str] = []
        self._norms: list[str] = []  # that are running
        self._alive: list[Any] = []  # tensors and storages, so that no address is reused
        for name, module in builder.modules.items():
            for parameter in module.parameters(recurse=False):
                self._learned[_key(parameter)] = "" if _key(parameter) in self._learned else name
            if builder.is_norm(name) and not [*module.children()] and [*module.parameters()]:
                module.register_forward_pre_hook(partial(self._enter_norm, name), with_kwargs=True)
                module.register_forward_hook(lambda *_: self._norms.pop() and None)
            is_linear = getattr(module.forward, "__func__", None) in linear_forwards()
            if not is_linear and not isinstance(module, nn.Embedding):
                continue
            for parameter in module.parameters(recurse=False):
                self._readers.setdefault(_key(parameter), set()).add(name)
            module.register_forward_pre_hook(partial(self._enter, name, is_linear), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name, is_linear))

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Record that these are used in a way that may need all features."""
        self._uses.escaped |= self.sources_of(tensors)

    def sources_of(self, tensors: Iterable[Tensor]) -> set[str]:
        return set[str]().union(*(self._sources.get(_key(tensor), ()) for tensor in tensors))

    def _features_of(self, tensor: Tensor) -> Features | None:
        return self._features.get(id(tensor))

    def _enter(self, name: str, is_linear: bool, _: nn.Module, *given: Any) -> None:
        self._running.append(name)
        tensors = list(tensors_in(given))
        if not is_linear:
            self.use(tensors)
            return
        features = self._features_of(tensors[0]) if len(tensors) == 1 else None
        if features is None or (features.dim, features.outer) != (tensors[0].ndim - 1, 1):
            features = None
            self.use(tensors)
        self._uses.called.setdefault(name)
        self._uses.inputs.setdefault(name, []).append(features)

    def _enter_norm(self, name: str, _: nn.Module, *given: Any) -> None:
        self._norms.append(name)
        tensors = list(tensors_in(given))
        self._uses.norms.setdefault(name, []).append(self._features_of(tensors[0]))

    def _leave(self, name: str, is_linear: bool, *call: Any) -> None:
        self._running.pop()
        if is_linear:
            output = call[-1]
            self._mark(output, Features(frozenset({(name, 1)}), output.ndim - 1, output.shape[-1]))

    def _mark(self, tensor: Tensor, features: Features) -> None:
        self._alive += [tensor, tensor.untyped_storage()]
        self._features[id(tensor)] = features
        self._sources.setdefault(_key(tensor), set()).update(name for name, _ in features.sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(tensors_in((args, kwargs or {})))
        for tensor in tensors:
            readers = self._readers.get(_key(tensor), set())
            if readers.isdisjoint(self._running):
                self._uses.read_elsewhere |= readers
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = list(tensors_in(result))
        owners = {self._learned[key] for key in map(_key, tensors) if key in self._learned}
        if owners:
            self._alive += [tensor.untyped_storage() for tensor in results]
            owner = owners.pop() if len(owners) == 1 else ""
            self._learned.update((_key(tensor), owner) for tensor in results)
        if not self._running:
            if self.sources_of(tensors):
                self._follow(func, args, kwargs or {}, tensors, result)
            if func.overloadpacket in _LAYOUT:
                return result
            numbers = tuple(value for value in tree_leaves((args, kwargs)) if isinstance(value, float))
            placed = [(tuple(tensor.shape), self._features_of(tensor)) for tensor in results]
            self._uses.operators.append(((str(func), *numbers), placed))
        return result

    def _follow(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor], result: Any
    ) -> None:
        """Trace the arguments' features into the result, or record that they are used in another way."""
        others = [tensor for tensor in tensors if self._features_of(tensor) is None]
        owners = {self._learned.get(_key(tensor)) for tensor in others if tensor.is_floating_point()}
        followed = None
        if owners <= {None, *self._norms} and not self.sources_of(others):
            followed = follow(func, args, kwargs, result, self._features_of)
        if func._schema.is_mutable:  # other views of the memory have the features that they had
            followed = [each for each in followed or () if self._features_of(each[0]) == each[1]] or None
        if followed is None:
            self.use(tensors)
        for tensor, features in followed or ():
            self._mark(tensor, features)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
