"""Compressed gradient reductions: fewer bytes on the wire, sums in float32.

Codecs: float32 blocks to bytes and back. B blocks, K = BLOCK elements.

[Note: reduction of compressed ranges]
Each rank owns a range of the sum. Every rank sends every owner its range, encoded; the owner decodes and adds
in float32, in rank order, its own numbers uncompressed: an all-to-all, (p-1)/p of the codes. Where all ranks
need the sum, the owner encodes it and an all-gather distributes it, as many bytes again: all ranks, the owner
too, decode the same codes and so get the same bits.

[Note: two messages]
A range of some size is sent in two messages, so that the link is busy while codes are made and added: the
second is encoded while the first is sent, and the first sum is encoded and sent while the second arrives.

[Note: error feedback]
Rounding to 8 bits is biased against small elements of a block. What a rank's codes lost is added to its next
contribution (error feedback: Seide et al. 2014; Karimireddy et al. 1901.09847), so it arrives later instead
of never. Ranges of other owners lose when contributions are encoded; the own range loses only when the owner
encodes the sum, and adding that to its own next contribution adds it to the next sum. So one residual tensor
serves both. A skipped step discards its gradient: `discard` clears its residual (which may be NaN) too.

[Note: power iteration step]
Low-rank compression (PowerSGD, Vogels et al. 1905.13727). M_i is rank i's matrix (n x m) plus the error of
its last factors, M the sum of all. From Q (m x r), the same on all ranks: P = sum of M_i Q, orthonormalised;
then Q_i = M_i^T P, and P Q^T with Q = sum of Q_i is M, projected on r directions. The Q of one step starts
the next (warm start): they converge to M's largest ones. The error of rank i is M_i - P Q_i^T: its own part,
and not (as in the paper) the difference to the mean, in which the ranks' disagreement would accumulate from
step to step. Over the ranks both sum to the same.

Both messages are all-reduces, in which all ranks get the same bits; all ranks compute the same from them, so
they agree as far as their processors do. Householder's QR keeps P orthonormal whatever M is: one of lower
rank, or zero, does no harm, and no direction is lost for good.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor

from plait.comm.collectives import (
    Group,
    all_reduce,
    empty,
    start_all_gather,
    start_all_to_all,
    start_exchange,
)
from plait.comm.transport import PartialReduceWork, ReduceWork
from plait.plan.compression import BLOCK, BLOCK_BYTES, Factors, Matrix, blocks_per_rank, message_blocks

_MAX_FP16 = 65504.0
_LEVELS = 127.0  # of an 8-bit code, on either side of zero
_MIN_SCALE = torch.finfo(torch.float32).tiny  # smaller ones are denormal


class Codec(Protocol):
    """Encodes and decodes blocks of float32. A block with NaN or infinity decodes to one with some."""

    block_bytes: int
    error_feedback: bool  # the error of the encoding is added to the next contribution

    def encode(self, values_BK: Tensor, codes: Tensor) -> None:
        """Encode. `codes`: bytes, (B, block_bytes)."""

    def decode(self, codes: Tensor, out_BK: Tensor) -> None: ...


class Fp16Codec:
    """float16, clamped to its largest finite number; infinity and NaN are preserved.

    So an element of one rank's gradient counts as 65504 at most, and the step is taken; a gradient that is
    not finite on a rank still skips the step. Magnitudes below 6e-8 become zero or 6e-8.
    """

    block_bytes = BLOCK_BYTES["fp16"]
    error_feedback = False

    def encode(self, values_BK: Tensor, codes: Tensor) -> None:
        clamped = values_BK.clamp(-_MAX_FP16, _MAX_FP16)
        codes.view(torch.float16).copy_(torch.where(values_BK.isinf(), values_BK, clamped))

    def decode(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes.view(torch.float16))


class Bf16Codec:
    """bfloat16: 8 significant bits, whatever the magnitude."""

    block_bytes = BLOCK_BYTES["bf16"]
    error_feedback = False

    def encode(self, values_BK: Tensor, codes: Tensor) -> None:
        codes.view(torch.bfloat16).copy_(values_BK)

    def decode(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes.view(torch.bfloat16))


class Int8Codec:
    """8-bit codes with one float32 scale per block, its largest absolute value / 127 (1-bit and 8-bit block
    schemes as in Dettmers 1511.04561 and ZeRO++ 2306.10209): error of absmax / 254 at most.

    A block with NaN or infinity decodes to all NaN. Magnitudes above 3.4e38 may decode as infinite.
    """

    block_bytes = BLOCK_BYTES["int8"]
    error_feedback = True

    def encode(self, values_BK: Tensor, codes: Tensor) -> None:
        absmax_B1 = values_BK.abs().amax(1, keepdim=True)
        absmax_B1.masked_fill_(absmax_B1.isinf(), torch.nan)
        scales_B1 = absmax_B1.div_(_LEVELS).clamp_(min=_MIN_SCALE)
        codes[:, BLOCK:].view(torch.float32).copy_(scales_B1)
        rounded_BK = values_BK.div(scales_B1).round_().nan_to_num_(0.0, 0.0, 0.0)
        codes[:, :BLOCK].view(torch.int8).copy_(rounded_BK)

    def decode(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes[:, :BLOCK].view(torch.int8))
        out_BK.mul_(codes[:, BLOCK:].view(torch.float32))


CODECS: dict[str, Codec] = {"bf16": Bf16Codec(), "fp16": Fp16Codec(), "int8": Int8Codec()}


_CHUNK_BLOCKS = 512  # blocks per chunk: half a megabyte of float32 stays in a core's cache


class Compressor(Protocol):
    """Sums one unit's gradient over the ranks of a group; one per unit, used on all ranks in one order.
    `state`: tensors that persist from sum to sum; the first is the residual by element, if there is error
    feedback."""

    @property
    def state(self) -> Sequence[Tensor]: ...

    def start(self, tensor: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        """Sum the ranks' flat float32 `tensor`; this rank gets the range [start, stop) `own`.

        `tensor` is in use, and is overwritten, until `ReduceWork.into` is exhausted. Errors are raised by
        `into`.
        """

    def discard(self) -> None:
        """Reset the state: its gradient was discarded. No sum may be in progress."""

    def scale(self, factor: float) -> None:
        """Multiply the state by `factor`, as all further contributions are."""


def start_compressed(run: Callable[[], None], result: Tensor, group: Group) -> ReduceWork:
    """Run a compressed sum on the group's comm thread, which leaves it in `result`."""
    assert group.comm_thread is not None, "a group of one has nothing to compress"
    return PartialReduceWork([result], group.comm_thread.submit(run))


