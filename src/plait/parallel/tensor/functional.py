"""Differentiable collectives of tensor parallelism.

# F features of the full tensor;  f = this rank's

  function                   forward     backward    use
  copy_to_group              identity    all-reduce  a replicated tensor, used differently on each rank
  reduce_from_group          all-reduce  identity    partial sums become the full value
  differentiable_all_reduce  all-reduce  all-reduce  a statistic that all ranks add to and use
  gather_features            all-gather  own shard   what follows is the same on every rank
  split_features             own shard   all-gather  what precedes is the same on every rank

The first two are f and g of Megatron-LM (Shoeybi et al. 1909.08053, section 3). A group of one rank does not
communicate. On meta tensors only shapes are computed. A second derivative raises an error (torch's).

[Note: shared shards count once]
Ranks that hold the same shard (kv heads fewer than columns) hold copies of a parameter, whose gradients are
summed elsewhere. A value that is the same on every rank must therefore reach only the first copy: the
gradient of a gathered tensor, and a copy's contribution to a statistic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from plait.comm import Group, Work, all_gather, all_reduce, start_all_reduce
from plait.parallel.tensor.groups import ShardedDim


def all_reduce_in_place(tensor: Tensor, group: Group, label: str = "") -> Tensor:
    """Sum a tensor over the group, in place. The caller holds the only reference to its values."""
    if group.size > 1:
        all_reduce(tensor, group, label=label)
        increment_version(tensor)  # autograd detects if the unreduced value was saved
    return tensor


def start_all_reduce_in_place(tensor: Tensor, group: Group, label: str = "") -> Work:
    """Start the all-reduce of a gradient, which autograd does not save."""
    if group.size == 1:
        return Work()
    return start_all_reduce(tensor, group, label=label)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return `x`; backward all-reduces the gradient."""
    return _CopyToGroup.apply(x, group) if group.size > 1 else x


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum of `x` over the group; backward is the identity."""
    return _ReduceFromGroup.apply(x, group) if group.size > 1 else x


def differentiable_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of `x` over the group; backward all-reduces the gradient."""
    return _DifferentiableAllReduce.apply(x, group) if group.size > 1 else x


def copy_tail_to_group(x: Tensor, width: int, group: Group) -> Tensor:
    """`copy_to_group` for the last `width` features only."""
    return _CopyTailToGroup.apply(x, width, group) if group.size > 1 and width else x


def gather_features(shard_f: Tensor, dim: ShardedDim) -> Tensor:
    """All-gather (..., f) to (..., F); backward takes the shard. See [Note: shared shards count once]."""
    return _GatherFeatures.apply(shard_f, dim) if dim.group.size > 1 else shard_f


def split_features(full_F: Tensor, dim: ShardedDim) -> Tensor:
    """Take the shard (..., f) of (..., F); backward all-gathers."""
    return _SplitFeatures.apply(full_F, dim) if dim.group.size > 1 else full_F


def all_gather_features(shard_f: Tensor, dim: ShardedDim) -> Tensor:
    """All-gather (..., f) of every rank to (..., F), without a graph. Uneven shards are padded."""
    group, sizes = dim.group, dim.sharding.sizes
    full_F = shard_f.new_empty(*shard_f.shape[:-1], dim.full_size)
    longest = max(sizes)
    buffer = shard_f.new_empty(group.size, *shard_f.shape[:-1], longest)
    buffer[dim.coord, ..., : shard_f.shape[-1]] = shard_f
    if shard_f.shape[-1] < longest:
        buffer[dim.coord, ..., shard_f.shape[-1] :] = 0
    all_gather(buffer.view(-1), buffer[dim.coord].view(-1), group, label="features")
    for coord, size in enumerate(sizes):
        dim.write(full_F, buffer[coord, ..., :size], coord)
    return full_F


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce_in_place(_contiguous_copy(grad), ctx.group), None


class _CopyTailToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, group: Group) -> Tensor:
        ctx.width, ctx.group = width, group
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = _contiguous_copy(grad)
        tail = _contiguous_copy(dx[..., -ctx.width :])
        dx[..., -ctx.width :] = all_reduce_in_place(tail, ctx.group)
        return dx, None, None


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce_in_place(_contiguous_copy(x), group)

    @staticmethod
    @once_differentiable
    def backward(_: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _DifferentiableAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_in_place(_contiguous_copy(x), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce_in_place(_contiguous_copy(grad), ctx.group), None


class _GatherFeatures(Function):
    @staticmethod
    def forward(ctx: Any, shard_f: Tensor, dim: ShardedDim) -> Tensor:
        ctx.dim = dim
        return all_gather_features(shard_f, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_F: Tensor) -> tuple[Tensor | None, ...]:
        grad_f = ctx.dim.shard(grad_F)
        return grad_f if ctx.dim.is_first else torch.zeros_like(grad_f), None


class _SplitFeatures(Function):
    @staticmethod
    def forward(ctx: Any, full_F: Tensor, dim: ShardedDim) -> Tensor:
        ctx.dim = dim
        return dim.shard(full_F).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_f: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_features(grad_f, ctx.dim), None


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
