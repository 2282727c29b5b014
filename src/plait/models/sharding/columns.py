"""States of tensors on the columns of a grid, in a run on meta under a tensor plan.

[Note: states of tensors]
A tensor of the run is the same on all columns, or holds this column's features, or (under sequence
parallelism, between regions) this column's tokens. What styled layers do to these states is known: a COLUMN
layer reads all features and sums its input's gradient over the columns, a ROW layer sums its output, and
scatters its tokens. Everything else is followed through the operators, whatever the source of the plan is:

- A parameter, or a layer without a style, that meets this column's features or tokens is used differently on
  each column: its gradient is a sum over columns. A layer's is summed at its output, so that everything
  before it is complete. If it is also used where gradients are complete, no sum is right: an error.
- A parameter with a number for each of the features that it meets is sharded like them.
- A linear layer without a style that reads this column's features is a ROW layer. One whose output has as
  many features as it meets is a COLUMN layer, sharded like these. One that has read all tokens of a region,
  and meets this column's, is a ROW layer that splits its input. So an adapter is sharded like the layer that
  it adapts.
- In a pure region (see `TPPlan`) COLUMN layers do not sum their input's gradient: a parameter before it, of
  which the region gets another input, has a partial gradient.
- The stream itself must not meet features, except in a pure region, whose input's gradient is summed.

Where the rules of features.py end (a recurrence, a kernel), the features' dim is unknown, but a tensor is
still known to be this column's. Only a layer without a style, or a parameter that is no scalar, is an error
there.

[Note: equal blocks]
Of blocks with the same modules, shapes, attributes and shardings, that get inputs of the same states, one is
followed: the others return its output. The first block and the last are followed, as their code may tell that
they are.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from plait.errors import ModelError
from plait.models.adapters import all_active
from plait.models.parameter_adapters import is_wrapper
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.features import BLANK, Features, copied, follow
from plait.models.sharding.styles import layer_pattern
from plait.models.sharding.weight_norms import GatheredNormsOnMeta, NormsOnMeta, magnified
from plait.models.task import forward_inputs
from plait.models.tensors import storage_key, tensors_in
from plait.models.trace.modes import Operators, on_mixed, without_dropout
from plait.models.trace.prepare import prepared, traced_batches
from plait.models.transformers_types import has_linear_forward
from plait.plan.axes import FEATURES
from plait.plan.sharding import Style, token_regions

_ATEN = torch.ops.aten
_STREAM = frozenset({""})  # the part of a tensor that depends on the residual stream
_NONE = frozenset[str]()
_OPAQUE = (Style.COLUMN, Style.ROW, Style.VOCABULARY, Style.EXPERTS, Style.DEPTHWISE, Style.NORM)
_SHAPED = {  # results that depend on shapes alone
    *(*BLANK, _ATEN.new_ones, _ATEN.new_full, _ATEN.empty_like, _ATEN.zeros_like),
    *(_ATEN.ones_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like),
}


@dataclass(frozen=True)
class State:
    """State of a tensor on a column: [Note: states of tensors].

    is_own    computed from features that only this column has
    features  where these are; None: unknown
    tokens    "all" of a region's input, or this column's "own"
    place     where the own ones are; None: unknown
    parts     parameters, layers without a style, and the stream, whose gradients it is a part of
    detached  the same, without a gradient
    """

    is_own: bool = False
    features: Features | None = None
    tokens: str = ""
    place: Features | None = None
    parts: frozenset[str] = _NONE
    detached: frozenset[str] = _NONE


_PLAIN = State()


@dataclass
class Columns:
    """Results of a run, of parameters and layers by name.

    summed    their gradients are sums over columns
    complete  their gradients are complete
    placed    they have got a style, and the features that they output or, ROW, sum over; None: split
    streams   regions whose input meets features
    equal     blocks that did not run, each with the equal one that did
    mixed     regions, each with an operator that may mix this column's features
    crossed   regions, each with an operator that may mix this column's tokens
    """

    summed: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    placed: dict[str, tuple[Style, Features | None]] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    equal: list[tuple[str, str]] = field(default_factory=list)
    mixed: dict[str, str] = field(default_factory=dict)
    crossed: dict[str, str] = field(default_factory=dict)


class MisfitError(ModelError):
    """A part of the model does not fit the tensor plan around it."""


def misfit(builder: TPPlanBuilder, name: str, given: str, *, sequence: bool, hint: str = "") -> MisfitError:
    """The error for a module or parameter. `hint`: what to try besides replicated layers."""
    region = builder.region_of(name)
    inside = [layer for layer in builder.layers if region and layer.startswith(f"{region}.")] or [name]
    patterns = dict.fromkeys(
        f"'{layer_pattern(layer.rpartition('.')[0])}.*': 'replicate'" for layer in inside
    )
    kind = type(builder.modules[name]).__name__ if name in builder.modules else "a parameter"
    return MisfitError(
        f"the tensor plan does not fit {name}, whose gradient would be wrong",
        given=f"{kind}: {given}; tp={builder.rows}x{builder.cols}{' sp=true' if sequence else ''}",
        expected="between sharded layers, code that computes each feature from itself and each token alone",
        hint=f"{hint}tensor_plan={{{', '.join(patterns)}}}, {'tp without sp, ' if sequence else ''}or tp=1",
    )


def follow_columns(
    builder: TPPlanBuilder,
    regions: Sequence[str],
    pure: Set[str],
    batch: Mapping[str, Tensor] | None,
    *,
    sequence: bool,
) -> Columns | None:
    """Run the model on meta under the builder's plan; None if it does not run there. `regions`, `pure`: see
    `TPPlan`.

    Raises MisfitError for a parameter or a layer that the plan does not fit.
    """
    own = {name: builder.own_parameters(name) for name in builder.modules}
    kinds = {block: _signature(builder, block) for block in builder.blocks}
    for traced in traced_batches(builder.model, batch):
        for kind_of in (kinds, {}):
            found = Columns()
            try:
                with prepared(builder.model), without_dropout(), all_active(builder.model):
                    tracer = _ColumnTracer(
                        builder, regions, pure if sequence else frozenset(), sequence, found, own, kind_of
                    )
                    inputs = forward_inputs(builder.model, traced)
                    with Operators(tracer.run):
                        tracer.complete(tensors_in(builder.model.train()(**inputs)))
                return found
            except MisfitError:
                raise
            except Exception:  # any error of the model's code without values
                continue
    return None


def _signature(builder: TPPlanBuilder, block: str) -> Any:
    """Return what equal blocks have in common: [Note: equal blocks]."""
    number, entries = block.rpartition(".")[2], list[Any]()
    entries += [block if block in (builder.blocks[0], builder.blocks[-1]) else ""]
    for path, module in builder.modules[block].named_modules(prefix=block):
        layer, values = builder.layers.get(path), vars(module)
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        functions = [getattr(value, "__func__", value) for value in (values.get("forward"), *hooks)]
        numbers = [(key, value) for key, value in values.items() if type(value) in (bool, str, float, int)]
        for key, name in builder.own_parameters(path).items():
            sharding = builder.parameters.get(name)
            entries += [key, builder.shapes[name], sharding and (sharding.dims, sharding.partial)]
        entries += [path[len(block) :], type(module), layer and replace(layer, module="")]
        entries += [tuple(entry for entry in numbers if str(entry[1]) != number), tuple(map(id, functions))]
    return tuple(entries)


@dataclass(frozen=True)
class _TracedCall:
    """A call of an operator. `given`: its tensors, and their states."""

    func: Any
    args: Any
    kwargs: Any
    result: Any
    given: list[tuple[Tensor, State]]


def _with_place(state: State, tensor: Tensor) -> State:
    """The state of hidden states, whose tokens are in the second dim."""
    if state.tokens != "own" or tensor.ndim < 2:
        return state
    return replace(state, place=Features(frozenset({("tokens", 1)}), 1, tensor.shape[1]))


class _ColumnTracer:
    """Follow the states of tensors through operators. `own`: names of each module's parameters; `kinds`: of
    blocks, the same if they are equal."""

    def __init__(
        self,
        builder: TPPlanBuilder,
        regions: Sequence[str],
        pure: Set[str],
        sequence: bool,
        found: Columns,
        own: Mapping[str, Mapping[str, str]],
        kinds: Mapping[str, Any],
    ) -> None:
        self._builder, self._found, self._sequence, self._own = builder, found, sequence, own
        self._pure, self._kinds = pure, kinds
        self._states: dict[int, State] = {}  # by tensor
        self._written: dict[int, State] = {}  # by storage, of tensors that are older than the last write
        self._fresh: dict[int, set[int]] = {}  # tensors that are not, by storage
        self._blank: dict[int, Tensor] = {}  # memory without values, by storage
        self._alive: list[Any] = []  # tensors and storages, so that no address is reused
        self._depth = 0  # of layers that run
        self._region = ""  # of the last layer that ran
        self._followed: dict[Any, tuple[str, Any]] = {}  # a block and its output, by its kind and inputs
        layers = [*builder.layers.values()]
        self._regions = token_regions(layers, regions, builder.blocks) if sequence else {}
        for name, module in builder.modules.items():
            self._add_parameters(name, module)
            if name in self._regions and self._regions[name].gathers:
                module.register_forward_pre_hook(partial(self._enter_tokens, "all"), with_kwargs=True)
            self._add_layer(name, module)
            if name in self._regions and self._regions[name].is_closed:
                module.register_forward_hook(partial(self._leave_tokens, "own"))
        for index, name in enumerate(builder.blocks):
            self._add_block(name, is_first=index == 0, is_last=index == len(builder.blocks) - 1)

    # --- modules

    def _add_parameters(self, name: str, module: nn.Module) -> None:
        for key, full_name in self._own[name].items():
            parameter, sharding = module._parameters[key], self._builder.parameters.get(full_name)
            assert parameter is not None, "a parameter with a name"
            dims = [dim is not None and dim.axis == FEATURES for dim in sharding.dims] if sharding else []
            if any(dims):
                features = Features(
                    frozenset({(full_name, 1)}), dims.index(True), parameter.shape[dims.index(True)]
                )
                self._set(parameter, State(True, features))
            elif sharding is None or not sharding.partial:
                self._set(parameter, State(parts=frozenset({full_name})))

    def _add_layer(self, name: str, module: nn.Module) -> None:
        layer = self._builder.layers.get(name)
        if is_wrapper(module) and any(of.startswith(f"{name}.lora_") for of in self._builder.parameters):
            module.forward = module.get_submodule(
                "base_layer"
            ).__call__  # its factors are sharded like its parameter
        enter, leave = (self._enter, self._leave) if layer else (self._enter_free, self._leave_free)
        if layer is not None and layer.style is Style.WEIGHT_NORM:
            norms = GatheredNormsOnMeta() if layer.gathers else NormsOnMeta()
            module.forward = partial(magnified, module, norms)
        elif layer is not None and layer.style is Style.MLA_LATENT:
            module.register_forward_hook(self._end_summed, prepend=True)
        elif layer.style in _OPAQUE if layer else has_linear_forward(module):
            module.register_forward_pre_hook(partial(self._begin, name, enter), with_kwargs=True)
            module.register_forward_hook(partial(self._end, name, leave), with_kwargs=True, prepend=True)

    def _add_block(self, name: str, *, is_first: bool, is_last: bool) -> None:
        block: Any = self._builder.modules[name]
        if self._sequence:
            block.register_forward_pre_hook(self._copy_inputs, with_kwargs=True)
        if self._sequence and is_first:
            block.register_forward_pre_hook(partial(self._enter_tokens, "own"), with_kwargs=True)
        block.register_forward_hook(self._end_block, prepend=True)
        if self._sequence and is_last:
            block.register_forward_hook(partial(self._leave_tokens, ""))
        block.forward = partial(self._run_block, name, block.forward)

    def _run_block(self, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a block, or return the output of an equal one: [Note: equal blocks]."""

        def described(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.shape, self._state(leaf)
            return leaf if leaf is None or type(leaf) in (bool, str, int, float) else type(leaf)

        leaves, structure = tree_flatten((args, kwargs))
        key = (self._kinds.get(name, name), str(structure), *map(described, leaves))
        if key not in self._followed:
            self._followed[key] = name, forward(*args, **kwargs)
        first, output = self._followed[key]
        self._found.equal += [(name, first)] if first != name else []
        return output

    def _copy_inputs(self, _: nn.Module, *given: Any) -> None:
        """Begin a block: gradients of tensors from outside of the blocks are summed (sequence_forward.py)."""
        for tensor in tensors_in(given):
            if (state := self._state(tensor)).parts and not state.tokens:
                self.complete([tensor])
                self._set(tensor, replace(state, parts=_STREAM))

    def _end_block(self, *call: Any) -> None:
        for tensor in tensors_in(call[-1]):
            if (state := self._state(tensor)).parts:
                self.complete([tensor])
                self._set(tensor, replace(state, parts=_STREAM))

    def _enter_tokens(self, tokens: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a module hidden states of these tokens, as sequence_forward.py does."""
        if args and isinstance(args[0], Tensor):
            return (self._copy(args[0], tokens), *args[1:]), kwargs
        hidden = kwargs.get("hidden_states")
        return args, kwargs | ({"hidden_states": self._copy(hidden, tokens)} if hidden is not None else {})

    def _leave_tokens(self, tokens: str, *call: Any) -> Any:
        output = call[-1]
        if isinstance(output, Tensor):
            return self._copy(output, tokens)
        is_list = type(output) in (tuple, list) and output and isinstance(output[0], Tensor)
        return type(output)([self._copy(output[0], tokens), *output[1:]]) if is_list else output

    def _copy(self, tensor: Tensor, tokens: str) -> Tensor:
        self.complete([tensor])
        copy = torch.empty_like(tensor)
        state = replace(self._state(tensor), tokens=tokens, place=None, parts=_STREAM)
        self._set(copy, _with_place(state, copy))
        return copy

    # --- layers

    def _begin(self, name: str, enter: Any, _: nn.Module, *given: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._region = self._builder.region_of(name) or name
            tensors = [tensor for tensor in tensors_in(given) if tensor.is_floating_point()]
            states = [(tensor, self._state(tensor)) for tensor in tensors]
            enter(name, states)
            if self._region in self._pure and self._builder.style_of(name) is Style.COLUMN:
                self._found.summed |= _NONE.union(*(state.parts for _, state in states)) - _STREAM
            else:
                self.complete(tensors)

    def _end(self, name: str, leave: Any, _: nn.Module, *call: Any) -> None:
        self._depth -= 1
        if not self._depth:
            states = [self._state(tensor) for tensor in tensors_in(call[:-1])]
            tokens = next((state.tokens for state in states if state.tokens), "")
            for tensor in tensors_in(call[-1]):
                self._set(tensor, _with_place(leave(name, tensor, states, tokens), tensor))

    def _enter(self, name: str, given: list[tuple[Tensor, State]]) -> None:
        layer = self._builder.layers[name]
        if layer.style is Style.COLUMN and any(state.is_own or state.tokens == "own" for _, state in given):
            self._refuse(name, "colwise, reads features or tokens that only this column has")
        if layer.style is Style.ROW and not layer.splits and not all(state.is_own for _, state in given):
            self._refuse(name, "rowwise, reads features that are the same on all columns")

    def _leave(self, name: str, output: Tensor, states: list[State], tokens: str) -> State:
        layer = self._builder.layers[name]
        features = next((state.features for state in states if state.features), None)
        match layer.style:
            case Style.COLUMN if not layer.gathers:
                features = Features(frozenset({(name, 1)}), output.ndim - 1, output.shape[-1])
                return State(True, None if layer.uses else features, tokens)
            case Style.ROW:
                return self._sum(name, tokens, is_inner=bool(layer.summed))
            case Style.DEPTHWISE | Style.NORM:
                return State(True, None if layer.uses else features, tokens)
        return State(tokens=tokens, parts=_STREAM)

    def _sum(self, name: str, tokens: str, *, is_inner: bool = False) -> State:
        """The output of a ROW layer, to which its bias is added. `is_inner`: of which columns read parts."""
        region = next((key for key in self._regions if name == key or name.startswith(f"{key}.")), None)
        if region is not None and not self._regions[region].is_closed and not is_inner:
            tokens = "own"
        bias = {self._own[name]["bias"]} if "bias" in self._own[name] else set()
        self._found.summed |= bias if tokens == "own" else set()
        return State(tokens=tokens, parts=_NONE if is_inner else _STREAM)

    def _end_summed(self, *call: Any) -> None:
        """End a layer that sums its output's gradient itself."""
        for tensor in tensors_in(call[-1]):
            self.complete([tensor])
            self._set(tensor, replace(self._state(tensor), parts=_NONE))

    def _enter_free(self, name: str, given: list[tuple[Tensor, State]]) -> None:
        for tensor, state in given:
            features = state.features
            is_last = features is not None and (features.dim, features.outer) == (tensor.ndim - 1, 1)
            if state.is_own and not is_last:
                self._refuse(name, "without a style, reads features that only this column has")
            if state.is_own:
                self._place(name, Style.ROW, features)
            elif self._is_row(name):
                self._refuse(name, "reads this column's features in one call, and all in another")

    def _leave_free(self, name: str, _: Tensor, __: list[State], tokens: str) -> State:
        if self._is_row(name):
            return self._sum(name, tokens)
        if tokens == "own":
            self._found.summed.update(self._own[name].values())
        return State(tokens=tokens, parts=_STREAM if tokens == "own" else frozenset({name}))

    def _is_row(self, name: str) -> bool:
        return self._found.placed.get(name, (None, None))[0] is Style.ROW

    def _place(self, name: str, style: Style, features: Features | None) -> None:
        if self._builder.spec_of(name).style is Style.REPLICATE:
            self._refuse(name, "'replicate', uses features that only this column has")
        if self._found.placed.setdefault(name, (style, features))[0] is not style:
            self._refuse(name, "without a style, is used in two ways")

    # --- operators

    def complete(self, tensors: Iterable[Tensor]) -> None:
        """Record that the gradients of these are complete."""
        for tensor in tensors:
            self._found.complete |= self._state(tensor).parts

    def _state(self, tensor: Tensor) -> State:
        key = storage_key(tensor)
        if key in self._written and id(tensor) not in self._fresh[key]:
            return self._written[key]
        return self._states.get(id(tensor), _PLAIN)

    def _set(self, tensor: Tensor, state: State) -> None:
        self._alive += [tensor, tensor.untyped_storage()]
        self._states[id(tensor)] = state
        if (key := storage_key(tensor)) in self._written:
            self._fresh[key].add(id(tensor))

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on meta."""
        result = on_mixed(func, args, kwargs)
        if func.overloadpacket in _SHAPED:
            self._alive += [result, result.untyped_storage()]
            self._blank[storage_key(result)] = result
        elif not self._depth:
            given = [(tensor, self._state(tensor)) for tensor in tensors_in((args, kwargs))]
            if any(state != _PLAIN for _, state in given):
                self._follow(_TracedCall(func, args, kwargs, result, given))
        return result

    def _follow(self, call: _TracedCall) -> None:
        is_own = any(state.is_own for _, state in call.given)
        tokens = {state.tokens for _, state in call.given if state.tokens}
        if len(tokens) > 1:
            tokens = self._scatter(call)
        features: dict[int, Features] = self._meet(call) if is_own else {}
        places = self._follow_tokens(call) if "own" in tokens else {}
        parts, detached = (
            _NONE.union(*(getattr(s, key) for _, s in call.given)) for key in ("parts", "detached")
        )
        if is_own:
            parts = detached = _NONE
            is_followed = features or any(s.is_own and s.features is None for _, s in call.given)
            if not is_followed and any(t.is_floating_point() for t in tensors_in(call.result)):
                self._found.mixed.setdefault(self._region, str(call.func))
        elif "own" in tokens:
            self._found.summed |= (
                _NONE.union(*(state.parts for _, state in call.given if not state.tokens)) - _STREAM
            )
            parts = _STREAM
        if call.func.overloadpacket is _ATEN.detach:
            parts, detached = _NONE, parts | detached
        for tensor in tensors_in(call.result):
            is_float = tensor.is_floating_point() or tensor.is_complex()
            found = features.get(id(tensor)), "".join(tokens), places.get(id(tensor))
            state = State(is_own, *found, parts if is_float else _NONE, detached)
            if call.func._schema.is_mutable:
                key = storage_key(tensor)
                was = self._written.get(key, _PLAIN)
                own, parts_of_both = state.is_own or was.is_own, state.parts | was.parts
                self._written[key] = State(own, None, state.tokens or was.tokens, None, parts_of_both)
                self._fresh[key] = set()
            self._set(tensor, state)
            base = self._blank.get(storage_key(tensor))
            if base is not None and id(base) in features:
                self._set(base, replace(state, features=features[id(base)]))

    def _follow_tokens(self, call: _TracedCall) -> dict[int, Features]:
        """Return where this column's tokens are in the results, as far as known."""
        known = {
            id(t): _with_place(replace(s, tokens="own"), t).place for t, s in call.given if s.tokens == "all"
        }
        known |= {id(tensor): state.place for tensor, state in call.given if state.tokens == "own"}
        if None in known.values():
            return {}
        followed = follow(
            call.func, call.args, call.kwargs, call.result, lambda tensor: known.get(id(tensor))
        )
        if followed is None and any(t.is_floating_point() for t in tensors_in(call.result)):
            self._found.crossed.setdefault(self._region or self._builder.blocks[0], str(call.func))
        return {id(tensor): place for tensor, place in followed or ()}

    def _scatter(self, call: _TracedCall) -> set[str]:
        """Make layers whose output has all tokens scatter them, where it meets this column's."""
        for state in (state for _, state in call.given if state.tokens == "all"):
            layers = {part for part in state.parts if part in self._builder.modules and part}
            if state.is_own or state.parts >= _STREAM or not layers:
                self._refuse(self._region, "all tokens of its input meet those of one column")
            for name in layers:
                self._place(name, Style.ROW, None)
                self._sum(name, "own")
            self._found.summed |= state.parts - layers
        return {"own"}

    def _meet(self, call: _TracedCall) -> dict[int, Features]:
        """Record what this column's features meet. Returns the features of the results, as far as known."""
        own = {id(tensor): state.features for tensor, state in call.given if state.is_own}
        base = self._blank.get(storage_key(call.given[0][0])) if call.func is _ATEN.copy_.default else None
        others = [(t, s) for t, s in call.given if not s.is_own and s.parts | s.detached]
        followed = None
        if base is not None:
            target, source = call.args[:2]
            features = copied(base, target, source, lambda tensor: self._state(tensor).features)
            followed = None if features is None else [(base, features), (call.result, features)]
        elif None not in own.values():
            followed = follow(call.func, call.args, call.kwargs, call.result, lambda t: own.get(id(t)))
            if followed is None and others and torch.Tag.pointwise in call.func.tags:
                for tensor, state in others:
                    own[id(tensor)] = self._shard(tensor, state, call.given)
                followed = follow(call.func, call.args, call.kwargs, call.result, lambda t: own.get(id(t)))
        for tensor, state in others:
            parts = _NONE if own.get(id(tensor)) else state.parts
            if parts and followed is None and tensor.numel() > 1 and parts != _STREAM:
                given = f"meets features that only this column has, in {call.func}"
                self._refuse(min(parts - _STREAM), given)
            if parts - _STREAM and any(map(self._is_of_head, own.values())):
                self._refuse(min(parts - _STREAM), "meets logits, which a loss= of one's own gets gathered")
            if parts >= _STREAM:
                self._found.streams.add(self._region)
            self._found.summed |= parts - _STREAM
        return {id(tensor): features for tensor, features in followed or ()}

    def _shard(self, tensor: Tensor, state: State, given: list[tuple[Tensor, State]]) -> Features | None:
        """Shard what has as many numbers as the features that it meets. Returns its features, if it has."""
        owner, features = next((t, s.features) for t, s in given if s.is_own)
        assert features is not None, "features that are known"
        from_last, size = features.dim - owner.ndim, owner.shape[features.dim]
        if tensor.ndim < -from_last or tensor.shape[from_last] != size or features.outer != 1:
            return None
        wide = [part for part in state.parts | state.detached if self._width(part) == size]
        if state.parts >= _STREAM or len(wide) != 1:
            names = [*wide, *sorted(state.parts - _STREAM), self._region]
            self._refuse(names[0], "meets features that only this column has")
        if self._is_of_head(features) and not {*wide} <= self._builder.modules.keys():
            self._refuse(wide[0], "meets logits, which a loss= of one's own gets gathered")
        self._place(wide[0], Style.COLUMN, features)
        self._found.summed |= state.parts - {*wide}
        sources = features.sources | {(wide[0], count) for _, count in features.sources}
        return replace(features, sources=sources, dim=tensor.ndim + from_last)

    def _is_of_head(self, features: Features | None) -> bool:
        layers = [self._builder.layers.get(name) for name, _ in features.sources] if features else []
        return any(layer is not None and layer.head for layer in layers)

    def _width(self, part: str) -> int:
        """The number of features that a layer outputs, or the size of a parameter's first dim."""
        if part in self._builder.shapes:
            return (*self._builder.shapes[part], 0)[0]
        return (linear_features(self._builder.modules[part]) or (0,))[0]

    def _refuse(self, name: str, given: str) -> NoReturn:
        raise misfit(self._builder, name, given, sequence=self._sequence)
