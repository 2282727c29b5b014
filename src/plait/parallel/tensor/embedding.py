"""Embeddings sharded over the vocabulary (`col`) and over features (`row`).

Every rank looks up the indices in its vocabulary range and sets the rows of all others to zero; the sum over
`col` then contains each row once. The module's own forward does the lookup, with indices into the rank's
shard, so what a subclass adds to it (Gemma's scale) is preserved.

# B batch  S sequence  H hidden;  h = this rank's features
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group
from plait.errors import ModelError
from plait.parallel.tensor.functional import all_reduce_in_place
from plait.parallel.tensor.shards import ShardedDim
from plait.parallel.tensor.shared_input import weight_of
from plait.plan.sharding import Range


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """Forward of an embedding whose vocabulary is sharded; for `types.MethodType`."""

    forward: Callable[..., Tensor]
    vocabulary: ShardedDim

    @torch.compiler.disable(reason="an embedding")
    def __call__(self, module: nn.Module, indices_BS: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _check_indices(indices_BS, self.vocabulary.full_size)
        ranges = self.vocabulary.sharding.ranges[self.vocabulary.coord]
        local_BS, mask_BS = _to_local(indices_BS, ranges)
        if not self.vocabulary.is_first:
            mask_BS = torch.ones_like(mask_BS)  # a copy of a shard: the first holder provides its rows
        if any(stop > start for start, stop in ranges):
            with _padding_in_shard(module, self.vocabulary):
                rows = self.forward(module, local_BS, *args, **kwargs)
        else:  # in the graph, as on other ranks: a consumer reduces gradients on every rank or on none
            weight = weight_of(module)
            rows = weight.new_zeros(*indices_BS.shape, weight.shape[-1]) + weight.sum()
        return _MaskAndReduce.apply(rows, mask_BS, self.vocabulary.group)


def _check_indices(indices: Tensor, size: int) -> None:
    """Raise ModelError for an index that no rank holds; a GPU is not synchronized, but asserts, as in torch's
    embedding."""
    if indices.is_meta:
        return
    is_valid = (indices >= 0) & (indices < size)
    if indices.device.type != "cpu":
        torch._assert_async(is_valid.all())
    elif not is_valid.all():
        raise ModelError(
            "an index is not in the embedding's table",
            given=int(indices[~is_valid][0]),
            expected=f"0 to {size - 1}: ids of tokens in the model's vocabulary",
            hint="the model's own tokenizer",
        )


def check_embedding(name: str, module: nn.Module) -> None:
    """Raise ModelError if the embedding cannot be sharded over the vocabulary."""
    for option, default in (("max_norm", None), ("sparse", False), ("scale_grad_by_freq", False)):
        value = getattr(module, option, default)
        if value != default:
            raise ModelError(
                f"cannot shard the embedding {name} over its vocabulary",
                given=f"{option}={value}, which needs the rows of all ranks",
                expected=f"{option}={default}",
                hint="tp=1",
            )


@contextlib.contextmanager
def _padding_in_shard(module: Any, vocabulary: ShardedDim) -> Iterator[None]:
    """Let `padding_idx`, whose row gets no gradient, be a row of this rank's shard, or None. An adapter with
    a full table reads it outside of the embedding's forward."""
    index = getattr(module, "padding_idx", None)
    if index is None:
        yield
        return
    begin, module.padding_idx = 0, None
    for start, stop in vocabulary.sharding.ranges[vocabulary.coord]:
        if start <= index < stop:
            module.padding_idx = begin + index - start
        begin += stop - start
    try:
        yield
    finally:
        module.padding_idx = index


def _to_local(indices: Tensor, ranges: tuple[Range, ...]) -> tuple[Tensor, Tensor]:
    """Return indices into the rank's shard, 0 for those of other ranks, and the mask of the latter."""
    local, mask = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    begin = 0
    for start, stop in ranges:
        is_local = (indices >= start) & (indices < stop)
        local = torch.where(is_local, indices - (start - begin), local)
        mask = mask & ~is_local
        begin += stop - start
    return local, mask


class _MaskAndReduce(Function):
    """Set masked rows to zero and all-reduce, both in the lookup's output."""

    @staticmethod
    def forward(ctx: Any, rows_BSh: Tensor, mask_BS: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(mask_BS)
        ctx.mark_dirty(rows_BSh)
        return all_reduce_in_place(
            rows_BSh.masked_fill_(mask_BS.unsqueeze(-1), 0), group, "rows of an embedding"
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSh: Tensor) -> tuple[Tensor | None, ...]:
        (mask_BS,) = ctx.saved_tensors
        return grad_BSh.masked_fill(mask_BS.unsqueeze(-1), 0), None, None
