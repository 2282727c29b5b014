"""Sums of squares by the kernel that also takes them while it adds up gradients: the same ones everywhere."""

import ctypes

import torch
from torch import Tensor

from plait.comm.host import library
from plait.comm.host.calls import DTYPES


def sum_of_squares(flat: Tensor) -> Tensor | None:
    """Of a flat CPU tensor of floats, as a float64 scalar; None where there is no kernel for it."""
    clib = library.load() if flat.device.type == "cpu" else None
    if clib is None or not flat.is_floating_point() or flat.dtype not in DTYPES or not flat.is_contiguous():
        return None
    total = ctypes.c_double(0.0)
    clib.pl_squares(DTYPES[flat.dtype], flat.data_ptr(), flat.numel(), ctypes.byref(total))
    return torch.tensor(total.value, dtype=torch.float64)
