"""What every column of a grid holds, of each tensor of a run on meta under a tensor plan.

[Note: states of tensors]
A tensor of the run is the same on all columns, or holds this column's features, or (under sequence
parallelism, between regions) this column's tokens. What the styled layers do to these states is known: a COLUMN
layer reads a full input and sums its gradient over the columns, a ROW layer sums its output, and scatters its
tokens. Everything else is followed, operator by operator, whatever the source of the plan is:

- A parameter, or a layer without a style, that meets this column's features or tokens is used differently on
  each column: its gradient is a sum over columns. A layer's is summed at its output, so that everything before
  it is complete. If it is also used where gradients are complete, there is no right sum: an error.
- A parameter with a number for each of the features that it meets is sharded like them.
- A linear layer without a style that reads this column's features is a ROW layer. One whose output has as
  many features as those that it meets is a COLUMN layer, sharded like the layer that these come from. One that
  has read all tokens of a region, and meets this column's, is a ROW layer that splits its input. So an
  adapter is sharded like the layer that it adapts.
- The stream itself must not meet features: its gradient would have to be summed. Only in a pure region it may,
  as the region's input gradient is a sum there.

The features' dims are followed by the rules of features.py. Where these end (a recurrence, a kernel), it is
still known that the tensor is a column's own; only a parameter that is not a scalar, or a layer without a
style, is then an error.

[Note: equal blocks]
Blocks of the same modules, shapes, attributes and shardings are followed once: the others return the first
one's output.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.activation_memory import DeviceKernelsOnMeta
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.features import Features, follow
from plait.models.sharding.styles import layer_pattern
from plait.models.sharding.uses import WithoutDropout
from plait.models.stages.dataflow import OperatorsOnMixed, borrowed_on_meta, traced_batches
from plait.models.task import forward_inputs
from plait.models.tensors import tensors_in
from plait.models.transformers_types import linear_forwards
from plait.plan.sharding import DimSharding, Range, Style

_ATEN = torch.ops.aten
_STREAM = ""  # the part of a tensor that depends on the residual stream
_OPAQUE = (Style.COLUMN, Style.ROW, Style.VOCABULARY, Style.EXPERTS, Style.DEPTHWISE, Style.NORM)
# Results that depend on shapes alone.
_SHAPED = {
    getattr(_ATEN, name)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like")
} | {_ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like}


@dataclass(frozen=True)
class State:
    """What a column holds of a tensor: [Note: states of tensors].

    own       of this column: computed from this column's features
    features  where these are; None: unknown
    tokens    "all" tokens of a region's input, this column's "own"; "": of no region
    parts     parameters, layers without a style, and the stream, whose gradients it has a part of
    """

    own: bool = False
    features: Features | None = None
    tokens: str = ""
    parts: frozenset[str] = frozenset()


@dataclass
class Columns:
    """What a run shows. `summed`: parameters and layers whose gradients are sums over columns; `complete`:
    whose gradients are complete; `placed`: styles of layers and parameters that had none, the layer that they
    are sharded like, and the features that they have to have; `streams`: regions whose input meets features.
    """

    summed: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    placed: dict[str, tuple[Style, Features | None]] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    equal: dict[str, str] = field(default_factory=dict)  # blocks that were not run, and the equal one


def follow_columns(
    builder: TPPlanBuilder, regions: Sequence[str], batch: Mapping[str, Tensor] | None, *, sequence: bool
) -> Columns | None:
    """Run the model on meta under the builder's plan; None if it does not run there. `regions`: see `TPPlan`.

    Raises ModelError for a parameter or a layer that the plan does not fit.
    """
    representatives = _representatives(builder)
    for traced in traced_batches(builder.model, batch):
        for equal in (representatives, {}) if representatives else ({},):
            found = Columns(equal=equal)
            try:
                _run(builder, regions, sequence, traced, found)
                return found
            except MisfitError:
                raise
            except Exception:  # any error of the model's code without values
                continue
    return None


def _run(
    builder: TPPlanBuilder,
    regions: Sequence[str],
    sequence: bool,
    batch: Mapping[str, Tensor],
    found: Columns,
) -> None:
    names = {name: builder.own_parameters(name) for name in builder.modules}
    with borrowed_on_meta(builder.model), torch.random.fork_rng(devices=[]), torch.no_grad():
        tracer = _Tracer(builder, regions, sequence, found, names)
        config: Any = torch.fx.experimental._config
        assumed: AbstractContextManager[Any] = config.patch(meta_nonzero_assume_all_nonzero=True)
        with assumed, DeviceKernelsOnMeta(torch.device("cpu")), WithoutDropout(), tracer:
            result = builder.model.train()(**forward_inputs(builder.model, batch))
            tracer.complete(tensors_in(result))


def _representatives(builder: TPPlanBuilder) -> dict[str, str]:
    """Map blocks to the first equal one: [Note: equal blocks]."""
    firsts: dict[Any, str] = {}
    equal = {}
    for block in builder.blocks:
        first = firsts.setdefault(_signature(builder, block), block)
        if first != block:
            equal[block] = first
    return equal


def _signature(builder: TPPlanBuilder, block: str) -> Any:
    entries = []
    number = block.rpartition(".")[2]
    for path, module in builder.modules[block].named_modules(prefix=block):
        layer = builder.layers.get(path)
        values = [
            (key, value)
            for key, value in vars(module).items()
            if type(value) in (bool, str, float) or (type(value) is int and str(value) != number)
        ]
        functions = [getattr(value, "__func__", value) for key, value in vars(module).items() if key == "forward"]
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        own = [
            (key, builder.shapes[name], replace(builder.parameters[name], name="") if name in builder.parameters else None)
            for key, name in builder.own_parameters(path).items()
        ]
        entries.append(
            (
                path[len(block) :],
                type(module),
                None if layer is None else replace(layer, module=""),
                tuple(values),
                tuple(map(id, [*functions, *hooks])),
                tuple(own),
            )
        )
    return tuple(entries)


class _Tracer(OperatorsOnMixed):
    """Follow the states of tensors through operators."""

    def __init__(
        self,
        builder: TPPlanBuilder,
        regions: Sequence[str],
        sequence: bool,
        found: Columns,
        names: Mapping[str, Mapping[str, str]],
    ) -> None:
        super().__init__()
        self._builder, self._found, self._sequence = builder, found, sequence
        self._names = names  # of each module's parameters
        self._states: dict[int, State] = {}  # by tensor
        self._written: dict[int, State] = {}  # by storage, of tensors older than the last write
        self._fresh: dict[int, set[int]] = {}  # tensors that are not, by storage
        self._alive: list[Any] = []  # so that no address is reused
        self._opaque = 0  # depth of styled layers that run
        self._region = ""  # of the last layer that ran, or that layer
        self._outputs: dict[str, Any] = {}  # of blocks
        self._open: dict[str, bool] = {}
        for name, module in builder.modules.items():
            self._add_parameters(name, module)
        if sequence:
            self._add_regions(regions)
        for name, module in builder.modules.items():
            self._add_layer(name, module)
        self._add_blocks()

    # --- what is known

    def _add_parameters(self, name: str, module: nn.Module) -> None:
        for key, full_name in self._names[name].items():
            parameter, sharding = module._parameters[key], self._builder.parameters.get(full_name)
            assert parameter is not None
            dims = [] if sharding is None else [dim is not None and dim.axis == "col" for dim in sharding.dims]
            if any(dims):
                dim = dims.index(True)
                source = frozenset({(full_name, 1)})
                self._set([parameter], State(True, Features(source, dim, parameter.shape[dim])))
            elif sharding is None or not sharding.partial:
                self._set([parameter], State(parts=frozenset({full_name})))

    def _add_layer(self, name: str, module: nn.Module) -> None:
        layer = self._builder.layers.get(name)
        is_linear = getattr(module.forward, "__func__", None) in linear_forwards()
        is_over_row = layer is not None and layer.style is Style.NORM and layer.out is not None
        is_over_row = is_over_row and layer.out.axis == "row"
        if layer is not None and layer.style in _OPAQUE and not is_over_row:
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name), with_kwargs=True, prepend=True)
        elif layer is not None and layer.style is Style.MLA_LATENT:
            module.register_forward_hook(partial(self._cut, name, ""), prepend=True)
        elif layer is None and is_linear:
            module.register_forward_pre_hook(partial(self._enter_free, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave_free, name), with_kwargs=True, prepend=True)

    def _add_blocks(self) -> None:
        for index, name in enumerate(self._builder.blocks):
            block: Any = self._builder.modules[name]
            if self._sequence and index == 0:
                block.register_forward_pre_hook(partial(self._with_tokens, "own"), with_kwargs=True)
            block.register_forward_hook(partial(self._end_block, name), prepend=True)
            if self._sequence and index == len(self._builder.blocks) - 1:
                block.register_forward_hook(partial(self._gather_output, ""))
            if (first := self._found.equal.get(name)) is not None:
                block.forward = partial(self._repeat, first)

    def _repeat(self, first: str, *_: Any, **__: Any) -> Any:
        return self._outputs[first]

    def _end_block(self, name: str, *call: Any) -> None:
        self._outputs[name] = call[-1]
        for tensor in tensors_in(call[-1]):
            state = self._state(tensor)
            if state.parts:
                self.complete([tensor])
                self._set([tensor], replace(state, parts=frozenset({_STREAM})))

    def _add_regions(self, regions: Sequence[str]) -> None:
        """Gather the inputs of regions, as sequence_forward.py does."""
        layers = self._builder.layers
        linear = [n for n, layer in layers.items() if layer.style in (Style.COLUMN, Style.ROW)]
        lone = [n for n in linear if self._builder.block_of(n) is not None and not self._region_of(n, regions)]
        for name in (*regions, *lone):
            inside = [layers[path] for path in self._builder.inside(name) if path in layers]
            styles = {layer.style for layer in inside}
            own = layers.get(name)
            is_lone = own is not None and own.style in (Style.COLUMN, Style.ROW)
            is_closed = Style.ROW not in styles or Style.EXPERTS in styles
            if is_lone and own is not None:
                is_closed = own.style is Style.COLUMN and own.gathers
            self._open[name] = not is_closed
            module = self._builder.modules[name]
            if not is_lone or own is None or own.style is Style.COLUMN:
                module.register_forward_pre_hook(partial(self._with_tokens, "all"), with_kwargs=True)
            if is_closed:
                module.register_forward_hook(partial(self._gather_output, "own"))

    @staticmethod
    def _region_of(name: str, regions: Iterable[str]) -> str | None:
        return next((region for region in regions if name == region or name.startswith(f"{region}.")), None)

    def _with_tokens(self, tokens: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a module hidden states with these tokens: the first positional argument, or `hidden_states`."""
        if args and isinstance(args[0], Tensor):
            return (self._copy(args[0], tokens), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": self._copy(kwargs["hidden_states"], tokens)}
        return args, kwargs

    def _gather_output(self, tokens: str, *call: Any) -> Any:
        """Return a module's output, with these tokens of hidden states: the output, or its first entry."""
        output = call[-1]
        if isinstance(output, Tensor):
            return self._copy(output, tokens)
        if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
            return type(output)([self._copy(output[0], tokens), *output[1:]])
        return output

    def _copy(self, tensor: Tensor, tokens: str) -> Tensor:
        self.complete([tensor])
        copy, state = torch.empty_like(tensor), self._state(tensor)
        self._set([copy], State(state.own, state.features, tokens, frozenset({_STREAM})))
        return copy

    # --- layers

    def _begin(self, name: str) -> bool:
        """Begin a layer. Returns False inside of another one."""
        self._opaque += 1
        if self._opaque == 1:
            self._region = self._builder.region_of(name) or name
        return self._opaque == 1

    def _enter(self, name: str, _: nn.Module, *given: Any) -> None:
        if not self._begin(name):
            return
        layer, tensors = self._builder.layers[name], list(tensors_in(given))
        states = [self._state(tensor) for tensor in tensors if tensor.is_floating_point()]
        if layer.style is Style.COLUMN and any(state.own or state.tokens == "own" for state in states):
            self._refuse(name, "colwise, reads what only this column has")
        is_row = layer.style is Style.ROW and not layer.splits
        if is_row and self._builder.cols > 1 and not all(state.own for state in states):
            self._refuse(name, "rowwise, reads features that are the same on all columns")
        self.complete(tensors)

    def _leave(self, name: str, module: nn.Module, given: Any, kwargs: Any, output: Any) -> None:
        self._opaque -= 1
        if self._opaque:
            return
        layer, outputs = self._builder.layers[name], list(tensors_in(output))
        inputs = [self._state(tensor) for tensor in tensors_in((given, kwargs))]
        tokens = next((state.tokens for state in inputs if state.tokens), "")
        match layer.style:
            case Style.COLUMN if not layer.gathers:
                features = None if layer.uses is not None else self._features(name, outputs[0])
                self._set(outputs, State(True, features, tokens))
            case Style.ROW:
                self._end_row(name, outputs, tokens, is_inner=bool(layer.summed))
            case Style.DEPTHWISE | Style.NORM:
                features = next((state.features for state in inputs if state.features), None)
                fits = features is not None and layer.uses is None
                self._set(outputs, State(True, features if fits else None, tokens))
            case _:
                self._set(outputs, State(tokens=tokens, parts=frozenset({_STREAM})))

    @staticmethod
    def _features(name: str, output: Tensor) -> Features:
        return Features(frozenset({(name, 1)}), output.ndim - 1, output.shape[-1])

    def _end_row(self, name: str, outputs: list[Tensor], tokens: str, *, is_inner: bool) -> None:
        """The output of a ROW layer, with its bias."""
        region = self._region_of(name, self._open)
        if region is not None and self._open[region] and not is_inner:
            tokens = "own"
        bias = self._names[name].get("bias")
        if bias is not None:
            (self._found.summed if tokens == "own" else self._found.complete).add(bias)
        parts = frozenset[str]() if is_inner else frozenset({_STREAM})
        self._set(outputs, State(tokens=tokens, parts=parts))

    def _cut(self, name: str, _: Any, *call: Any) -> None:
        """End a layer that sums its output's gradient itself."""
        tensors = list(tensors_in(call[-1]))
        self.complete(tensors)
        for tensor in tensors:
            self._set([tensor], replace(self._state(tensor), parts=frozenset()))

    def _enter_free(self, name: str, _: nn.Module, *given: Any) -> None:
        if not self._begin(name):
            return
        for tensor in tensors_in(given):
            state = self._state(tensor)
            if state.own:
                features = state.features
                if features is None or (features.dim, features.outer) != (tensor.ndim - 1, 1):
                    self._refuse(name, "a layer without a style, reads features that only this column has")
                self._place(name, Style.ROW, features)
            elif name in self._found.placed and self._found.placed[name][0] is Style.ROW:
                self._refuse(name, "reads features of this column in one call, and those of all in another")
        self.complete(tensors_in(given))

    def _leave_free(self, name: str, module: nn.Module, given: Any, kwargs: Any, output: Tensor) -> None:
        self._opaque -= 1
        if self._opaque:
            return
        tokens = next((s.tokens for t in tensors_in((given, kwargs)) if (s := self._state(t)).tokens), "")
        if name in self._found.placed and self._found.placed[name][0] is Style.ROW:
            self._end_row(name, [output], tokens, is_inner=False)
        elif tokens == "own":
            self._found.summed.update(self._names[name].values())
            self._set([output], State(tokens=tokens, parts=frozenset({_STREAM})))
        else:
            self._set([output], State(tokens=tokens, parts=frozenset({name})))

    def _place(self, name: str, style: Style, features: Features | None) -> None:
        spec = self._builder.specs.get(name)
        if spec is not None and spec.style is Style.REPLICATE:
            self._refuse(name, "replicate, but it reads or meets features that only this column has")
        if self._found.placed.setdefault(name, (style, features))[0] is not style:
            self._refuse(name, "a layer without a style, is used in two ways")

    # --- operators

    def complete(self, tensors: Iterable[Tensor]) -> None:
        """Record that gradients of these are complete."""
        for tensor in tensors:
            self._found.complete |= self._state(tensor).parts

    def _state(self, tensor: Tensor) -> State:
        key = _key(tensor)
        if key in self._written and id(tensor) not in self._fresh[key]:
            return self._written[key]
        return self._states.get(id(tensor), State())

    def _set(self, tensors: Iterable[Tensor], state: State) -> None:
        for tensor in tensors:
            self._alive += [tensor, tensor.untyped_storage()]
            self._states[id(tensor)] = state
            if (key := _key(tensor)) in self._written:
                self._fresh[key].add(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._opaque or func.overloadpacket in _SHAPED:
            return result
        tensors = list(tensors_in((args, kwargs)))
        states = [self._state(tensor) for tensor in tensors]
        if any(state is not _PLAIN and state != _PLAIN for state in states):
            self._follow(func, args, kwargs, tensors, states, list(tensors_in(result)), result)
        return result

    def _follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        states: list[State],
        results: list[Tensor],
        result: Any,
    ) -> None:
        is_own = any(state.own for state in states)
        tokens = {state.tokens for state in states if state.tokens}
        if len(tokens) > 1:
            tokens = self._reconcile(tensors, states)
        placed: dict[int, Features] = {}
        if is_own:
            placed = self._meet(func, args, kwargs, tensors, states, results, result)
            parts = frozenset[str]()
        elif "own" in tokens:
            for state in states:
                if not state.tokens:
                    self._found.summed |= state.parts - {_STREAM}
            parts = frozenset({_STREAM})
        else:
            parts = frozenset[str]().union(*(state.parts for state in states))
        if func.overloadpacket is _ATEN.detach:
            parts = frozenset()
        for tensor in results:
            has_gradient = tensor.is_floating_point() or tensor.is_complex()
            state = State(is_own, placed.get(id(tensor)), next(iter(tokens), ""), parts if has_gradient else frozenset())
            if func._schema.is_mutable:
                key = _key(tensor)
                before = self._written.get(key, _PLAIN)
                self._written[key] = State(
                    is_own or before.own, None, state.tokens or before.tokens, state.parts | before.parts
                )
                self._fresh[key] = set()
            self._set([tensor], state)

    def _reconcile(self, tensors: list[Tensor], states: list[State]) -> set[str]:
        """Make layers whose output has all tokens scatter them, where it meets this column's."""
        for state in states:
            if state.tokens != "all":
                continue
            layers = {part for part in state.parts if part in self._builder.modules}
            if state.own or _STREAM in state.parts or not layers:
                self._refuse(self._region, "all tokens of a region's input meet the tokens of one column")
            for name in layers:
                self._place(name, Style.ROW, None)
                if (bias := self._names[name].get("bias")) is not None:
                    self._found.summed.add(bias)
            self._found.summed |= state.parts - layers
        return {"own"}

    def _meet(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        states: list[State],
        results: list[Tensor],
        result: Any,
    ) -> dict[int, Features]:
        """Record what this column's features meet. Returns the features of the results, as far as known."""
        with_features: dict[int, Features | None] = {
            id(tensor): state.features for tensor, state in zip(tensors, states, strict=True) if state.own
        }
        known = all(features is not None for features in with_features.values())

        def features_of(tensor: Tensor) -> Features | None:
            return with_features.get(id(tensor))

        others = [(t, s) for t, s in zip(tensors, states, strict=True) if not s.own and s.parts]
        followed = follow(func, args, kwargs, result, features_of) if known else None
        if followed is None and others and known and torch.Tag.pointwise in func.tags:
            for tensor, state in others:
                own = next(f for f in with_features.values() if f is not None)
                owner = next(t for t, s in zip(tensors, states, strict=True) if s.own)
                features = self._shard(tensor, state, owner, own, result)
                if features is not None:
                    with_features[id(tensor)] = features
            followed = follow(func, args, kwargs, result, features_of)
            others = [(t, s) for t, s in others if id(t) not in with_features]
        for tensor, state in others:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if _STREAM in state.parts:
                self._found.streams.add(self._region)
            parts = state.parts - {_STREAM}
            if followed is None and tensor.numel() > 1 and parts:
                self._refuse(min(parts), f"meets features that only this column has, in {func}")
            self._found.summed |= parts
        return {id(tensor): features for tensor, features in followed or ()}

    def _shard(
        self, tensor: Tensor, state: State, owner: Tensor, own: Features, result: Tensor
    ) -> Features | None:
        """Shard what has as many numbers as the features that it meets; None if it has not."""
        from_last = own.dim - owner.ndim
        if tensor.ndim < -from_last or tensor.shape[from_last] != owner.shape[own.dim] or own.outer != 1:
            return None
        wide = [part for part in state.parts if self._has_features(part, tensor.shape[from_last])]
        if _STREAM in state.parts or len(wide) != 1:
            self._refuse(
                next(iter(sorted(state.parts - {_STREAM})), self._region), "meets features that only this column has"
            )
        [name] = wide
        self._place(name, Style.COLUMN, own)
        self._found.summed |= state.parts - {name}
        sources = own.sources | {(name, count) for _, count in own.sources}
        return replace(own, sources=sources, dim=tensor.ndim + from_last)

    def _has_features(self, part: str, size: int) -> bool:
        """Return whether a layer's output, or a parameter's first dim, has this size."""
        if part in self._builder.modules:
            features = linear_features(self._builder.modules[part])
            return features is not None and features[0] == size
        return part in self._builder.shapes and self._builder.shapes[part][:1] == (size,)

    def _refuse(self, name: str, given: str) -> None:
        raise misfit(self._builder, name, given, sequence=self._sequence)


_PLAIN = State()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class MisfitError(ModelError):
    """A part of the model does not fit the tensor plan around it."""


def misfit(builder: TPPlanBuilder, name: str, given: str, *, sequence: bool) -> MisfitError:
    """The error for a part of the model that the tensor plan around it does not fit."""
    region = builder.region_of(name)
    inside = [layer for layer in builder.layers if region and layer.startswith(f"{region}.")] or [name]
    patterns = dict.fromkeys(layer_pattern(layer.rpartition(".")[0]) + ".*" for layer in inside)
    replicated = ", ".join(f"'{pattern}': 'replicate'" for pattern in patterns)
    kind = type(builder.modules[name]).__name__ if name in builder.modules else "a parameter"
    return MisfitError(
        f"the tensor plan does not fit {name}, and its gradient would be wrong",
        given=f"{kind}: {given}; tp={builder.rows}x{builder.cols}{' sp=true' if sequence else ''}",
        expected="code between the sharded layers in which each feature is computed from itself, and the layers' "
        "inputs and outputs as the plan has them",
        hint=f"tensor_plan={{{replicated}}}, {'tp without sp, ' if sequence else ''}or tp=1",
    )
