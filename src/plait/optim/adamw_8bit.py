"""AdamW with states in 8-bit codes, and the codes: block-wise dynamic quantization (Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861).

[Note: blocks and codes]
A block is BLOCK consecutive elements of a unit's flat storage, from a multiple of BLOCK on: ranks own ranges
that end at such multiples, so no plan divides a block between ranks. Where an optimizer group or the storage
ends within a block, each part is a block of its own.

An element's code is the nearest of 256 levels from -1 to 1 (or 0 to 1), times the block's scale. Levels are
those of the paper (dynamic tree quantization: decades, finer towards 1). Three differences:
- the scale has the sign of the element of the largest absolute value, so that this element is level 1, the
  only one of absolute value 1. Quantizing what was dequantized therefore returns the same codes and scales,
  and a checkpoint has the dequantized values: a resumed run continues with the same bits.
- a second moment above zero has a level above zero. In a block whose largest is 6 * 10^6 times larger it
  would be 0, and a first moment that is not 0 would be divided by `eps`.
- a scale below _MIN_SCALE is 0: products with small levels would be subnormal, and lose bits.

[Note: search for a level]
A binary search among 255 boundaries takes 30 times longer than AdamW's update. The upper 16 bits of a float32
select the number of boundaries below the smallest value with these bits; at most one more is between them.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from plait.plan.memory import CODE_BLOCK as BLOCK
from plait.plan.memory import code_block_bytes

_MIN_SCALE = 2.0**-100
_UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")
_DECADES = 7
_IN_CACHE = 2**16  # elements of temporary memory on a CPU


class AdamW8bit(torch.optim.AdamW):
    """torch.optim.AdamW, whose states an engine stores in 8-bit codes: 2.03 bytes per element instead of 8.
    See [Note: blocks and codes]. Without an engine it is AdamW with states in full width."""

    is_elementwise = True


def stored_bytes(numel: int, position: int) -> int:
    """Bytes of the codes and scales of `numel` elements, the first at `position` of its unit."""
    return code_block_bytes(position, position + numel)


def quantize(values: Tensor, stored: Tensor, position: int, name: str) -> None:
    """Write the codes and scales of a flat state to `stored`, uint8 of `stored_bytes`."""
    levels = _levels(name in _UNSIGNED, values.device)
    for rows, codes, scales in _blocks(values, stored, position):
        highest = rows.amax(1)
        if name not in _UNSIGNED:
            lowest = rows.amin(1)
            highest = torch.where(highest >= -lowest, highest, lowest)
        scales.copy_(highest)
        scales.masked_fill_(scales.abs() < _MIN_SCALE, 0.0)
        ratios = (rows / scales[:, None]).float().view(-1)  # not a number if both are 0: level 1, times 0
        cells = ratios.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        torch.index_select(levels.first_code, 0, cells, out=codes)
        codes.add_(ratios > levels.boundary.index_select(0, cells))


def dequantize(stored: Tensor, values: Tensor, position: int, name: str) -> Tensor:
    """Write the values of codes to `values`, flat, and return it."""
    levels = _levels(name in _UNSIGNED, values.device)
    for rows, codes, scales in _blocks(values, stored, position):
        flat = rows.view(-1)
        torch.index_select(levels.values.to(values.dtype), 0, codes.to(torch.int32), out=flat)
        rows.mul_(scales[:, None])
    return values


def _blocks(values: Tensor, stored: Tensor, position: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (values of shape (blocks, elements), their codes, their scales): a first block that begins within
    one of the unit, full blocks, and a last one."""
    numel = values.numel()
    num_bytes = stored.numel() - numel
    scales, codes = stored[:num_bytes].view(torch.float32), stored[num_bytes:]
    start = block = 0
    head = min(-position % BLOCK, numel)
    body = head + (numel - head) // BLOCK * BLOCK
    parts = range(head, body, numel if values.is_cuda else _IN_CACHE)[1:]
    for stop in (head, *parts, body, numel):
        if stop > start:
            rows = values[start:stop].view(-1, BLOCK if head <= start and stop <= body else stop - start)
            yield rows, codes[start:stop], scales[block : block + len(rows)]
            start, block = stop, block + len(rows)


class _Levels:
    """The sorted levels of a device, and tables to search them. See [Note: search for a level]."""

    def __init__(self, device: torch.device, *, unsigned: bool) -> None:
        values = [0.0, 1.0]
        for decade in range(_DECADES):
            edges = torch.linspace(0.1, 1.0, 2 ** (decade + unsigned) + 1, dtype=torch.float64)
            means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
            values += means.tolist() if unsigned else [*means.tolist(), *(-means).tolist()]
        levels = torch.tensor(sorted(values))
        assert len(levels) == 256
        boundaries = (levels[1:] + levels[:-1]) / 2
        boundaries[0] = 0.0 if unsigned else boundaries[0]
        upper = torch.arange(2**16, dtype=torch.int32)
        lowest = torch.where(upper < 2**15, upper << 16, (upper << 16) | 0xFFFF).view(torch.float32)
        self.values = levels.to(device)
        self.first_code = torch.searchsorted(boundaries, lowest).to(device, torch.uint8)
        beyond = torch.cat([boundaries, boundaries.new_tensor([torch.inf])])
        self.boundary = beyond[self.first_code.long().cpu()].to(device)


@cache
def _levels(unsigned: bool, device: torch.device) -> _Levels:
    return _Levels(device, unsigned=unsigned)
