"""Codes that numbers travel in: float32 blocks to bytes and back. B blocks, K = BLOCK elements."""

from typing import Protocol

import torch
from torch import Tensor

from plait.plan.wire import BLOCK, BLOCK_BYTES

_LARGEST_HALF = 65504.0
_LEVELS = 127.0  # of an 8-bit code, to either side of zero
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # a smaller one has too few bits to divide by


class Code(Protocol):
    """How blocks of float32 are written and read. A block with NaN or infinity is read as one with some."""

    block_bytes: int
    feeds_back: bool  # what is lost is worth keeping for the next time

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        """`codes`: bytes, (B, block_bytes)."""

    def read(self, codes: Tensor, out_BK: Tensor) -> None: ...


class Halves:
    """float16. What is too large for it becomes its largest number; infinity and NaN stay what they are.

    So an element of one rank's gradient counts as 65504 at most, and the step is taken; a gradient that is
    not finite where it comes from still has its step skipped. What is below 6e-8 counts as zero or as that.
    """

    block_bytes = BLOCK_BYTES["fp16"]
    feeds_back = False

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        clamped = values_BK.clamp(-_LARGEST_HALF, _LARGEST_HALF)
        codes.view(torch.float16).copy_(torch.where(values_BK.isinf(), values_BK, clamped))

    def read(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes.view(torch.float16))


class Rounded:
    """bfloat16: 8 bits of every number, whatever its size."""

    block_bytes = BLOCK_BYTES["bf16"]
    feeds_back = False

    def write(self, values_BK: Tensor, codes: Tensor) -> None:
        codes.view(torch.bfloat16).copy_(values_BK)

    def read(self, codes: Tensor, out_BK: Tensor) -> None:
        out_BK.copy_(codes.view(torch.bfloat16))


class Bytes:
    """8-bit codes under one float32 scale per block, its largest absolute value / 127 (1-bit and 8-bit block
    schemes as in Dettmers 1511.04561 and ZeRO++ 2306.10209): off by absmax / 254 at most.

    A block with NaN or infinity is NaN in all of its elements. What exceeds 3.4e38 may be read as infinite.
    """

    block_bytes = BLOCK_BYTES["int8"]
    feeds_back = True

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


CODES: dict[str, Code] = {"bf16": Rounded(), "fp16": Halves(), "int8": Bytes()}
