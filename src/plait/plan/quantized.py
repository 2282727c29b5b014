"""Formats of quantized weights: codes in blocks of 64 elements, each with its largest magnitude.

[Note: quantized weights]
A block is 64 consecutive elements of a full weight, in the order in which the model stores it; for nn.Linear
(out, in), row by row. Its absmax is a float32, and an element is the code of the level that is nearest to its
value / absmax. `nf4`: 4 bits, the 16 levels of NormalFloat, the quantiles of a normal distribution (QLoRA,
Dettmers et al. 2305.14314, section 3 and appendix E). `int8`: 8 bits, the 255 levels k / 127. Absmax is exact
and has the level 1 or -1: quantizing a dequantized weight gives the same codes.

A weight is quantized before it is sharded, or as if it were: a shard has complete blocks of the full weight,
so that codes, and what a model computes, are the same under every plan. Other shards are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from plait.plan.sharding import Boxes

BLOCK = 64
_SCALE_BYTES = 4
_NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class BlockFormat:
    """How a block is stored: codes of `bits` each, then its absmax. `levels`: of the codes, ascending."""

    bits: int
    levels: tuple[float, ...]

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK * self.bits // 8

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + _SCALE_BYTES

    def num_bytes(self, numel: int) -> int:
        """Bytes of complete blocks of `numel` elements."""
        return numel // BLOCK * self.block_bytes


FORMATS = {
    "nf4": BlockFormat(4, _NF4_LEVELS),
    "int8": BlockFormat(8, tuple(k / 127 for k in range(-127, 128))),
}


def splits_blocks(shape: Sequence[int], boxes: Boxes) -> bool:
    """Return whether a shard of a tensor has a part of a block."""
    for dim, ranges in enumerate(boxes.ranges):
        if ranges == ((0, shape[dim]),):
            continue
        inner = prod(shape[dim + 1 :])
        edges = [edge * inner for each in ranges for edge in each]
        if any(edge % BLOCK for edge in (*edges, *([shape[dim] * inner] if dim else []))):
            return True
    return False
