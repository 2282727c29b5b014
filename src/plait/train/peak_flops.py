"""Peak FLOP/s of a rank's device, to which MFU is relative: from its data sheet, and measured.

Published utilizations are relative to data sheets (Chowdhery et al. 2204.02311, appendix B; torchtitan;
Megatron). A GPU under load lowers its clock: a measured product is slower than the data sheet says, and a
utilization relative to it higher. Devices without an entry in `plan/devices.toml`, and CPUs, only have the
measured peak.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plait.plan.devices import device_of_driver

_PRODUCTS = 6  # timed; the fastest counts
_PRECISIONS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}


@dataclass(frozen=True)
class PeakFlops:
    """FLOP/s of one rank. `data_sheet`: None for a device that has no entry."""

    measured: float
    data_sheet: float | None

    @classmethod
    def of_device(cls, device: torch.device, dtype: torch.dtype) -> "PeakFlops":
        """Measure the device, and look it up. See `matmul_peak`."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        uses_tf32 = torch.get_float32_matmul_precision() != "highest"
        return cls(matmul_peak(device, dtype), data_sheet_peak(name, dtype, uses_tf32=uses_tf32))

    @property
    def for_mfu(self) -> float:
        return self.data_sheet or self.measured

    def __str__(self) -> str:
        measured = f"{self.measured / 1e9:,.1f} GFLOP/s per rank (measured matrix product)"
        if self.data_sheet is None:
            return measured
        return f"{self.data_sheet / 1e9:,.1f} GFLOP/s per rank (data sheet), {measured}"


def data_sheet_peak(name: str, dtype: torch.dtype, *, uses_tf32: bool = False) -> float | None:
    """Return the FLOP/s of the device with this name, as torch.cuda.get_device_name returns it: None if it
    has no entry. `uses_tf32`: float32 products are computed in TF32."""
    known = device_of_driver(name)
    if known is None:
        return None
    precision = "tf32" if dtype is torch.float32 and uses_tf32 else _PRECISIONS[dtype]
    return known.peak_flops.get(precision)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square matrix product on this device, with this process's threads.

    The best of several tries, so that noise from other processes does not count. All ranks of a host must
    call it at the same time, to share the host as in training.
    """
    size = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype is torch.float16:
        size = 256  # most CPUs have no fp16 arithmetic: a product of the size above takes seconds
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm
    if dtype is torch.float8_e4m3fn and device.type == "cuda":
        one = torch.ones((), device=device)
        multiply = partial(
            torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    elif dtype is torch.float8_e4m3fn:
        dtype = torch.bfloat16  # CPUs emulate float8
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    right = right.t()  # the float8 kernel takes a column-major matrix
    best_s = math.inf
    for _ in range(_PRODUCTS):
        start_s = time.perf_counter()
        multiply(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / best_s
