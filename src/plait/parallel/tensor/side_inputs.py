"""What blocks are handed beside their tokens, where tokens are cut over `col`: an encoder's output.

[Note: what comes from outside is read by every column]
A block computes with this column's tokens and heads, so of a whole tensor that comes from outside of the
blocks every column has a part of the gradient. Blocks are handed it spread: backward sums the parts, once for
all blocks. A region that is not pure sums by itself; it is handed the tensor as it was.

From outside is what the first block is handed, and what autograd knew before it began. Of what has been made
since, that which comes of the stream and is as long as this rank's piece has this rank's tokens, and is left
as it is. Of the rest it cannot be told whether columns have the same or each its own.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.parallel.tensor.functional import copy_to_group
from plait.parallel.tensor.sequence import SequenceShard, token_dim, depends_on_block_input
from plait.parallel.tensor.shared_input import WeakTensorMap


class SideInputs:
    """See [Note: what comes from outside is read by every column]."""

    def __init__(self, tokens: SequenceShard) -> None:
        self._tokens = tokens
        self._spread: WeakTensorMap[Tensor] = WeakTensorMap()
        self._given: WeakTensorMap[weakref.ref[Tensor]] = WeakTensorMap()  # what was spread

    def forget(self) -> None:
        self._spread.clear()
        self._given.clear()

    def given(self, x: Tensor) -> Tensor | None:
        """What came from outside, if `x` is that spread."""
        found = self._given.get(x)
        return None if found is None else found()

    def for_block(self, name: str, x: Tensor, *, is_first: bool) -> Tensor:
        """What a block is to be handed for `x`."""
        if not _has_gradient(x) or self.given(x) is not None:
            return x
        if is_first or x.grad_fn is None or x.grad_fn._sequence_nr() < self._tokens.begun:
            return self._spread_of(x)
        if depends_on_block_input(x) and x.dim() > 1 and x.shape[token_dim(x)] == self._tokens.own:
            return x
        raise _undecidable(name, x)

    def for_region(self, name: str, x: Tensor) -> Tensor:
        """What a region that is not pure is to be handed for `x`."""
        if not _has_gradient(x):
            return x
        given = self.given(x)
        if given is None and not depends_on_block_input(x):
            raise _undecidable(name, x)
        return x if given is None else given

    def _spread_of(self, x: Tensor) -> Tensor:
        known = self._spread.get(x)
        if known is None:
            known = copy_to_group(x, self._tokens.group)
            self._spread.put(x, known)
            self._given.put(known, weakref.ref(x))
        return known


def map_side_inputs(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, all tensors of them changed but the hidden states; see `with_input`."""

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return tuple(map(other, value)) if type(value) is tuple else value

    is_first = bool(args) and isinstance(args[0], Tensor)
    states = () if is_first else ("hidden_states",)
    others = tuple(value if is_first and not place else other(value) for place, value in enumerate(args))
    return others, {key: value if key in states else other(value) for key, value in kwargs.items()}


def _has_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _undecidable(name: str, x: Tensor) -> ModelError:
    return ModelError(
        f"{name} is handed a tensor of which it cannot be told whether every rank has the same",
        given=f"shape {tuple(x.shape)}, beside the tokens that sequence parallelism deals out",
        expected="what was made before the first block, or has this rank's tokens",
        hint="sp=false",
    )
