"""Settings of torch and its libraries that the numbers of a plan depend on, for this process.

[Note: reproducible bits]
On CPUs every step is reproducible bit for bit: torch's kernels are for a fixed number of threads, and our
sums have a fixed order of ranks. On GPUs some kernels add with atomics (backwards of attention, embedding and
index operations), cuBLAS may split a product differently in a later call, and NCCL may sum in the switch
(NVLS; NVLSTree between hosts), in a varying order. `deterministic=true` excludes all three. NCCL's rings and
trees sum in an order that is fixed for the same ranks on the same hosts, but another one for other numbers or
layouts of ranks.

The environment is read when a library starts: NCCL's by the first communicator, cuBLAS's by the first
product.
"""

import os
import warnings

import torch

from plait.plan import Plan

_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}


def set_numerics(plan: Plan) -> None:
    """Apply `deterministic` to this process; without it nothing is changed. Call it before ranks are
    connected."""
    if not plan.deterministic:
        return
    missing = [name for name in _DETERMINISTIC if name not in os.environ]
    if missing and torch.cuda.is_initialized():
        warnings.warn(
            f"deterministic=true: {' and '.join(missing)} may be set too late, as this process already uses "
            "its GPU. Set them before the program starts: "
            + " ".join(f"{name}={_DETERMINISTIC[name]}" for name in missing),
            stacklevel=3,
        )
    for name in missing:
        os.environ[name] = _DETERMINISTIC[name]
    # Filling new memory with NaN would find reads of uninitialized memory, at a pass over every tensor.
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # torch.utils.deterministic has no types
    torch.use_deterministic_algorithms(True)


def set_product_precision(plan: Plan) -> None:
    """Apply `tf32` of a plan that has been validated; without it nothing is changed."""
    if plan.tf32:
        torch.set_float32_matmul_precision("high")
