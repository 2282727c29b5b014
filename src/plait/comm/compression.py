"""Sums of gradients that travel in a code: fewer bytes, added up in float32.

[Note: codes to the owners and back]
Each rank owns a range of what is summed. Every rank sends every owner its range, in code; the owner reads
the codes and adds them up in float32, in rank order, its own numbers as they are: an all-to-all, (p-1)/p of
the codes. Where everybody needs everything the owner writes the sum in code and an all-gather brings it to
all, as much again: everyone, the owner too, reads the same codes, so all ranks end with the same bits.

[Note: what a code loses comes back]
Rounding to 8 bits is biased against whatever is small in its block. What a rank's codes lost is added to its
next contribution (error feedback: Seide et al. 2014; Karimireddy et al. 1901.09847), so it arrives later
instead of never. Ranges for others lose when contributions are written; the own range loses only when the
owner writes the sum, and adding that to its own next contribution adds it to the next sum. So one tensor of
residuals has room for both. A step that is skipped throws its gradient away: `forget` throws away what is
left of it (which may be NaN) too.

Codes that numbers travel in: float32 blocks to bytes and back. B blocks, K = BLOCK elements.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor

from plait.comm.collectives import Group, all_gather, all_to_all, empty, start_exchange
from plait.comm.transport import PartialReduceWork, ReduceWork
from plait.plan.compression import BLOCK, BLOCK_BYTES, blocks_per_rank

_LARGEST_HALF = 65504.0
_LEVELS = 127.0  # of an 8-bit code, to either side of zero
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # a smaller one has too few bits to divide by


class Codec(Protocol):
    """How blocks of float32 are written and read. A block with NaN or infinity is read as one with some."""

    block_bytes: int
    error_feedback: bool  # what is lost is worth keeping for the next time

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        """`codes`: bytes, (B, block_bytes)."""

    def read(self, codes: Tensor, out_BK: Tensor) -> None: ...


class Fp16Codec:
    """float16. What is too large for it becomes its largest number; infinity and NaN stay what they are.

    So an element of one rank's gradient counts as 65504 at most, and the step is taken; a gradient that is
    not finite where it comes from still has its step skipped. What is below 6e-8 counts as zero or as that.
    """

    block_bytes = BLOCK_BYTES["fp16"]
    error_feedback = False

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        clamped = values_BK.clamp(-_LARGEST_HALF, _LARGEST_HALF)
        codes.view(torch.float16).copy_(torch.where(values_BK.isinf(), values_BK, clamped))

    def read(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes.view(torch.float16))


class Bf16Codec:
    """bfloat16: 8 bits of every number, whatever its size."""

    block_bytes = BLOCK_BYTES["bf16"]
    error_feedback = False

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        codes.view(torch.bfloat16).copy_(values_BK)

    def read(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes.view(torch.bfloat16))


class Int8Codec:
    """8-bit codes under one float32 scale per block, its largest absolute value / 127 (1-bit and 8-bit block
    schemes as in Dettmers 1511.04561 and ZeRO++ 2306.10209): off by absmax / 254 at most.

    A block with NaN or infinity is NaN in all of its elements. What exceeds 3.4e38 may be read as infinite.
    """

    block_bytes = BLOCK_BYTES["int8"]
    error_feedback = True

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        absmax_B1 = values_BK.abs().amax(1, keepdim=True)
        absmax_B1.masked_fill_(absmax_B1.isinf(), torch.nan)
        scales_B1 = absmax_B1.div_(_LEVELS).clamp_(min=_LEAST_SCALE)
        codes[:, BLOCK:].view(torch.float32).copy_(scales_B1)
        rounded_BK = values_BK.div(scales_B1).round_().nan_to_num_(0.0, 0.0, 0.0)
        codes[:, :BLOCK].view(torch.int8).copy_(rounded_BK)

    def read(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes[:, :BLOCK].view(torch.int8))
        out_BK.mul_(codes[:, BLOCK:].view(torch.float32))


CODECS: dict[str, Codec] = {"bf16": Bf16Codec(), "fp16": Fp16Codec(), "int8": Int8Codec()}


_RUN = 512  # blocks that are worked on at a time: half a megabyte of float32 stays in a core's cache


class Compressor(Protocol):
    """How one unit's gradient is summed over the ranks of a group; one per unit, used on all of them in one
    order. `kept`: what lives from sum to sum; first, element by element, what was lost on the way, if it is
    kept."""

    @property
    def kept(self) -> Sequence[Tensor]: ...

    def start(self, given: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        """Sums the ranks' flat float32 `given`, of which this rank gets [start, stop) `own`.

        `given` is in use, and is overwritten, until `ReduceWork.into` is through. Errors come up in `into`.
        """

    def forget(self) -> None:
        """Begins anew: what was kept belongs to a gradient that was thrown away. Nothing may be under way."""

    def scale(self, factor: float) -> None:
        """From now on contributions are `factor` times what they were."""


class CompressedReduce:
    """See [Note: codes to the owners and back]."""

    def __init__(self, numel: int, group: Group, code: Codec, room: Tensor) -> None:
        """`room`: bytes for messages (`plan/wire.py: code_bytes`), shared with the group's other sums."""
        assert numel % BLOCK == 0, f"{numel} elements in blocks of {BLOCK}"
        self._group = group
        self._code = code
        self._residual = torch.zeros(
            numel if code.error_feedback else 0, dtype=torch.float32, device=room.device
        )
        each = blocks_per_rank(numel, group.size)
        self._ranges = [
            slice(min(numel, place * each * BLOCK), min(numel, (place + 1) * each * BLOCK))
            for place in range(group.size)
        ]
        shape = (2, group.size, each, code.block_bytes)
        mine, theirs = room[: 2 * group.size * each * code.block_bytes].view(shape)
        self._mine, self._theirs = mine, theirs  # by place in the group

    @property
    def kept(self) -> Sequence[Tensor]:
        return [self._residual]

    def start(self, given: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        scattered = own[1] - own[0] < given.numel()
        background = self._group.background
        assert background is not None, "a group of one has nothing to compress"
        pending = background.submit(lambda: self._sum(given, scattered, label))
        return PartialReduceWork([given[own[0] : own[1]]], pending)

    def forget(self) -> None:
        self._residual.zero_()

    def scale(self, factor: float) -> None:
        self._residual.mul_(factor)

    def _sum(self, given: Tensor, scattered: bool, label: str) -> None:
        place = self._group.rank
        if self._code.error_feedback:
            given.add_(self._residual)
        for other, part in enumerate(self._ranges):
            if other != place:
                self._write(given[part], self._mine[other], self._lost(part))
        all_to_all(self._theirs.flatten(), self._mine.flatten(), self._group, label=label)
        own = self._ranges[place]
        self._add_up(given[own])
        if scattered:
            return
        self._write(given[own], self._mine[place], self._lost(own))
        all_gather(self._mine.flatten(), self._mine[place].flatten(), self._group, label=label)
        for other, part in enumerate(self._ranges):
            for run, codes in self._runs(given[part], self._mine[other]):
                self._code.read(codes, run)

    def _lost(self, part: slice) -> Tensor | None:
        return self._residual[part] if self._code.error_feedback else None

    def _write(self, values: Tensor, codes: Tensor, lost: Tensor | None) -> None:
        """`lost`: where what the code cannot say goes."""
        runs = self._runs(values, codes)
        lost_runs = repeat(None) if lost is None else (left for left, _ in self._runs(lost, codes))
        for (run, run_codes), left in zip(runs, lost_runs, strict=False):
            self._code.write(run, run_codes)
            if left is not None:
                self._code.read(run_codes, left)
                torch.sub(run, left, out=left)

    def _add_up(self, own: Tensor) -> None:
        """Leaves in `own`, this rank's contribution, the sum of all, in rank order."""
        runs = [self._runs(own, codes) for codes in self._theirs]
        scratch = torch.empty(2, *runs[0][0][0].shape, dtype=torch.float32, device=own.device)
        for parts in zip(*runs, strict=True):
            mine = parts[0][0]
            total, term = scratch[:, : len(mine)]
            for other, (_, codes) in enumerate(parts):
                into = term if other else total
                if other == self._group.rank:
                    into.copy_(mine)
                else:
                    self._code.read(codes, into)
                if other:
                    total.add_(term)
            mine.copy_(total)

    def _runs(self, values: Tensor, codes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Blocks of numbers with their codes, in runs that stay in cache."""
        values_BK = values.view(-1, BLOCK)
        length = max(1, len(values_BK)) if values.is_cuda else _RUN
        return list(zip(values_BK.split(length), codes[: len(values_BK)].split(length), strict=True))


class NarrowReduce:
    """Contributions travel whole, in a narrower dtype, and every rank adds all of them up in float32.

    Where `sends_narrow` says so: see [Note: narrow tensors on the wire, wide sums] in `torch_link.py`.
    """

    def __init__(self, numel: int, group: Group, narrow: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._narrow = empty(numel, narrow, device, group)

    @property
    def kept(self) -> Sequence[Tensor]:
        return []

    def start(self, given: Tensor, own: tuple[int, int], *, label: str = "") -> ReduceWork:
        background = self._group.background
        assert background is not None, "a group of one has nothing to compress"
        pending = background.submit(lambda: self._sum(given, label))
        return PartialReduceWork([given[own[0] : own[1]]], pending)

    def forget(self) -> None:
        """Nothing is kept."""

    def scale(self, factor: float) -> None:
        """Nothing is kept."""

    def _sum(self, given: Tensor, label: str) -> None:
        self._narrow.copy_(given)
        summing = start_exchange(self._narrow, self._group, label=label)
        for _ in summing.into(given):
            pass
        summing.release()
