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
from functools import partial

import torch
from torch import Tensor

from plait.comm.collectives import Group, all_reduce
from plait.comm.compression import start_compressed
from plait.comm.transport import ReduceWork
from plait.plan.compression import Factors, Matrix


class PowerSGDReduce:
    """See [Note: power iteration step]. Tensors no larger than their factors are sent uncompressed.

    A non-finite element makes at least its entire column non-finite, on all ranks: whatever QR does to P, it
    remains a term in that column's row of Q.
    """

    def __init__(
        self, name: str, numel: int, factors: Factors, group: Group, scratch: Tensor, uncompressed: int = 0
    ) -> None:
        """`name`: seeds the right factors. `scratch`: of `Factors.left_bytes`, shared by the group's sums.
        `uncompressed`: number of initial sums that are not compressed, while the gradient changes fast."""
        self._uncompressed = uncompressed
        self._group = group
        self._factors = factors
        self._message = scratch[: factors.left_bytes].view(torch.float32)
        self._residual = torch.zeros(numel, dtype=torch.float32, device=scratch.device)
        self._right = torch.empty(factors.right_numel, dtype=torch.float32, device=scratch.device)
        self._seed = zlib.crc32(name.encode())
        self._init_right()

    @property
    def state(self) -> Sequence[Tensor]:
        return [self._residual, self._right]

    def start(self, tensor: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        return start_compressed(partial(self._sum, tensor, own, label), tensor[own[0] : own[1]], self._group)

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
        if self._uncompressed:
            self._uncompressed -= 1
            all_reduce(tensor, self._group, label=label)
            return
        tensor.add_(self._residual)
        for matrix, left, right in self._terms():
            # Only the directions matter: normalized, they neither overflow nor vanish.
            torch.mm(_view(matrix, tensor), right / right.abs().max().clamp(min=_TINY), out=left)
        *_, tail = self._lefts()
        ranges = [tensor[start:stop] for start, stop in self._factors.uncompressed]
        if ranges:
            torch.cat(ranges, out=tail)
        all_reduce(self._message, self._group, label=label)
        for matrix, left, right in self._terms():
            left.copy_(torch.linalg.qr(left).Q)
            matrix_view = _view(matrix, tensor)
            torch.mm(matrix_view.mT, left, out=right)
            torch.addmm(matrix_view, left, right.mT, alpha=-1.0, out=_view(matrix, self._residual))
        all_reduce(self._right, self._group, label=label)
        for matrix, left, right in self._terms():
            rows = _rows_in(matrix, own)
            torch.mm(left[rows], right.mT, out=_view(matrix, tensor)[rows])
        for range_, summed in zip(ranges, tail.split([r.numel() for r in ranges]), strict=True):
            range_.copy_(summed)

    def _lefts(self) -> Sequence[Tensor]:
        """The parts of the first message: left factors, then all uncompressed tensors."""
        sizes = [self._factors.rank * matrix.rows for matrix in self._factors.matrices]
        return self._message.split([*sizes, self._message.numel() - sum(sizes)])

    def _terms(self) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Every matrix with its factors: (rows, r) and (columns, r)."""
        rank, matrices = self._factors.rank, self._factors.matrices
        rights = self._right.split([rank * matrix.columns for matrix in matrices])
        for matrix, left, right in zip(matrices, self._lefts(), rights, strict=False):
            yield matrix, left.view(-1, rank), right.view(-1, rank)


_TINY = torch.finfo(torch.float32).tiny


def _view(matrix: Matrix, flat: Tensor) -> Tensor:
    return flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)


def _rows_in(matrix: Matrix, own: tuple[int, int]) -> slice:
    """The rows with an element in [start, stop) `own`."""
    first, last = (min(matrix.stop, max(matrix.start, edge)) - matrix.start for edge in own)
    return slice(first // matrix.columns, -(-last // matrix.columns))
