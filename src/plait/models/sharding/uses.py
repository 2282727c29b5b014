"""How a model uses the outputs of its linear layers, and its parameters, as the recording of a run shows.

[Note: parts]
What the model computes from a full tensor, a parameter or the full output of a layer, depends on a part of
it: a range of a layer's features, or all of a parameter. Where features meet such a tensor (a rotary key that
all heads share, a norm's weight), every column computes with features of its own, and the part's gradient is
a sum over columns. Anywhere else (in a layer, in the residual stream, in the model's result) it is complete,
and it cannot be both.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.features import BLANK, Features, Followed, copied, expandable_shape, follow
from plait.models.sharding.heads import add_head_attributes, find_heads
from plait.models.sharding.styles import StyleSpec
from plait.models.task import forward_inputs
from plait.models.tensors import storage_key, tensors_in
from plait.models.trace.modes import without_dropout
from plait.models.trace.prepare import prepared
from plait.models.trace.recorder import Entered, Left, ModelTrace, Operator, Returned
from plait.models.transformers_types import has_linear_forward
from plait.plan.sharding import Style

# Which of these a reshape is depends on sizes.
_ATEN = torch.ops.aten
_LAYOUT = {_ATEN.view, _ATEN._unsafe_view, _ATEN._reshape_alias, _ATEN.clone, _ATEN.alias}
_SLICES = {_ATEN.slice, _ATEN.split, _ATEN.split_with_sizes}

TracedResult = tuple[tuple[int, ...], tuple[int, ...], Features | None]
TracedOperator = tuple[tuple[Any, ...], list[TracedResult]]


@dataclass(frozen=True)
class TensorPart:
    """Features of a layer's full output, or a parameter; see [Note: parts]. `is_slice`: exactly these, in
    the last dim."""

    of: str
    start: int = 0
    stop: int = 1
    is_slice: bool = field(default=False, compare=False)

    def overlaps(self, other: "TensorPart") -> bool:
        return self.of == other.of and self.start < other.stop and other.start < self.stop


_SEVERAL = TensorPart("")  # of more, or of what is not traced
_MAX_PARTS = 4  # layers and parameters on which a tensor depends


@dataclass
class FeatureUses:
    """Uses of layers and parameters in a run on meta, by name.

    called          layers, in the order of their first calls
    inputs          for each call of a layer, the features of its input
    escaped         layers and parameters whose features are used in a way that may need all of them
    first_escaped   of these, the ones that did not meet what others in the same region had become before
    returned        layers whose output's features are in the model's result
    met             parts, and whose features they have met
    kept            parts that are used in any other way
    read_elsewhere  layers and embeddings whose weight is read outside of them
    operators       that compute outside of layers: name and numbers; of each result its shape, the one before
                    it was expanded, and features
    """

    called: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, list[Features | None]] = field(default_factory=dict)
    escaped: set[str] = field(default_factory=set)
    first_escaped: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)
    met: set[tuple[TensorPart, frozenset[str]]] = field(default_factory=set)
    kept: set[TensorPart] = field(default_factory=set)
    read_elsewhere: set[str] = field(default_factory=set)
    operators: list[TracedOperator] = field(default_factory=list)


def record_uses(
    builder: TPPlanBuilder, batch: Mapping[str, Tensor], styles: Mapping[str, StyleSpec] | None = None
) -> ModelTrace:
    """Run the model on meta, in training and in evaluation.

    `styles`: of layers and parameters that have the first column's shards in this run. Raises whatever the
    model's code raises on meta.
    """
    model, trace, styles = builder.model, ModelTrace(), styles or {}
    attributes = _head_attributes(builder, styles)
    readers = {name: module for name, module in builder.modules.items() if _is_reader(module)}
    with prepared(model), without_dropout():
        _shard_on_meta(builder, styles)
        for (name, key), values in attributes.items():
            setattr(builder.modules[name], key, values[0])
        with trace.recording(model, layers=readers):
            for is_training in (True, False):
                trace.add_result(model.train(is_training)(**forward_inputs(model, batch)))
    return trace


def _is_reader(module: nn.Module) -> bool:
    return has_linear_forward(module) or isinstance(module, nn.Embedding)


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
    for name in (name for name, spec in styles.items() if spec.style is Style.DEPTHWISE):
        module: Any = builder.modules[name]
        module.groups = -(-module.groups // builder.cols)
        for key in [key for key, parameter in module._parameters.items() if parameter is not None]:
            _narrow(module, key, 0, module.groups)
    linear = {name: spec for name, spec in styles.items() if spec.style in (Style.COLUMN, Style.ROW)}
    for name, spec in linear.items():
        if name in builder.shapes:
            owner, _, key = name.rpartition(".")
            _narrow(builder.modules[owner], key, 0, -(-builder.shapes[name][0] // builder.cols))
            continue
        module = builder.modules[name]
        out_features, in_features, transposed = linear_features(module) or (0, 0, False)
        is_column = spec.style is Style.COLUMN
        size = out_features // spec.parts if is_column else in_features
        own = -(-size // builder.cols) * spec.parts
        if transposed and is_column:
            vars(module)["nf"] = own  # read by the forward of transformers' Conv1D
        for key, parameter in module._parameters.items():
            if parameter is not None and (is_column or parameter.ndim == 2):
                _narrow(module, key, (is_column == transposed) * 1 if parameter.ndim == 2 else 0, own)


def _narrow(module: nn.Module, key: str, dim: int, size: int) -> None:
    parameter = module._parameters[key]
    assert parameter is not None, "a parameter that has a style"
    shard = parameter.detach().narrow(dim, 0, size)
    module._parameters[key] = nn.Parameter(shard, requires_grad=False)


def feature_uses(
    builder: TPPlanBuilder, trace: ModelTrace, full_outputs: Set[str] = frozenset()
) -> FeatureUses:
    """Return the uses in a recorded run. `full_outputs`: layers whose outputs have no features."""
    query = _UseQuery(builder, trace, full_outputs)
    for event in trace.events:
        query.follow(event)
    query.uses.operators = query.operators()
    return query.uses


class _UseQuery:
    """Follows features and parts through operators."""

    def __init__(self, builder: TPPlanBuilder, trace: ModelTrace, full_outputs: Set[str]) -> None:
        self.uses, self._full_outputs = FeatureUses(), full_outputs
        self._divisible = {name for name in builder.shapes if _can_shard(builder, name)} - full_outputs
        self._features: dict[int, Features] = {}  # by tensor
        self._sources: dict[int, set[str]] = {}  # of features anywhere in a storage
        self._parts: dict[int, Set[TensorPart]] = {}  # by tensor
        self._learned: dict[int, Set[TensorPart]] = {}  # by storage, of other tensors in it
        self._mutated: set[int] = set()  # storages of several parts
        self._blank: dict[int, Tensor] = {}  # memory without values, by storage
        self._parameters: set[str] = set()  # with features
        self._readers: dict[int, set[str]] = {}  # layers and embeddings, by the storage of a parameter
        self._operators: list[tuple[tuple[Any, ...], list[Tensor]]] = []  # of operators outside of layers
        self._escaped_from: dict[int, frozenset[str | None]] = {}  # regions, by storage
        self._region_of = cache(builder.region_of)
        self._running: list[str] = []
        self._linear = {name for name, module in builder.modules.items() if has_linear_forward(module)}
        for name, module in builder.modules.items():
            reader = name if name in self._linear or isinstance(module, nn.Embedding) else ""
            for key in [key for key, parameter in module._parameters.items() if parameter is not None]:
                full_name = f"{name}.{key}"
                self._add_parameter(trace.parameters[full_name.removeprefix(".")], full_name, reader)

    def _add_parameter(self, parameter: Tensor, name: str, reader: str) -> None:
        key = storage_key(parameter)
        self._learned[key] = {_SEVERAL if reader or key in self._learned else TensorPart(name)}
        if reader:
            self._readers.setdefault(key, set()).add(reader)
        elif name in self._divisible:
            self._parameters.add(name)
            self._mark(parameter, Features(frozenset({(name, 1)}), 0, parameter.shape[0]))

    def follow(self, event: Any) -> None:
        match event:
            case Operator():
                self._follow_operator(event)
            case Entered(name, tensors):
                self._enter(name, tensors)
            case Left(name, tensors):
                self._running.pop()
                if name in self._linear:
                    self._leave(name, tensors[0])
            case Returned(tensors):
                self.uses.returned |= self.sources_of(tensors)
                self.keep(tensors)

    def use(self, tensors: Iterable[Tensor], results: Iterable[Tensor] = ()) -> None:
        """Record that these are used in a way that may need all features, and what the results come from."""
        sources = self.sources_of(tensors)
        before = frozenset[str | None]().union(
            *(self._escaped_from.get(storage_key(tensor), ()) for tensor in tensors)
        )
        self.uses.first_escaped |= {name for name in sources if self._region_of(name) not in before}
        self.uses.escaped |= sources
        if regions := before.union(map(self._region_of, sources)):
            self._escaped_from |= {storage_key(tensor): regions for tensor in results}

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Record that these are used as an unsharded model does."""
        self.uses.kept |= self._parts_of(tensors)

    def sources_of(self, tensors: Iterable[Tensor]) -> set[str]:
        found = set[str]().union(*(self._sources.get(storage_key(tensor), ()) for tensor in tensors))
        return found - (self._parameters & self.uses.escaped)

    def _features_of(self, tensor: Tensor) -> Features | None:
        features = self._features.get(id(tensor))
        is_left_out = features is not None and self.uses.escaped & self._parameters >= {
            name for name, _ in features.sources
        }
        return None if is_left_out else features

    def _parts_of(self, tensors: Iterable[Tensor]) -> set[TensorPart]:
        """The parts on which numbers with gradients depend."""
        found = set[TensorPart]()
        for tensor in tensors:
            parts = self._parts.get(id(tensor), self._learned.get(storage_key(tensor), set()))
            if parts and (tensor.is_floating_point() or tensor.is_complex()):
                found |= {_SEVERAL} if storage_key(tensor) in self._mutated else parts
        return found

    def _enter(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._running.append(name)
        self.keep(tensors)
        if name not in self._linear:
            self.use(tensors)
            return
        features = self._features_of(tensors[0]) if len(tensors) == 1 else None
        if features is None or (features.dim, features.outer) != (tensors[0].ndim - 1, 1):
            features = None
            self.use(tensors)
        self.uses.called.setdefault(name)
        self.uses.inputs.setdefault(name, []).append(features)

    def _leave(self, name: str, output: Tensor) -> None:
        if name in self._full_outputs:
            self._parts[id(output)] = {TensorPart(name, 0, output.shape[-1], is_slice=True)}
        else:
            self._mark(output, Features(frozenset({(name, 1)}), output.ndim - 1, output.shape[-1]))

    def _mark(self, tensor: Tensor, features: Features) -> None:
        self._features[id(tensor)] = features
        self._sources.setdefault(storage_key(tensor), set()).update(name for name, _ in features.sources)

    def _follow_operator(self, call: Operator) -> None:
        func, args, kwargs, result = call.func, call.args, call.kwargs, call.result
        tensors, results = list(tensors_in((args, kwargs))), list(tensors_in(result))
        for tensor in tensors:
            readers = self._readers.get(storage_key(tensor), set())
            if readers.isdisjoint(self._running):
                self.uses.read_elsewhere |= readers
        if self._running:
            if any(storage_key(tensor) in self._learned for tensor in tensors):
                self._depend(results, {_SEVERAL})
            return
        if func.overloadpacket in BLANK:
            self._blank |= {storage_key(tensor): tensor for tensor in results}
        elif self.sources_of(tensors) and self._follow(func, args, kwargs, tensors, result):
            if not self.sources_of(results) <= self._parameters:
                self._depend(results, {_SEVERAL})
            else:
                self._follow_parts(func, args, kwargs, tensors, results)
        else:
            self.use(tensors, results)
            self._follow_parts(func, args, kwargs, tensors, results)
        if func.overloadpacket not in _LAYOUT:
            # Of other operators, integers are sizes; of these, factors that may be sizes of a shard.
            kinds = (float, int) if torch.Tag.pointwise in func.tags else (float,)
            numbers = tuple(value for value in tree_leaves((args, kwargs)) if type(value) in kinds)
            self._operators.append(((str(func), *numbers), results))

    def _follow(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor], result: Any
    ) -> bool:
        """Trace features into the result. Returns False if they are used in another way."""
        if func is _ATEN.copy_.default and self._follow_copy(*tensors[:2]):
            return True
        followed = self._try_to_follow(func, args, kwargs, tensors, result)
        if followed is None and (escaped := self._only_of_parameters(tensors)):
            self.uses.escaped |= escaped
            if self.sources_of(tensors):
                followed = self._try_to_follow(func, args, kwargs, tensors, result)
        if followed is None:
            return False
        parts = self._parts_of(tensor for tensor in tensors if self._features_of(tensor) is None)
        for tensor, features in followed:
            self._mark(tensor, features)
            self.uses.met |= {(part, frozenset(name for name, _ in features.sources)) for part in parts}
        return True

    def operators(self) -> list[TracedOperator]:
        def result(tensor: Tensor) -> TracedResult:
            return tuple(tensor.shape), expandable_shape(tensor), self._features_of(tensor)

        return [(key, [*map(result, results)]) for key, results in self._operators]

    def _follow_copy(self, target: Tensor, source: Tensor) -> bool:
        """Trace features that are copied into a view of memory without values, or with features in the same
        place."""
        base = self._blank.get(storage_key(target))
        features, parts = self._features_of(source), self._parts_of([source])
        if base is None or (features is None and _SEVERAL in parts):
            return False
        found = copied(base, target, source, self._features_of)
        if found is None:
            return False
        for tensor in (base, target):
            self._mark(tensor, found)
        if features is None:
            self.uses.met |= {(part, frozenset(name for name, _ in found.sources)) for part in parts}
        return True

    def _try_to_follow(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor], result: Any
    ) -> Followed | None:
        others = [tensor for tensor in tensors if self._features_of(tensor) is None]
        if self.sources_of(others) or _SEVERAL in self._parts_of(others):
            return None
        followed = follow(func, args, kwargs, result, self._features_of)
        if func._schema.is_mutable:  # other views of the memory have the features that they had
            followed = [each for each in followed or () if self._features_of(each[0]) == each[1]] or None
        return followed

    def _only_of_parameters(self, tensors: Iterable[Tensor]) -> set[str]:
        """The parameters whose features alone are in one of the tensors."""
        of_each = (self.sources_of([tensor]) for tensor in tensors)
        return set[str]().union(*(sources for sources in of_each if sources <= self._parameters))

    def _follow_parts(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor], results: list[Tensor]
    ) -> None:
        """Trace parts into the results, or record that they are used: [Note: parts]."""
        parts = self._parts_of(tensors)
        if not parts:
            return
        first, *others = parts
        is_known = _SEVERAL not in parts and len({part.of for part in parts}) <= _MAX_PARTS
        if func._schema.is_mutable or not is_known:
            self.uses.kept |= parts
            self._depend(results, {_SEVERAL})
            if func._schema.is_mutable:
                self._mutated |= {storage_key(tensor) for tensor in results}
                self._blank = {key: base for key, base in self._blank.items() if key not in self._mutated}
        elif not others and first.is_slice and func.overloadpacket in _SLICES:
            for tensor, part in zip(results, _slices(first, func, args, kwargs, results), strict=True):
                self._depend([tensor], {part})
        else:
            self._depend(results, {replace(part, is_slice=False) for part in parts})

    def _depend(self, results: Iterable[Tensor], parts: Set[TensorPart]) -> None:
        for tensor in results:
            self._parts[id(tensor)] = parts
            self._learned.setdefault(storage_key(tensor), parts)


def _can_shard(builder: TPPlanBuilder, name: str) -> bool:
    """Return whether there is a style for shards of a parameter's first dim."""
    shape, owner = builder.shapes[name], builder.modules[name.rpartition(".")[0]]
    return 0 < len(shape) <= (3 if isinstance(owner, nn.Conv1d) else 2) and shape[0] >= builder.cols


def _slices(
    part: TensorPart, func: Any, args: Any, kwargs: Mapping[str, Any], results: list[Tensor]
) -> list[TensorPart]:
    """The parts that slices of a part have."""
    schema = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(schema, args, strict=False)), **kwargs}
    ndim = results[0].ndim
    if given.get("dim", 0) % ndim != ndim - 1:
        return [part] * len(results)
    if given.get("step", 1) != 1:
        return [replace(part, is_slice=False)] * len(results)
    start = given.get("start") or 0
    place = part.start + (start if start >= 0 else max(start + part.stop - part.start, 0))
    found = []
    for tensor in results:
        found.append(TensorPart(part.of, place, place + tensor.shape[-1], is_slice=True))
        place += tensor.shape[-1]
    return found
