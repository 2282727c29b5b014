"""The global gradient norm and the factor that clips it."""

import torch
from torch import Tensor

_RUN = 4096  # elements summed in the gradient's own dtype before float64 takes over


def squared_norm(flat: Tensor) -> Tensor:
    """Sum of squares of a flat gradient, as a float64 scalar on its device.

    One float32 sum over millions of elements loses four digits; short runs of it, added in float64,
    lose none that matter and cost the same.
    """
    body = flat[: flat.numel() // _RUN * _RUN].view(-1, _RUN)
    norms = torch.linalg.vector_norm(body, dim=1).double()
    return norms.square().sum() + torch.linalg.vector_norm(flat[body.numel() :]).double().square()


def clip_factor(norm: float, limit: float | None) -> float:
    """What gradients are multiplied by so that their norm is at most `limit`; torch's own formula."""
    if limit is None:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
