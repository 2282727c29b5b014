"""Forwards of blocks and regions under sequence parallelism.

After Korthikanti et al. (2205.05198, section 4.2.2): norms and everything else between regions compute with
this rank's tokens; a region (attention, mlp) all-gathers them, and the reduction after its ROW layers is a
reduce-scatter over tokens.

[Note: input gradients of regions]
  pure      every weight that multiplies the region's input is sharded, so each rank has a partial gradient of
            the input: backward reduces it to this rank's tokens, one reduce-scatter. COLUMN layers inside do
            not reduce. Their input is gathered again for their weight gradients; see shared_input.py.
  not pure  COLUMN layers inside all-reduce, as without sp; the gradient is full on every rank, which takes
            its tokens.
  closed    nothing inside scatters tokens: the region holds experts, which treat tokens independently and in
            an order of their own, or has no ROW layer. It works as without sp, and every rank takes its
            tokens of the output. A closed region is not pure, except for a lone layer.

[Note: layers outside of the blocks]
A module with parameters that is in no block must not run between blocks. It would compute with this rank's
tokens only, and its gradients would be partial sums that nothing reduces. A module without parameters of its
own may run.

[Note: gradients of side inputs]
A block computes with this column's tokens and heads, so the gradient of a full tensor from outside of the
blocks is a partial sum on every column. Blocks get a copy of it whose backward all-reduces the gradient, once
for all blocks. A region that is not pure reduces by itself, and gets the original.

A tensor is from outside if it is an argument of the first block, or if autograd recorded it before that block
began, and if it does not depend on what a stage received ([Note: token shards between stages] in
sequence.py). Of other tensors, one that depends on a block's input and is as long as this rank's shard holds
this rank's tokens, and is passed unchanged. For all others it is undecidable whether columns hold equal
values.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.tensors import WeakTensorMap, first_argument
from plait.parallel.linear_products import NOT_TRACED, Float8Input
from plait.parallel.tensor.functional import copy_to_group, gather, split
from plait.parallel.tensor.sequence import SequenceShard, depends_on_block_input
from plait.parallel.tensor.shards import TokenGather, token_dim
from plait.parallel.tensor.shared_input import SharedInput, SharedInputs, traced_full_input, weight_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional, keywords


def check_outer_modules(model: nn.Module, blocks: Sequence[str], sequence_shard: SequenceShard) -> None:
    """Register hooks that raise if a module outside of the blocks runs between them.

    See [Note: layers outside of the blocks]. Copies of the model keep the hooks and share `sequence_shard`.
    """
    model.register_forward_pre_hook(lambda *_: sequence_shard.exit())  # the last forward may have failed
    for name, module in model.named_modules():
        is_inside = any(not block or name == block or name.startswith(f"{block}.") for block in blocks)
        if name and not is_inside and any(True for _ in module.parameters(recurse=False)):
            _check_not_sharded(name, module, sequence_shard)


def begin_with_received(model: nn.Module, sequence_shard: SequenceShard) -> None:
    """Register hooks that begin the blocks of a stage where the blocks of earlier ones would have ended, or
    with the received input of its first block. If it has no blocks, its tokens are gathered there."""
    earlier = [model.get_submodule(name) for name in sequence_shard.earlier]
    if sequence_shard.begins_with_input:
        earlier.pop().register_forward_pre_hook(
            lambda _, *call: sequence_shard.begin_received(first_argument(*call)), with_kwargs=True
        )
    for block in earlier:
        block.register_forward_hook(lambda *call: sequence_shard.begin_received(call[-1]))
    if earlier and not sequence_shard.has_blocks:
        earlier[-1].register_forward_hook(lambda *call: _gathered(sequence_shard, call[-1]))


def _gathered(sequence_shard: SequenceShard, output: Any) -> Any:
    """Return a block's received output with all tokens, after which no block follows."""
    name = sequence_shard.earlier[-1]
    full = map_hidden_output(lambda x: gather(x, sequence_shard.shards_of_own(x)), name, output)
    sequence_shard.exit()
    return full


def _check_not_sharded(name: str, module: nn.Module, sequence_shard: SequenceShard) -> None:
    def check(*_: Any) -> None:
        if sequence_shard.is_sharded:
            raise ModelError(
                f"{name} is outside of the blocks and runs between them, on the tokens of one rank only",
                given=f"{type(module).__name__} with parameters of its own, sp=true",
                expected="only modules without parameters between blocks",
                hint="sp=false",
            )

    module.register_forward_pre_hook(check)


