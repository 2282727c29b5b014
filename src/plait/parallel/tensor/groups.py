"""The process groups of the grid's `row` and `col` axes, and this rank's shard of a feature dim.

# F features of the full tensor;  f = this rank's
"""

from dataclasses import dataclass

from torch import Tensor

from plait.comm import Group
from plait.plan.sharding import DimSharding


@dataclass(frozen=True)
class TensorGroups:
    """This rank's process groups along `row` and `col`."""

    row: Group
    col: Group

    def along(self, axis: str) -> Group:
        """Return the group of an axis, "row" or "col"."""
        return {"row": self.row, "col": self.col}[axis]


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
        ranges = self.sharding.ranges[self.coord]
        slices = [full_F[..., start:stop] for start, stop in ranges]
        return slices[0] if len(slices) == 1 else _concatenated(slices, full_F)

    def write(self, full_F: Tensor, shard_f: Tensor, coord: int) -> None:
        """Copy the shard of coordinate `coord` to its features of (..., F)."""
        begin = 0
        for start, stop in self.sharding.ranges[coord]:
            full_F[..., start:stop] = shard_f[..., begin : begin + stop - start]
            begin += stop - start


def _concatenated(slices: list[Tensor], full_F: Tensor) -> Tensor:
    out_f = full_F.new_empty(*full_F.shape[:-1], sum(part.shape[-1] for part in slices))
    begin = 0
    for part in slices:
        out_f[..., begin : begin + part.shape[-1]] = part
        begin += part.shape[-1]
    return out_f
