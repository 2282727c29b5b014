"""Compute in float64 throughout, also where a model's code casts to float32.

[Note: float64 instead of float32]
The models of transformers compute norms, rotary tables and softmax in float32 whatever the model's dtype, and
the rounding hides errors smaller than 1e-7. Here these are computed in float64, in the reference and on
ranks, so that the two can be compared to 1e-9. Fused kernels of a model family are not affected.

The torch function mode is entered around forwards, not around a step: torch disables a mode while it handles
a function, and so during all of `torch.autograd.backward`, in which blocks may run again.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.models import is_pretrained_model


def compute_in_float64(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Make the model and its blocks compute in float64 throughout if their parameters are float64. In place.

    Blocks separately, as they may run again in backward. Those that are one layer of torch's state no dtype,
    and stay as they are: tensor parallelism knows a linear layer by its forward.
    """
    if is_pretrained_model(model):
        model.set_experts_implementation("eager")  # torch's grouped matmul does not support float64
    for module in (model, *blocks):
        cls = type(module)
        is_layer = cls.__module__.startswith("torch.nn.") and not list(module.children())
        if not is_layer and cls not in _FLOAT64_CLASSES.values():  # a builder may return a module twice
            module.__class__ = _FLOAT64_CLASSES[cls] = _FLOAT64_CLASSES.get(cls) or _float64_class(cls)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, for tensors that models create without one, such as tables in buffers."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


_FLOAT64_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # by original class


def _float64_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward computes in float64.

    Its methods and name are those of the class: sharding a model looks at both.
    """
    forward = cls.forward

    @functools.wraps(forward)  # models inspect the signature of forward
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
        if not is_float64:
            return forward(module, *args, **kwargs)
        with _Float64(), default_dtype(torch.float64):
            return forward(module, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "forward": run})


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of torch functions."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