class SideInputs:
    """Copies of tensors from outside of the blocks. See [Note: gradients of side inputs]."""

    def __init__(self, sequence_shard: SequenceShard) -> None:
        self._sequence_shard = sequence_shard
        self.is_used = False  # in this forward
        self._copies: WeakTensorMap[Tensor] = WeakTensorMap()  # by original
        self._originals: WeakTensorMap[weakref.ref[Tensor]] = WeakTensorMap()  # by copy

    def clear(self) -> None:
        self.is_used = False
        self._copies.clear()
        self._originals.clear()

    def original(self, x: Tensor) -> Tensor | None:
        """Return the tensor from outside that `x` is a copy of, if any."""
        original = self._originals.get(x)
        return None if original is None else original()

    def for_block(self, name: str, x: Tensor, *, is_first: bool) -> Tensor:
        """Return the tensor that a block gets for `x`."""
        if not _has_gradient(x) or self.original(x) is not None:
            return x
        copy = self._copies.get(x)
        if copy is not None:
            return copy
        depends, begin = depends_on_block_input(x), self._sequence_shard.begin_seq_nr
        if not depends and (is_first or x.grad_fn is None or x.grad_fn._sequence_nr() < begin):
            self.is_used = True
            copy = copy_to_group(x, self._sequence_shard.group)
            self._copies.put(x, copy)
            self._originals.put(copy, weakref.ref(x))
            return copy
        own_length = self._sequence_shard.own_length
        if depends and x.dim() > 1 and x.shape[token_dim(x)] == own_length:
            return x
        raise _undecidable(name, x)

    def for_region(self, name: str, x: Tensor) -> Tensor:
        """Return the tensor that a region that is not pure gets for `x`."""
        if not _has_gradient(x):
            return x
        original = self.original(x)
        if original is not None:
            return original
        if depends_on_block_input(x):
            return x
        raise _undecidable(name, x)


def _has_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _undecidable(name: str, x: Tensor) -> ModelError:
    return ModelError(
        f"{name} gets a tensor of which it is unknown whether every rank has the same values",
        given=f"shape {tuple(x.shape)}, in addition to the tokens that sequence parallelism shards",
        expected="a tensor made before the first block, or one with this rank's tokens",
        hint="sp=false",
    )


@dataclass(frozen=True)
class SequenceParallelBlock:
    """Forward of a block whose input and output hold this rank's tokens. `is_first`, `is_last`: of the stage;
    see [Note: token shards between stages] in sequence.py."""

    name: str
    forward: Callable[..., Any]
    sequence_shard: SequenceShard
    side_inputs: SideInputs
    is_first: bool
    is_last: bool

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._enter(args, kwargs)
        return self._exit(self.forward(module, *args, **kwargs))

    @torch.compiler.disable
    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        def enter(x: Tensor) -> Tensor:
            self.sequence_shard.enter(self.name, x, is_first=self.is_first)
            if self.is_first:
                self.side_inputs.clear()
            if not self.is_first or self.sequence_shard.earlier:
                return x
            x_BtH = self.sequence_shard.shard(x)
            self.sequence_shard.mark(x_BtH)
            return x_BtH

        def side_input(x: Tensor) -> Tensor:
            return self.side_inputs.for_block(self.name, x, is_first=self.is_first)

        return map_side_inputs(side_input, *map_hidden_input(enter, self.name, args, kwargs))

    @torch.compiler.disable
    def _exit(self, output: Any) -> Any:
        for gathered in self.sequence_shard.gathered.values():
            gathered.clear()
        if self.is_last:
            self.sequence_shard.exit()

        def exit_block(x: Tensor) -> Tensor:
            if self.is_last and not self.sequence_shard.is_sent:
                return gather(x, self.sequence_shard.shards_of_own(x))
            self.sequence_shard.mark(x)
            return x

        return map_hidden_output(exit_block, self.name, output)


@dataclass(frozen=True)
class Region:
    """A region of a block; `is_pure`, `is_closed`: see [Note: input gradients of regions]."""

    name: str
    is_pure: bool
    is_closed: bool
    gathers: bool  # its forward all-gathers the tokens of its input


