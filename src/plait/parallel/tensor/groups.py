"""The groups of the grid's `row` and `col` axes, and which piece of a tensor's features a rank has."""

from dataclasses import dataclass

from torch import Tensor

from plait.comm import Group
from plait.plan.sharding import DimSharding


@dataclass(frozen=True)
class TensorGroups:
    """This rank's neighbours along `row` and along `col`."""

    row: Group
    col: Group

    def along(self, axis: str) -> Group:
        return {"row": self.row, "col": self.col}[axis]


@dataclass(frozen=True)
class ShardedDim:
    """The features of a whole, their cut along an axis, and the ranks that have the pieces."""

    dim: DimSharding
    group: Group

    @property
    def place(self) -> int:
        return self.group.rank

    @property
    def whole(self) -> int:
        """Features of the whole; those that several coordinates have are counted once."""
        return max((stop for ranges in self.dim.ranges for _, stop in ranges), default=0)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first that has its piece."""
        return self.dim.sharers(self.place)[0] == self.place

    def own(self, whole: Tensor) -> Tensor:
        """This rank's features of (..., whole): a view where they lie side by side."""
        ranges = self.dim.ranges[self.place]
        parts = [whole[..., start:stop] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else _joined(parts, whole)

    def put(self, whole: Tensor, piece: Tensor, place: int) -> None:
        """Writes the features that the coordinate `place` has into (..., whole)."""
        begin = 0
        for start, stop in self.dim.ranges[place]:
            whole[..., start:stop] = piece[..., begin : begin + stop - start]
            begin += stop - start


def _joined(parts: list[Tensor], whole: Tensor) -> Tensor:
    joined = whole.new_empty(*whole.shape[:-1], sum(part.shape[-1] for part in parts))
    begin = 0
    for part in parts:
        joined[..., begin : begin + part.shape[-1]] = part
        begin += part.shape[-1]
    return joined