@dataclass(frozen=True)
class _Message:
    """Ranges of elements, one of each rank's part of the sum, and their codes, by group rank."""

    ranges: Sequence[slice]
    sent: Tensor
    received: Tensor


class CompressedReduce:
    """See [Note: reduction of compressed ranges]."""

    def __init__(self, numel: int, group: Group, codec: Codec, scratch: Tensor) -> None:
        """`scratch`: bytes for messages (`plan/compression.py: code_bytes`), shared by the group's sums."""
        assert numel % BLOCK == 0, f"{numel} elements in blocks of {BLOCK}"
        self._group = group
        self._codec = codec
        self._residual = torch.zeros(
            numel if codec.error_feedback else 0, dtype=torch.float32, device=scratch.device
        )
        num_blocks = blocks_per_rank(numel, group.size)
        self._messages: list[_Message] = []
        first = 0
        for num in message_blocks(num_blocks):
            starts = [min(numel, (rank * num_blocks + first) * BLOCK) for rank in range(group.size)]
            ranges = [slice(start, min(numel, start + num * BLOCK)) for start in starts]
            shape = (2, group.size, num, codec.block_bytes)
            self._messages.append(_Message(ranges, *scratch[: math.prod(shape)].view(shape)))
            first, scratch = first + num, scratch[math.prod(shape) :]

    @property
    def state(self) -> Sequence[Tensor]:
        return [self._residual]

    def start(self, tensor: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        scattered = own[1] - own[0] < tensor.numel()
        run = partial(self._sum, tensor, scattered, label)
        return start_compressed(run, tensor[own[0] : own[1]], self._group)

    def discard(self) -> None:
        self._residual.zero_()

    def scale(self, factor: float) -> None:
        self._residual.mul_(factor)

    def _sum(self, tensor: Tensor, scattered: bool, label: str) -> None:
        rank = self._group.rank
        if self._codec.error_feedback:
            tensor.add_(self._residual)
        scatters, gathers = [], []
        for message in self._messages:  # see [Note: two messages]
            for other, range_ in enumerate(message.ranges):
                if other != rank:
                    self._encode(tensor[range_], message.sent[other], self._residual_of(range_))
            sent, received = message.sent.flatten(), message.received.flatten()
            scatters.append(start_all_to_all(received, sent, self._group, label=label))
        for message, scatter in zip(self._messages, scatters, strict=True):
            scatter.wait()
            own, codes = message.ranges[rank], message.sent[rank]
            self._add_all(tensor[own], message.received)
            if not scattered:
                self._encode(tensor[own], codes, self._residual_of(own))
                sent = message.sent.flatten()
                gathers.append(start_all_gather(sent, codes.flatten(), self._group, label=label))
        for message, gather in zip(self._messages, gathers, strict=False):
            gather.wait()
            for range_, codes in zip(message.ranges, message.sent, strict=True):
                for chunk, chunk_codes in self._chunks(tensor[range_], codes):
                    self._codec.decode(chunk_codes, chunk)

    def _residual_of(self, range_: slice) -> Tensor | None:
        return self._residual[range_] if self._codec.error_feedback else None

    def _encode(self, values: Tensor, codes: Tensor, lost: Tensor | None) -> None:
        """`lost`: receives the error of the encoding."""
        chunks = self._chunks(values, codes)
        lost_chunks = (
            repeat(None) if lost is None else (chunk_lost for chunk_lost, _ in self._chunks(lost, codes))
        )
        for (chunk, chunk_codes), chunk_lost in zip(chunks, lost_chunks, strict=False):
            self._codec.encode(chunk, chunk_codes)
            if chunk_lost is not None:
                self._codec.decode(chunk_codes, chunk_lost)
                torch.sub(chunk, chunk_lost, out=chunk_lost)

    def _add_all(self, own: Tensor, received: Tensor) -> None:
        """Replace `own`, this rank's contribution, by the sum of all, in rank order."""
        chunks = [self._chunks(own, codes) for codes in received]
        scratch = torch.empty(2, *chunks[0][0][0].shape, dtype=torch.float32, device=own.device)
        for terms in zip(*chunks, strict=True):
            own_chunk = terms[0][0]
            total, term = scratch[:, : len(own_chunk)]
            for other, (_, codes) in enumerate(terms):
                into = term if other else total
                if other == self._group.rank:
                    into.copy_(own_chunk)
                else:
                    self._codec.decode(codes, into)
                if other:
                    total.add_(term)
            own_chunk.copy_(total)

    def _chunks(self, values: Tensor, codes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Blocks of numbers with their codes, in chunks that stay in cache."""
        values_BK = values.view(-1, BLOCK)
        length = max(1, len(values_BK)) if values.is_cuda else _CHUNK_BLOCKS
        return list(zip(values_BK.split(length), codes[: len(values_BK)].split(length), strict=True))


class NarrowReduce:
    """Sends full contributions in a narrower dtype; every rank adds all of them in float32.

    Used where `sends_narrow` is true: see [Note: narrow messages, wide sums] in `torch_transport.py`.
    """

    def __init__(self, numel: int, group: Group, narrow: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._narrow = empty(numel, narrow, device, group)

    @property
    def state(self) -> Sequence[Tensor]:
        return []

    def start(self, tensor: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        return start_compressed(partial(self._sum, tensor, label), tensor[own[0] : own[1]], self._group)

    def discard(self) -> None:
        """Do nothing: there is no state."""

    def scale(self, factor: float) -> None:
        """Do nothing: there is no state."""

    def _sum(self, tensor: Tensor, label: str) -> None:
        self._narrow.copy_(tensor)
        work = start_exchange(self._narrow, self._group, label=label)
        for _ in work.into(tensor):
            pass
        work.release()


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
            torch.mm(_view(matrix, tensor), right / right.abs().max().clamp(min=_MIN_SCALE), out=left)
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


def _view(matrix: Matrix, flat: Tensor) -> Tensor:
    return flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)


def _rows_in(matrix: Matrix, own: tuple[int, int]) -> slice:
    """The rows with an element in [start, stop) `own`."""
    first, last = (min(matrix.stop, max(matrix.start, edge)) - matrix.start for edge in own)
    return slice(first // matrix.columns, -(-last // matrix.columns))
