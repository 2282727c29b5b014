"""Peak FLOP/s of a rank's device, to which MFU is relative: from its data sheet, and measured.

Published utilizations are relative to data sheets (Chowdhery et al. 2204.02311, appendix B; torchtitan;
Megatron). A GPU under load lowers its clock: a measured product is slower than the data sheet says, and a
utilization relative to it higher. Devices without an entry here, and CPUs, only have the measured peak.
"""

import math
import time
from dataclasses import dataclass

import torch

_PRODUCTS = 6  # timed; the fastest counts
_F16, _TF32, _F32, _F64 = range(4)
# TFLOP/s of dense matrix products, by words of the device's name, in (bf16 and fp16, TF32, fp32, fp64); the
# longest entry wins. NVIDIA's and AMD's data sheets, whose numbers with sparsity are halved.
_DATA_SHEETS: dict[str, tuple[float, float, float, float]] = {
    "A100": (312, 156, 19.5, 19.5),
    "A800": (312, 156, 19.5, 9.7),
    "H100": (989.4, 494.7, 66.9, 66.9),
    "H100 PCIe": (756, 378, 51.2, 51.2),
    "H100 NVL": (835.5, 417.7, 60, 60),
    "H800": (989.4, 494.7, 66.9, 1),
    "H20": (148, 74, 44, 1),
    "H200": (989.4, 494.7, 66.9, 66.9),
    "H200 NVL": (835.5, 417.7, 60, 60),
    "GH200": (989.4, 494.7, 66.9, 66.9),
    "B200": (2250, 1125, 75, 37),
    "GB200": (2500, 1250, 80, 40),
    "L40S": (362, 183, 91.6, 1.4),
    "MI250X": (191.5, 47.9, 47.9, 47.9),  # one of the two dies, each of which is a device
    "MI300X": (1307.4, 653.7, 163.4, 163.4),
    "MI325X": (1307.4, 653.7, 163.4, 163.4),
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
    words = name.replace("-", " ").split()
    known = [key for key in _DATA_SHEETS if all(word in words for word in key.split())]
    if not known:
        return None
    column = {torch.float32: _TF32 if uses_tf32 else _F32, torch.float64: _F64}.get(dtype, _F16)
    return 1e12 * _DATA_SHEETS[max(known, key=len)][column]


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square matrix product on this device, with this process's threads.

    The best of several tries, so that noise from other processes does not count. All ranks of a host must
    call it at the same time, to share the host as in training.
    """
    size = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype is torch.float16:
        size = 256  # most CPUs have no fp16 arithmetic: a product of the size above takes seconds
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best_s = math.inf
    for _ in range(_PRODUCTS):
        start_s = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / best_s
