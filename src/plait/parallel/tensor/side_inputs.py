"""Inputs of blocks other than hidden states, under sequence parallelism: an encoder's output, for example.

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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.models.tensors import WeakTensorMap
from plait.parallel.tensor.functional import copy_to_group
from plait.parallel.tensor.sequence import SequenceShard, depends_on_block_input
from plait.parallel.tensor.shards import token_dim

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional, keywords


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


def _has_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _undecidable(name: str, x: Tensor) -> ModelError:
    return ModelError(
        f"{name} gets a tensor of which it is unknown whether every rank has the same values",
        given=f"shape {tuple(x.shape)}, in addition to the tokens that sequence parallelism shards",
        expected="a tensor made before the first block, or one with this rank's tokens",
        hint="sp=false",
    )