@dataclass(frozen=True)
class SequenceParallelRegion:
    """Forward of a region.

    columns      of a pure region: names, relative to it, of the layers that multiply its input
    has_float8   one of these multiplies in float8, so it runs uncompiled
    input_cast   how these take their input, if all do so in another form than it has
    """

    region: Region
    forward: Callable[..., Any]
    sequence_shard: SequenceShard
    side_inputs: SideInputs
    shared_inputs: SharedInputs  # along col
    scope: str
    columns: tuple[str, ...]
    has_float8: bool = False
    input_cast: Float8Input | None = None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args, kwargs = self._enter(module, args, kwargs)
        elif self.has_float8:
            args, kwargs = self._uncompiled_float8_enter(module, args, kwargs)
        elif self.region.is_pure and not self.side_inputs.is_used:
            args, kwargs = self._traced_enter(module, args, kwargs)
        else:
            args, kwargs = self._uncompiled_enter(module, args, kwargs)
        output = self.forward(module, *args, **kwargs)
        return self._exit(output) if self.region.is_closed else output

    def _traced_enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        def full_input(x_BtH: Tensor) -> Tensor:
            self.sequence_shard.region_input_dims = x_BtH.dim()
            weights = [weight_of(module.get_submodule(name)) for name in self.columns]
            sizes = self.sequence_shard.shards_of_own(x_BtH).sizes
            return traced_full_input(x_BtH, weights, self.sequence_shard.group.name, sizes)

        return map_hidden_input(full_input, self.region.name, args, kwargs)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        name = self.region.name
        args, kwargs = map_hidden_input(lambda x: self._full_input(module, x), name, args, kwargs)
        if self.region.is_pure:
            return args, kwargs
        return map_side_inputs(lambda x: self.side_inputs.for_region(name, x), args, kwargs)

    _uncompiled_enter = torch.compiler.disable(
        _enter, reason="a region with other layers than sharded ones, or other inputs than tokens"
    )
    _uncompiled_float8_enter = torch.compiler.disable(_enter, reason=NOT_TRACED)

    def _full_input(self, module: nn.Module, x: Tensor) -> Tensor:
        original = self.side_inputs.original(x)
        if original is None:
            return self._gather(module, x)
        return x if self.region.is_pure else original  # a side input: has all tokens already

    def _gather(self, module: nn.Module, x_BtH: Tensor) -> Tensor:
        sequence, is_pure = self.sequence_shard, self.region.is_pure
        sequence.region_input_dims = x_BtH.dim()
        weights = [weight_of(module.get_submodule(name)) for name in self.columns]
        x_BTH = sequence.gathered[is_pure].get(x_BtH)
        if x_BTH is not None:
            return self.shared_inputs.join(x_BTH, weights) if is_pure else x_BTH
        tokens = sequence.shards_of_own(x_BtH)
        if is_pure and torch.is_grad_enabled() and x_BtH.requires_grad:
            weights = self.shared_inputs.predict_weights(module, weights)
            regather = TokenGather(tokens, self.input_cast)
            shared = SharedInput(module, self.scope, weights, tokens, regather)
            x_BTH = shared.apply(x_BtH)
            self.shared_inputs.register(x_BTH, shared, x_BtH.detach())
        else:
            x_BTH = gather(x_BtH, tokens)
        sequence.gathered[is_pure].put(x_BtH, x_BTH)
        return x_BTH

    @torch.compiler.disable(reason="a region that does not scatter its tokens")
    def _exit(self, output: Any) -> Any:
        def own(x: Tensor) -> Tensor:
            if (num_sequences := self.sequence_shard.num_flattened(x)) is not None:
                return own(x.unflatten(0, (num_sequences, -1))).flatten(0, 1)
            return split(x, self.sequence_shard.shards_of_full(x))

        return map_hidden_output(own, self.region.name, output)


def map_hidden_input(
    change: Callable[[Tensor], Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Return the arguments with hidden states changed: the first positional one, or the keyword
    `hidden_states`."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    raise ModelError(
        f"cannot tell which input of {name} the hidden states are",
        given=f"{len(args)} positional arguments and the keywords {', '.join(kwargs) or '(none)'}",
        expected="a tensor as the first positional argument, or as the keyword hidden_states",
        hint="sp=false",
    )


def map_side_inputs(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Return the arguments with all tensors changed except the hidden states; see `map_hidden_input`."""

    def change_tensors(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return tuple(map(change_tensors, value)) if type(value) is tuple else value

    hidden = args[:1] if args and isinstance(args[0], Tensor) else ()
    hidden_key = None if hidden else "hidden_states"
    return (*hidden, *map(change_tensors, args[len(hidden) :])), {
        key: value if key == hidden_key else change_tensors(value) for key, value in kwargs.items()
    }


def map_hidden_output(change: Callable[[Tensor], Tensor], name: str, output: Any) -> Any:
    """Return the output with hidden states changed: the tensor itself, or the output's first entry."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        values = (change(output[0]), *output[1:])
        return output._make(values) if hasattr(output, "_make") else type(output)(values)  # a namedtuple
    if isinstance(output, dict) and output and isinstance(first := next(iter(output.values())), Tensor):
        output[next(iter(output))] = change(first)  # transformers' ModelOutput
        return output
    raise ModelError(
        f"cannot tell which output of {name} the hidden states are",
        given=type(output).__name__,
        expected="a tensor, or a tuple or ModelOutput that begins with it",
        hint="sp=false",
    )
