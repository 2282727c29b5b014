"""The process groups of the grid's `row` and `col` axes, and this rank's shard of a feature dim.

# F features of the full tensor;  f = this rank's
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, all_gather
from plait.plan.axes import FEATURES, HIDDEN
from plait.plan.sharding import DimSharding


@dataclass(frozen=True)
class TensorGroups:
    """This rank's process groups along `row` and `col`."""

    row: Group
    col: Group

    def along(self, axis: str) -> Group:
        """Return the group of an axis, HIDDEN or FEATURES."""
        return {HIDDEN: self.row, FEATURES: self.col}[axis]


@dataclass(frozen=True)
class ShardedDim:
    """A feature dim sharded along an axis, and the group of the ranks that hold the shards."""

    sharding: DimSharding
    group: Group

    @property
    def coord(self) -> int:
        return self.group.rank

    @property
    def full_size(self) -> int:
        """Features of the full tensor; those that several coordinates hold count once."""
        return max((stop for ranges in self.sharding.ranges for _, stop in ranges), default=0)

    @property
    def is_first(self) -> bool:
        """True on the first of the ranks that hold this shard."""
        return self.sharding.sharers(self.coord)[0] == self.coord

    def shard(self, full_F: Tensor) -> Tensor:
        """Return this rank's features of (..., F), shape (..., f): a view where they are one range."""
        slices = [full_F[..., start:stop] for start, stop in self.sharding.ranges[self.coord]]
        return slices[0] if len(slices) == 1 else torch.cat([full_F[..., :0], *slices], -1)

    def all_gather(self, shard_f: Tensor) -> Tensor:
        """All-gather (..., f) of every rank to (..., F), without a graph. Uneven shards are padded."""
        full_F = shard_f.new_empty(*shard_f.shape[:-1], self.full_size)
        buffer = shard_f.new_empty(self.group.size, *shard_f.shape[:-1], max(self.sharding.sizes))
        own = buffer[self.coord]
        own[..., : shard_f.shape[-1]] = shard_f
        own[..., shard_f.shape[-1] :] = 0
        all_gather(buffer.view(-1), own.view(-1), self.group, label="features")
        for ranges, padded in zip(self.sharding.ranges, buffer, strict=True):
            begin = 0
            for start, stop in ranges:
                full_F[..., start:stop] = padded[..., begin : begin + stop - start]
                begin += stop - start
        return full_F
