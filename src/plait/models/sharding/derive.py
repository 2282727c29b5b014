"""Tensor plans of models that have none, derived from a run of the model on meta.

[Note: derived plans]
A linear layer may be sharded over its outputs in two ways.

- `colwise_gather_output`: the layer's output is all-gathered, and everything around the layer stays as it is.
  It is right in any code that calls the layer as a module, whatever the code does with the output.
- `colwise`, without a gather, if every use of the output is element-wise up to linear layers, which are then
  `rowwise`: the feed-forward of most models. The run on meta shows it: an operator keeps the features apart
  if torch tags it as pointwise, and all its other tensors are sharded alike, or are masks. (A number for all
  features, such as a router's weight, would be right in forward; but its gradient is a sum over columns.)
  Any other use (a view, a norm, a sum with the residual stream, the model's result) ends the search, and the
  layers gather.

No names are read, and nothing is guessed: attention is gathered, since a run on meta does not show that heads
are independent. Layers that the run does not call, or whose weight is read outside of them, are replicated,
and so are those that are small next to the block's largest.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.models.activation_memory import DeviceKernelsOnMeta
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.heads import find_heads
from plait.models.sharding.styles import STYLES, StyleSpec
from plait.models.stages.dataflow import OperatorsOnMixed, borrowed_on_meta, traced_batches
from plait.models.task import forward_inputs
from plait.models.tensors import tensors_in
from plait.models.transformers_types import linear_forwards

_SMALL = 16  # a layer is replicated if the largest in its block has this many times as many weights
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def derive_styles(builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None) -> dict[str, StyleSpec]:
    """Return styles of layers, by name; see [Note: derived plans].

    `batch`: an example; None: token ids. Raises whatever the model's code raises on meta.
    """
    uses, failure = _Uses(), None
    for traced in traced_batches(builder.model, batch):
        try:
            uses, failure = _trace(builder, traced), None
            break
        except Exception as error:  # any error of the model's code without values
            failure = error
    if failure is not None:
        raise failure
    largest = _largest_in_blocks(builder)
    layers = [
        name
        for name in uses.called
        if name not in uses.read_elsewhere
        and _num_weights(builder, name) * _SMALL >= largest.get(builder.block_of(name), math.inf)
    ]
    may_pair = {name for name in layers if find_heads(builder, name) is None}
    columns, rows = _pairs(uses, may_pair)
    builder.read_in_full |= uses.escaped
    styles = dict.fromkeys(layers, STYLES["colwise_gather_output"])
    styles |= dict.fromkeys(columns, STYLES["colwise"]) | dict.fromkeys(rows, STYLES["rowwise"])
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


@dataclass
class _Uses:
    """Uses of layers in the run on meta, by name.

    called          layers, in the order of their first calls
    inputs          for each call of a layer, the layers whose outputs its input's features are
    escaped         layers whose output is used in a way that may need all features
    returned        layers whose output's features are in the model's result
    read_elsewhere  layers and embeddings whose weight is read outside of them
    """

    called: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    escaped: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)
    read_elsewhere: set[str] = field(default_factory=set)


def _pairs(uses: _Uses, may_pair: set[str]) -> tuple[set[str], set[str]]:
    """Return the layers that need no gather, and those that sum over their outputs' features."""
    readers = {name: frozenset[str]().union(*inputs) for name, inputs in uses.inputs.items()}
    readers = {name: sources for name, sources in readers.items() if sources}
    bad = set(uses.called) - may_pair | uses.escaped | uses.returned
    for name, sources in readers.items():
        if name not in may_pair or not all(uses.inputs[name]):
            bad |= sources
    while True:
        before = len(bad)
        columns: set[str] = set()
        rows: set[str] = set()
        for name, sources in readers.items():
            if sources & (bad | rows) or name in columns:
                bad |= sources
            else:
                rows.add(name)
                columns |= sources
        if len(bad) == before:
            return columns, rows


def _trace(builder: TPPlanBuilder, batch: Mapping[str, Tensor]) -> _Uses:
    model, uses = builder.model, _Uses()
    config: Any = torch.fx.experimental._config
    with borrowed_on_meta(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        tracer = _Tracer(builder, uses)
        assumed = config.patch(meta_nonzero_assume_all_nonzero=True)
        with assumed, DeviceKernelsOnMeta(torch.device("cpu")), _WithoutDropout(), tracer:
            for is_training in (True, False):
                result = model.train(is_training)(**forward_inputs(model, batch))
                uses.returned |= tracer.sources_of(tensors_in(result))
    return uses


class _WithoutDropout(TorchFunctionMode):
    """Leave out dropout, which is element-wise, but not one operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is F.dropout else func(*args, **(kwargs or {}))


class _Tracer(OperatorsOnMixed):
    """Trace outputs of linear layers through element-wise operators, from storage to storage."""

    def __init__(self, builder: TPPlanBuilder, uses: _Uses) -> None:
        super().__init__()
        self._uses = uses
        self._sources: dict[int, frozenset[str]] = {}
        self._readers: dict[int, set[str]] = {}  # layers and embeddings, by the storage of a parameter
        self._running: list[str] = []
        self._alive: list[Any] = []  # storages, so that no address is reused
        for name, module in builder.modules.items():
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

    def _enter(self, name: str, is_linear: bool, _: nn.Module, *given: Any) -> None:
        self._running.append(name)
        sources = self.sources_of(tensors_in(given))
        if is_linear:
            self._uses.called.setdefault(name)
            self._uses.inputs.setdefault(name, []).append(sources)
        else:
            self._uses.escaped |= sources

    def _leave(self, name: str, is_linear: bool, *call: Any) -> None:
        self._running.pop()
        if is_linear:
            self._mark(call[-1], frozenset({name}))

    def _mark(self, tensor: Tensor, sources: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._sources[storage._cdata] = sources

    def sources_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset[str]().union(*(self._sources.get(_key(tensor), frozenset()) for tensor in tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(tensors_in((args, kwargs or {})))
        for tensor in tensors:
            readers = self._readers.get(_key(tensor), set())
            if readers.isdisjoint(self._running):
                self._uses.read_elsewhere |= readers
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self._running and self.sources_of(tensors):
            self._follow(func, tensors, result)
        return result

    def _follow(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        """Trace the arguments' features into the result, or record that they are used in another way."""
        is_pointwise = torch.Tag.pointwise in func.tags or func in _COPIES
        if not (is_pointwise and isinstance(result, Tensor) and result.ndim):
            self.use(tensors)
            return
        is_full = [tensor.shape[-1:] == result.shape[-1:] for tensor in tensors]
        if all(
            bool(self.sources_of([tensor])) if full else not tensor.is_floating_point()
            for tensor, full in zip(tensors, is_full, strict=True)
        ):
            self._mark(result, self.sources_of(tensors))
        else:
            self.use(tensors)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
