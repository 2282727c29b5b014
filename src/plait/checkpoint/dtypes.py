"""Types and shapes of tensors in files."""

import math
from collections.abc import Sequence

import torch

_MOST_DIMS, _MOST_ELEMENTS = 64, 2**60

# safetensors' names of the dtypes that torch has.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_shape(shape: Sequence[object]) -> bool:
    """Whether a tensor can have it."""
    sizes = [size for size in shape if type(size) is int and size >= 0]
    is_size = len(sizes) == len(shape) <= _MOST_DIMS
    return is_size and math.prod(max(1, size) for size in sizes) < _MOST_ELEMENTS
