"""The global gradient norm, the clip factor, and clipping by value."""

from collections.abc import Iterable

import torch
from torch import Tensor

from plait.comm import sum_of_squares

NORM_BLOCK = 256  # elements summed in the gradient's own dtype; blocks are summed in float64
_CACHED = 2**17  # elements: half a megabyte of float32 stays in a core's cache between two passes


def squared_norm(flat: Tensor) -> Tensor:
    """Sum of squares of a flat gradient, as a float64 scalar on its device.

    One float32 sum over millions of elements loses four digits; sums of short blocks, added in float64, lose
    none that matter and cost the same. A gradient split at multiples of NORM_BLOCK has the same blocks: the
    sum over its shards differs from the full sum in the last bits of a float64 at most. On a CPU a kernel
    sums in float64 from the first element on.
    """
    if flat.is_meta:  # thousands of calls in a dry run, where torch's code on meta takes a millisecond each
        return torch.empty((), dtype=torch.float64, device="meta")
    total = sum_of_squares(flat)
    return block_square_sums(flat).sum() if total is None else total


def block_square_sums(flat: Tensor) -> Tensor:
    """The sums of squares of each NORM_BLOCK elements, and of the remainder; float64."""
    body = flat[: flat.numel() // NORM_BLOCK * NORM_BLOCK].view(-1, NORM_BLOCK)
    norms = torch.linalg.vector_norm(body, dim=1)
    if body.numel() < flat.numel():
        rest = torch.zeros(1, NORM_BLOCK, dtype=flat.dtype, device=flat.device)
        rest[0, : flat.numel() - body.numel()] = flat[body.numel() :]
        norms = torch.cat([norms, torch.linalg.vector_norm(rest, dim=1)])
    return norms.double().square()


def clip_factor(norm: float, limit: float | None) -> float:
    """The factor that makes the gradient norm at most `limit`; torch's own formula."""
    if limit is None:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


def clip_values(flats: Iterable[Tensor], factor: float, limit: float) -> None:
    """Multiply flat gradients by `factor`, then clamp them to +-limit, in one pass over memory.

    A NaN stays one. The optimizer's own factor is 1 afterwards.
    """
    for flat in flats:
        for chunk in flat.split(flat.numel() if flat.is_cuda else _CACHED):
            if factor != 1.0:
                chunk.mul_(factor)
            chunk.clamp_(-limit, limit)
