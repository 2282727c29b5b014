"""Differentiable collectives of tensor parallelism.

  function                   forward     backward    use
  copy_to_group              identity    all-reduce  a replicated tensor, used differently on each rank
  reduce_from_group          all-reduce  identity    partial sums become the full value
  differentiable_all_reduce  all-reduce  all-reduce  a statistic that all ranks add to and use
  copy_ranges_to_group       identity    all-reduce  copy_to_group for some of the features
  gather                     all-gather  own shard   what follows is the same on every rank
  gather_summed              all-gather  all-reduce  what follows is different on each rank
  split                      own shard   all-gather  what precedes is the same on every rank

The first two are f and g of Megatron-LM (Shoeybi et al. 1909.08053, section 3). A group of one rank does not
communicate. On meta tensors only shapes are computed. A second derivative raises an error (torch's).

[Note: shared shards count once]
Ranks that hold the same shard (kv heads fewer than columns) hold copies of a parameter, whose gradients are
summed elsewhere. A value that is the same on every rank must therefore reach only the first copy: the
gradient of a gathered tensor, and a copy's contribution to a statistic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from plait.comm import Group, all_reduce
from plait.parallel.tensor.shards import ShardedDim, TokenShards
from plait.plan.sharding import DimSharding, Range

Sharding = ShardedDim | TokenShards  # of features, of tokens


def all_reduce_in_place(tensor: Tensor, group: Group, label: str = "") -> Tensor:
    """Sum a tensor over the group, in place. The caller holds the only reference to its values."""
    if group.size > 1:
        all_reduce(tensor, group, label=label)
        increment_version(tensor)  # autograd detects if the unreduced value was saved
    return tensor


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    return _AllReduce.apply(x, group, False, True) if group.size > 1 else x


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    return _AllReduce.apply(x, group, True, False) if group.size > 1 else x


def differentiable_all_reduce(x: Tensor, group: Group) -> Tensor:
    return _AllReduce.apply(x, group, True, True) if group.size > 1 else x


def copy_ranges_to_group(x: Tensor, ranges: Sequence[Range], group: Group) -> Tensor:
    """`copy_to_group` for some ranges of the features only."""
    return _CopyRanges.apply(x, ranges, group) if group.size > 1 and ranges else x


def gather(shard: Tensor, sharding: Sharding) -> Tensor:
    """All-gather the full tensor; backward takes the shard. See [Note: shared shards count once]."""
    return _Gather.apply(shard, sharding) if sharding.group.size > 1 else shard


def gather_summed(shard: Tensor, sharding: Sharding) -> Tensor:
    """All-gather the full tensor, which each rank uses differently; backward takes the shard of the sum."""
    return copy_to_group(_Gather.apply(shard, sharding), sharding.group) if sharding.group.size > 1 else shard


def split(full: Tensor, sharding: Sharding) -> Tensor:
    """Take this rank's shard; backward all-gathers."""
    return _Split.apply(full, sharding) if sharding.group.size > 1 else full


@dataclass(frozen=True)
class UsedFeatures:
    """The features of a layer's output that the code of a column reads: `own` ones, and ranges that all
    columns read, of which each column computes some."""

    own: ShardedDim
    used: DimSharding

    def __call__(self, y_o: Tensor) -> Tensor:
        """Return (..., features that are read) of (..., own features)."""
        shards = dict(
            zip(
                self._own_ranges,
                y_o.split([stop - start for start, stop in self._own_ranges], -1),
                strict=True,
            )
        )
        shared, sizes = self._shared, [stop - start for start, stop in self._shared]
        own = torch.cat(
            [shard for (start, _), shard in shards.items() if _position(start, shared) is not None], -1
        )
        full = dict(zip(shared, gather_summed(own, self._gathered).split(sizes, -1), strict=True))
        return torch.cat([full[r] if r in full else shards[r] for r in self.used.ranges[self.own.coord]], -1)

    @cached_property
    def _own_ranges(self) -> tuple[Range, ...]:
        return self.own.sharding.ranges[self.own.coord]

    @cached_property
    def _shared(self) -> tuple[Range, ...]:
        """The ranges that every column reads."""
        first, *others = self.used.ranges
        return tuple(found for found in first if all(found in ranges for ranges in others))

    @cached_property
    def _gathered(self) -> ShardedDim:
        """How the columns shard these, put one after another."""
        ranges = tuple(
            tuple(
                (at, at + stop - start)
                for start, stop in own
                if (at := _position(start, self._shared)) is not None
            )
            for own in self.own.sharding.ranges
        )
        return ShardedDim(DimSharding(self.own.sharding.axis, ranges), self.own.group)


def _position(feature: int, ranges: tuple[Range, ...]) -> int | None:
    """The position of a feature in concatenated ranges; None if it is in none of them."""
    position = 0
    for start, stop in ranges:
        if start <= feature < stop:
            return position + feature - start
        position += stop - start
    return None


class _AllReduce(Function):
    """All-reduce in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_forward: bool, in_backward: bool) -> Tensor:
        ctx.group, ctx.in_backward = group, in_backward
        return all_reduce_in_place(_contiguous_copy(x), group) if in_forward else x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = all_reduce_in_place(_contiguous_copy(grad), ctx.group) if ctx.in_backward else grad
        return dx, None, None, None


class _CopyRanges(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Sequence[Range], group: Group) -> Tensor:
        ctx.ranges, ctx.group = ranges, group
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = _contiguous_copy(grad)
        parts = [dx[..., start:stop] for start, stop in ctx.ranges]
        summed = all_reduce_in_place(torch.cat(parts, -1), ctx.group, "gradient of shared features")
        for part, values in zip(parts, summed.split([part.shape[-1] for part in parts], -1), strict=True):
            part.copy_(values)
        return dx, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.all_gather(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own_grad = ctx.sharding.shard(grad)
        return own_grad if ctx.sharding.is_first else torch.zeros_like(own_grad), None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return _contiguous_copy(sharding.shard(full))  # no view: the model may modify it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.sharding.all_gather(grad), None


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
