"""Sums of gradients whose matrices travel as two thin factors: PowerSGD (Vogels et al. 1905.13727).

[Note: one step of a power iteration]
M_i is rank i's matrix (n x m) and what its last factors lost, M the sum of all. From Q (m x r), the same
on all ranks: P = sum of M_i Q, orthonormalised; then Q_i = M_i^T P, and P Q^T with Q = sum of Q_i is M,
projected on r directions. The Q of one step begins the next (warm start): they turn to M's largest ones.
What rank i lost is M_i - P Q_i^T: its own part, and not (as in the paper) the difference to the mean, in
which the ranks' disagreement would add up from step to step. Over the ranks both sum to the same.

Both messages are all-reduces, in which all ranks end with the same bits; what follows from them is computed
by all alike, so ranks agree as far as their processors do. Householder's QR keeps P orthonormal whatever M
is: one of lower rank, or zero, costs nothing, and no direction is lost for good.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plait.comm.collectives import Group, all_reduce
from plait.comm.transport import PartialReduceWork, ReduceWork
from plait.plan import UnitLayout
from plait.plan.compression import Matrix, factor_bytes, matrices


class PowerSGDReduce:
    """See [Note: one step of a power iteration]. What is no larger than its factors travels as it is.

    An element that is not finite makes at least its whole column so, on all ranks: whatever QR does to P, it
    stays a term in that column's row of Q.
    """

    def __init__(self, layout: UnitLayout, rank: int, group: Group, room: Tensor) -> None:
        """`room`: bytes for the first message (`plan/wire.py: factor_bytes`), shared with other units."""
        self._group = group
        self._rank = rank
        self._matrices = matrices(layout, rank)
        as_factors = {matrix.start for matrix in self._matrices}
        self._plain = [(p.start, p.stop) for p in layout.params if p.start not in as_factors]
        self._first = room[: factor_bytes(layout, rank)].view(torch.float32)
        self._residual = torch.zeros(layout.numel, dtype=torch.float32, device=room.device)
        numel = rank * sum(m.columns for m in self._matrices)
        self._right = torch.empty(numel, dtype=torch.float32, device=room.device)
        self._seed = zlib.crc32(layout.name.encode())
        self._begin()

    @property
    def kept(self) -> Sequence[Tensor]:
        return [self._residual, self._right]

    def start(self, given: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        background = self._group.background
        assert background is not None, "a group of one has nothing to compress"
        pending = background.submit(lambda: self._sum(given, own, label))
        return PartialReduceWork([given[own[0] : own[1]]], pending)

    def forget(self) -> None:
        self._residual.zero_()
        self._begin()

    def scale(self, factor: float) -> None:
        self._residual.mul_(factor)

    def _begin(self) -> None:
        """Directions that are nobody's, the same on all ranks under every plan."""
        random = torch.Generator().manual_seed(self._seed)
        self._right.copy_(torch.randn(self._right.numel(), dtype=torch.float32, generator=random))

    def _sum(self, given: Tensor, own: tuple[int, int], label: str) -> None:
        given.add_(self._residual)
        for matrix, left, right in self._factors():
            # Only directions count: without their lengths they neither overflow nor vanish.
            torch.mm(_of(matrix, given), right / right.abs().max().clamp(min=_TINY), out=left)
        self._pack(given)
        all_reduce(self._first, self._group, label=label)
        for matrix, left, right in self._factors():
            left.copy_(torch.linalg.qr(left).Q)
            mine = _of(matrix, given)
            torch.mm(mine.mT, left, out=right)
            torch.addmm(mine, left, right.mT, alpha=-1.0, out=_of(matrix, self._residual))
        all_reduce(self._right, self._group, label=label)
        for matrix, left, right in self._factors():
            rows = _rows_in(matrix, own)
            torch.mm(left[rows], right.mT, out=_of(matrix, given)[rows])
        self._unpack(given)

    def _factors(self) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Every matrix with its factors: (rows, r) in the first message and (columns, r)."""
        lefts = self._first.split([self._rank * m.rows for m in self._matrices] + [self._num_plain])
        rights = self._right.split([self._rank * m.columns for m in self._matrices])
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=False):
            yield matrix, left.view(-1, self._rank), right.view(-1, self._rank)

    @property
    def _num_plain(self) -> int:
        return sum(stop - start for start, stop in self._plain)

    def _pack(self, given: Tensor) -> None:
        """Puts what is not in factors behind them."""
        if self._plain:
            torch.cat([given[start:stop] for start, stop in self._plain], out=self._tail())

    def _unpack(self, given: Tensor) -> None:
        parts = self._tail().split([stop - start for start, stop in self._plain])
        for (start, stop), part in zip(self._plain, parts, strict=True):
            given[start:stop].copy_(part)

    def _tail(self) -> Tensor:
        return self._first[self._first.numel() - self._num_plain :]


_TINY = torch.finfo(torch.float32).tiny


def _of(matrix: Matrix, flat: Tensor) -> Tensor:
    return flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)


def _rows_in(matrix: Matrix, own: tuple[int, int]) -> slice:
    """The rows of which an element is in [start, stop) `own`."""
    first, last = (min(matrix.stop, max(matrix.start, edge)) - matrix.start for edge in own)
    return slice(first // matrix.columns, -(-last // matrix.columns))
