"""Float64 all through, where a model's own code says float32.

[Note: why float32 is taken for float64]
transformers' models compute norms, rotary tables and softmax in float32 whatever the model's dtype is, and
the roundings of that hide any error smaller than 1e-7. Wide models compute in float64 there, in one process
and on ranks alike, so that the two can be held against each other to 1e-9. What a family computes in a fused
kernel of its own stays as it is.

The mode is put around forwards, and not around a step: torch takes a mode off while the mode handles a
function, and so around all of `torch.autograd.backward`, in which blocks may run again.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


def compute_in_float64(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Lets the model and its blocks, which may run again in backward, compute in float64 throughout if their
    parameters are of it. In place."""
    if isinstance(model, PreTrainedModel):
        model.set_experts_implementation("eager")  # torch's grouped product does not take float64
    for module in (model, *blocks):
        kind = type(module)
        if kind not in _KINDS.values():  # a builder may give the same module twice
            module.__class__ = _KINDS[kind] = _KINDS.get(kind) or _wide(kind)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, what models are built with without a dtype, such as tables in buffers, gets this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}  # by the class that they are made of


def _wide(kind: type[nn.Module]) -> type[nn.Module]:
    """The class, with a forward that computes in float64. Modules stay what they are in every other way: who
    cuts a model asks for methods, and for classes by their names."""
    forward = kind.forward

    @functools.wraps(forward)  # models ask for a forward's arguments
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_wide = any(parameter.dtype == torch.float64 for parameter in module.parameters())
        with _Float64() if is_wide else nullcontext():
            return forward(module, *args, **kwargs)

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**about, "forward": run})


class _Float64(TorchFunctionMode):
    """Takes float64 where the program says float32."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
