"""Gradient reductions with low-rank compression: PowerSGD (Vogels et al. 1905.13727).

[Note: power iteration step]
M_i is rank i's matrix (n x m) plus the error of its last factors, M the sum of all. From Q (m x r), the same
on all ranks: P = sum of M_i Q, orthonormalised; then Q_i = M_i^T P, and P Q^T with Q = sum of Q_i is M,
projected on r directions. The Q of one step starts the next (warm start): they converge to M's largest ones.
The error of rank i is M_i - P Q_i^T: its own part, and not (as in the paper) the difference to the mean, in
which the ranks' disagreement would accumulate from step to step. Over the ranks both sum to the same.

Both messages are all-reduces, in which all ranks get the same bits; all ranks compute the same from them, so
they agree as far as their processors do. Householder's QR keeps P orthonormal whatever M is: one of lower
rank, or zero, does no harm, and no direction is lost for good.
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
    """See [Note: power iteration step]. Tensors no larger than their factors are sent uncompressed.

    A non-finite element makes at least its whole column non-finite, on all ranks: whatever QR does to P, it
    remains a term in that column's row of Q.
    """

    def __init__(self, layout: UnitLayout, rank: int, group: Group, scratch: Tensor) -> None:
        """`scratch`: bytes for the first message (`plan/compression.py: factor_bytes`), shared by units."""
        self._group = group
        self._rank = rank
        self._matrices = matrices(layout, rank)
        factorized = {matrix.start for matrix in self._matrices}
        self._uncompressed = [(p.start, p.stop) for p in layout.params if p.start not in factorized]
        self._message = scratch[: factor_bytes(layout, rank)].view(torch.float32)
        self._residual = torch.zeros(layout.numel, dtype=torch.float32, device=scratch.device)
        numel = rank * sum(m.columns for m in self._matrices)
        self._right = torch.empty(numel, dtype=torch.float32, device=scratch.device)
        self._seed = zlib.crc32(layout.name.encode())
        self._init_right()

    @property
    def state(self) -> Sequence[Tensor]:
        return [self._residual, self._right]

    def start(self, tensor: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        comm_thread = self._group.comm_thread
        assert comm_thread is not None, "a group of one has nothing to compress"
        work = comm_thread.submit(lambda: self._sum(tensor, own, label))
        return PartialReduceWork([tensor[own[0] : own[1]]], work)

    def discard(self) -> None:
        self._residual.zero_()
        self._init_right()

    def scale(self, factor: float) -> None:
        self._residual.mul_(factor)

    def _init_right(self) -> None:
        """Initialize Q with random directions, the same on all ranks under every plan."""
        random = torch.Generator().manual_seed(self._seed)
        self._right.copy_(torch.randn(self._right.numel(), dtype=torch.float32, generator=random))

    def _sum(self, tensor: Tensor, own: tuple[int, int], label: str) -> None:
        tensor.add_(self._residual)
        for matrix, left, right in self._factors():
            # Only the directions matter: normalized, they neither overflow nor vanish.
            torch.mm(_view(matrix, tensor), right / right.abs().max().clamp(min=_TINY), out=left)
        self._pack(tensor)
        all_reduce(self._message, self._group, label=label)
        for matrix, left, right in self._factors():
            left.copy_(torch.linalg.qr(left).Q)
            matrix_view = _view(matrix, tensor)
            torch.mm(matrix_view.mT, left, out=right)
            torch.addmm(matrix_view, left, right.mT, alpha=-1.0, out=_view(matrix, self._residual))
        all_reduce(self._right, self._group, label=label)
        for matrix, left, right in self._factors():
            rows = _rows_in(matrix, own)
            torch.mm(left[rows], right.mT, out=_view(matrix, tensor)[rows])
        self._unpack(tensor)

    def _factors(self) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Every matrix with its factors: (rows, r) in the first message and (columns, r)."""
        lefts = self._message.split([self._rank * m.rows for m in self._matrices] + [self._num_uncompressed])
        rights = self._right.split([self._rank * m.columns for m in self._matrices])
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=False):
            yield matrix, left.view(-1, self._rank), right.view(-1, self._rank)

    @property
    def _num_uncompressed(self) -> int:
        return sum(stop - start for start, stop in self._uncompressed)

    def _pack(self, tensor: Tensor) -> None:
        """Append the uncompressed tensors to the factors in the message."""
        if self._uncompressed:
            torch.cat([tensor[start:stop] for start, stop in self._uncompressed], out=self._tail())

    def _unpack(self, tensor: Tensor) -> None:
        tails = self._tail().split([stop - start for start, stop in self._uncompressed])
        for (start, stop), tail in zip(self._uncompressed, tails, strict=True):
            tensor[start:stop].copy_(tail)

    def _tail(self) -> Tensor:
        return self._message[self._message.numel() - self._num_uncompressed :]


_TINY = torch.finfo(torch.float32).tiny


def _view(matrix: Matrix, flat: Tensor) -> Tensor:
    return flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)


def _rows_in(matrix: Matrix, own: tuple[int, int]) -> slice:
    """The rows with an element in [start, stop) `own`."""
    first, last = (min(matrix.stop, max(matrix.start, edge)) - matrix.start for edge in own)
    return slice(first // matrix.columns, -(-last // matrix.columns))
