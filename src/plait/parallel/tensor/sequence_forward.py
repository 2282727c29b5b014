"""Sequence parallelism: between the first block's input and the last block's output a rank has its tokens
only.

After Korthikanti et al. (2205.05198, section 4.2.2): norms and what else lies between regions work on a
piece of the tokens; a region (attention, mlp) gathers them, and the sum after its ROW layers leaves each
rank its own.

[Note: the gradient of a region's input]
  pure    every weight that reads the input is cut, so each rank has a part of its gradient: backward sums
          the parts and leaves each rank its tokens, one reduce-scatter. COLUMN layers inside do not sum.
          What they read is gathered again for their weights; see readers.py.
  else    COLUMN layers inside sum, as without sp; the gradient is whole on every rank, which takes its
          tokens.
  closed  nothing inside leaves a rank its own tokens: it holds experts, which look at tokens one by one and
          in an order of their own, or has no ROW layer. It works as without sp, and every rank takes its
          tokens of what comes out. A closed region is not pure, but for a lone layer.

Modules outside of the blocks must not run between them while a rank has its tokens only.

A norm that lies beside the blocks sees a part of the tokens there, and its gradients are parts that nobody
knows of. A module without parameters of its own may run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.parallel.tensor.sequence import (
    SequenceShard,
    token_dim,
    gather_tokens,
    all_gather_tokens,
    shard_lengths,
    split_tokens,
    start_all_gather_tokens,
    start_reduce_scatter_tokens,
)
from plait.parallel.tensor.shared_input import WeakTensorMap, Regather, SharedInput, SharedInputs, weight_of
from plait.parallel.tensor.side_inputs import SideInputs, map_side_inputs


def check_outer_modules(model: nn.Module, blocks: Sequence[str], tokens: SequenceShard) -> None:
    """Hooks, also of copies: a function is not copied, so theirs knows the same tokens."""
    model.register_forward_pre_hook(lambda *_: tokens.leave())  # a forward that failed may have left them cut
    for name, module in model.named_modules():
        is_inside = any(not block or name == block or name.startswith(f"{block}.") for block in blocks)
        if name and not is_inside and any(True for _ in module.parameters(recurse=False)):
            _check_not_sharded(name, module, tokens)


def _check_not_sharded(name: str, module: nn.Module, tokens: SequenceShard) -> None:
    def check(*_: Any) -> None:
        if tokens.is_cut:
            raise ModelError(
                f"{name} is outside of the blocks and runs between them, on tokens of one rank alone",
                given=f"{type(module).__name__} with parameters of its own, sp=true",
                expected="between blocks nothing that has parameters",
                hint="sp=false",
            )

    module.register_forward_pre_hook(check)


Forward = Callable[..., Any]


@dataclass(frozen=True)
class GatherTracker:
    """Tokens that have been gathered in the block that is running: one message per tensor and kind."""

    pure: WeakTensorMap[Tensor] = field(default_factory=WeakTensorMap)
    whole: WeakTensorMap[Tensor] = field(default_factory=WeakTensorMap)

    def forget(self) -> None:
        self.pure.clear()
        self.whole.clear()


@dataclass(frozen=True)
class SequenceParallelBlock:
    """The forward of a block whose stream has this rank's tokens."""

    name: str
    forward: Forward
    tokens: SequenceShard
    gathers: GatherTracker
    beside: SideInputs
    is_first: bool
    is_last: bool

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._enter(args, kwargs)
        return self._leave(self.forward(module, *args, **kwargs))

    @torch.compiler.disable
    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def enter(x: Tensor) -> Tensor:
            self.tokens.enter(self.name, x, is_whole=self.is_first)
            if not self.is_first:
                return x
            self.beside.forget()
            group = self.tokens.group
            piece = split_tokens(x, group, shard_lengths(x.shape[token_dim(x)], group.size))
            self.tokens.mark(piece)
            return piece

        def other(x: Tensor) -> Tensor:
            return self.beside.for_block(self.name, x, is_first=self.is_first)

        return map_side_inputs(other, *map_hidden_input(enter, self.name, args, kwargs))

    @torch.compiler.disable
    def _leave(self, output: Any) -> Any:
        self.gathers.forget()
        if self.is_last:
            self.tokens.leave()

        def leave(x: Tensor) -> Tensor:
            if self.is_last:
                return gather_tokens(x, self.tokens.group, self.tokens.sizes_around(x))
            self.tokens.mark(x)
            return x

        return map_hidden_output(leave, self.name, output)


