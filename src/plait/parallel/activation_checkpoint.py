"""Recompute (activation checkpointing): a block keeps little of its forward and runs again in backward.

`full` keeps a block's inputs only (Chen et al. 1604.06174). `selective` also keeps the outputs of its
matrix products, which are most of the FLOPs, and computes norms, activations, dropout and attention again:
scores grow with the square of the sequence, and fused attention is cheap beside what it would keep
(Korthikanti et al. 2205.05198, section 5). `every=k` is `full` for blocks 0, k, 2k ...

torch's non-reentrant checkpoint does the work. It restores the random state, so dropout masks are the same
both times and the numbers are those of `none`, bit for bit. What is wrapped is a block's `forward`, not
its call: module hooks stay outside and do not run again.

[Note: why products are kept by modes of our own]
torch's selective contexts refuse, in backward, a kept output that was changed in place. That is common
(`ReLU(inplace=True)` behind a linear layer; a bias that `F.linear` adds in place when its input is not
contiguous). Here such a product is computed again, like everything that is not kept. Our modes can also
tell who counts bytes. Under torch.compile it has to be torch's contexts: they mark the traced graph for
the partitioner, and in a traced graph nothing is changed in place.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from plait.errors import ModelError

# What products are by the time they reach a device; bmm and baddbmm are attention's.
_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "aten::mkldnn_linear",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "transformers::grouped_mm_fallback",
        "aten::convolution",
        "plait::summed_product",  # parallel/tensor/linear.py
    }
)


def recompute_blocks(blocks: Sequence[nn.Module], how: str) -> None:
    """Wraps the forward of the blocks that `how` (a plan's `recompute`) names; `none` names none of them."""
    if how == "none":
        return
    step = int(how.removeprefix("every=")) if how.startswith("every=") else 1
    for block in blocks[::step]:
        block.forward = RecomputedForward(block.forward, selective=how == "selective")


class RecomputedForward:
    """A block's forward that runs again in backward. A copy of the block gets one of its own.

    `on_save` is told of every tensor that is kept without autograd's knowledge; see `models/saved.py`.
    """

    def __init__(self, forward: Callable[..., Any], *, selective: bool) -> None:
        self.forward = forward
        self.selective = selective
        self.on_save: Callable[[Tensor], object] | None = None

    def run_within(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """From here on the block runs inside of `context()`, both times."""
        self.forward = functools.partial(_within, context, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_compiling()
        if self.on_save is not None and not traced:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    self.on_save(value)
        contexts: Callable[[], Any] = noop_context_fn
        if self.selective:
            contexts = _TRACED_CONTEXTS if traced else self._contexts
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        kept: list[_Kept | None] = []
        return _Keep(kept, self.on_save), _Replay(kept)


def _within(
    context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with context():
        return forward(*args, **kwargs)


@dataclass(frozen=True)
class _Kept:
    product: Callable[..., Any]
    output: Tensor
    version: int  # the output's when it was kept; another one later means that it was changed in place


class _Keep(TorchDispatchMode):
    """In forward: keeps the outputs of products, in order."""

    def __init__(self, kept: list[_Kept | None], on_save: Callable[[Tensor], object] | None) -> None:
        super().__init__()
        self._kept = kept
        self._on_save = on_save

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_product(func):
            alias = _without_graph(output)
            self._kept.append(_Kept(func, alias, alias._version))
            if self._on_save is not None:
                self._on_save(alias)
        return output


class _Replay(TorchDispatchMode):
    """In backward: hands out what was kept, once, in the same order. What is gone is computed again."""

    def __init__(self, kept: list[_Kept | None]) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> "_Replay":
        self._next = 0  # a graph that was retained is walked more than once
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = self._take(func) if _is_product(func) else None
        if found is None or found.output._version != found.version:
            return func(*args, **(kwargs or {}))
        return found.output

    def _take(self, func: Callable[..., Any]) -> _Kept | None:
        number, self._next = self._next, self._next + 1
        found = self._kept[number] if number < len(self._kept) else None
        if number >= len(self._kept) or (found is not None and found.product is not func):
            raise ModelError(
                "a recomputed block did not do in backward what it had done in forward",
                given=f"product {number + 1}: {func}, after {found.product if found else 'none'} in forward",
                expected="a forward that depends on its inputs and torch's random generators alone",
                hint="recompute=none",
            )
        self._kept[number] = None  # autograd has it from here on, and lets it go when it can
        return found


@functools.cache
def _is_product(func: Callable[..., Any]) -> bool:
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    return schema is not None and schema.name in _PRODUCTS and not schema.is_mutable


def _without_graph(tensor: Tensor) -> Tensor:
    """The same bytes and the same version counter, but no graph that would keep the block alive."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _keep_products(_: Any, func: Callable[..., Any], *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_product(func) else CheckpointPolicy.PREFER_RECOMPUTE


# See [Note: why products are kept by modes of our own]
_TRACED_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _keep_products)
