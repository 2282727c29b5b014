"""Float64 all through, where a model's own code says float32.

[Note: why float32 is taken for float64]
transformers' models compute norms, rotary tables and softmax in float32 whatever the model's dtype is, and
the roundings of that hide any error smaller than 1e-7. Under `wide` such code computes in float64, in one
process and on ranks alike, so that the two can be held against each other to 1e-9. What a family computes in
a fused kernel of its own stays as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def wide(dtype: torch.dtype) -> Iterator[None]:
    """For float64: inside, whatever asks for float32 gets float64, also where tensors are made without a
    dtype. For others, nothing."""
    is_wide, before = dtype == torch.float64, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if is_wide else before)
    try:
        with Wide() if is_wide else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class Wide(TorchFunctionMode):
    """Takes float64 where the program says float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
