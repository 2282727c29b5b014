"""Sums of squares by the kernel that also takes them while it adds up gradients: the same ones everywhere."""

import ctypes

import torch
from torch import Tensor

from plait.comm.host import library

_DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def sum_of_squares(flat: Tensor) -> Tensor | None:
    """Of a flat CPU tensor of floats, as a float64 scalar; None where there is no kernel for it."""
    clib = library.load() if flat.device.type == "cpu" else None
    if clib is None or flat.dtype not in _DTYPES or not flat.is_contiguous():
        return None
    total = ctypes.c_double(0.0)
    clib.pl_squares(_DTYPES[flat.dtype], flat.data_ptr(), flat.numel(), ctypes.byref(total))
    return torch.tensor(total.value, dtype=torch.float64)