@dataclass(frozen=True)
class SequenceParallelRegion:
    """The forward of a region. See [Note: the gradient of a region's input].

    columns   of a pure region, the layers that read its input, by their names in it
    """

    name: str
    forward: Forward
    tokens: SequenceShard
    gathers: GatherTracker
    beside: SideInputs
    readers: SharedInputs  # along col
    scope: str
    columns: tuple[str, ...]
    is_pure: bool
    is_closed: bool

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._enter(module, args, kwargs)
        output = self.forward(module, *args, **kwargs)
        return self._leave(output) if self.is_closed else output

    @torch.compiler.disable
    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = map_hidden_input(lambda x: self._read(module, x), self.name, args, kwargs)
        if self.is_pure:
            return args, kwargs
        return map_side_inputs(lambda x: self.beside.for_region(self.name, x), args, kwargs)

    def _read(self, module: nn.Module, x: Tensor) -> Tensor:
        given = self.beside.given(x)
        if given is None:
            return self._gathered(module, x)
        return x if self.is_pure else given  # all tokens already

    def _gathered(self, module: nn.Module, x: Tensor) -> Tensor:
        self.tokens.dims = x.dim()
        known = self.gathers.pure if self.is_pure else self.gathers.whole
        found = known.get(x)
        if found is not None:
            return self.readers.join(found, self._weights(module)) if self.is_pure else found
        group, sizes = self.tokens.group, self.tokens.sizes_around(x)
        if self.is_pure and torch.is_grad_enabled() and x.requires_grad:
            reading = SharedInput(
                module,
                self.scope,
                self.readers.expected(module, self._weights(module)),
                lambda dz: start_reduce_scatter_tokens(dz, group, sizes, "gradient of a region's tokens"),
                lambda piece: all_gather_tokens(piece, group, sizes),
                Regather(lambda piece: start_all_gather_tokens(piece, group, sizes, "a region's tokens")),
            )
            whole = reading.of(x)
            self.readers.make_known(whole, reading, x.detach())
        else:
            whole = gather_tokens(x, group, sizes)
        known.put(x, whole)
        return whole

    def _weights(self, module: nn.Module) -> list[Tensor]:
        return [weight_of(module.get_submodule(name)) for name in self.columns]

    @torch.compiler.disable
    def _leave(self, output: Any) -> Any:
        group = self.tokens.group
        return map_hidden_output(lambda x: split_tokens(x, group, self.tokens.sizes_within(x)), self.name, output)


def map_hidden_input(
    change: Callable[[Tensor], Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with hidden states changed: the first positional one, or the keyword of that name."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    raise ModelError(
        f"it cannot be told which input of {name} the hidden states are",
        given=f"{len(args)} positional arguments and the keywords {', '.join(kwargs) or '(none)'}",
        expected="a tensor as the first positional argument, or as the keyword hidden_states",
        hint="sp=false",
    )


def map_hidden_output(change: Callable[[Tensor], Tensor], name: str, output: Any) -> Any:
    """The output with hidden states changed: the tensor it is, or its first entry."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        values = (change(output[0]), *output[1:])
        return output._make(values) if hasattr(output, "_make") else type(output)(values)  # a namedtuple
    if isinstance(output, dict) and output and isinstance(first := next(iter(output.values())), Tensor):
        output[next(iter(output))] = change(first)  # transformers' ModelOutput
        return output
    raise ModelError(
        f"it cannot be told which output of {name} the hidden states are",
        given=type(output).__name__,
        expected="a tensor, or a tuple or ModelOutput that begins with it",
        hint="sp=false",
    )
