"""Plain objects as JSON and tensors: None, bools, numbers, strings, lists, tuples, sets, dicts and tensors,
in any nesting. No message can run code, as one that is unpickled could.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.errors import CompatError

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return a JSON value; its tensors are copied to the CPU and appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().to("cpu", copy=True).contiguous())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return encode(value.item(), tensors)  # a number of NumPy's
    raise CompatError(
        "an object of this type cannot be sent to other ranks: nothing is unpickled",
        given=f"a {type(value).__module__}.{type(value).__qualname__}",
        expected="None, numbers, strings, lists, tuples, sets, dicts and tensors",
        hint="its state_dict() or vars()",
    )


def decode(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return what `encode` encoded; `tensors` in the same order."""
    if not isinstance(value, dict):
        return value
    remaining = iter(tensors)
    [(kind, content)] = value.items()
    if kind == "tensor":
        return next(remaining)
    if kind == "dict":
        return {decode(key, remaining): decode(item, remaining) for key, item in content}
    return _SEQUENCES[kind](decode(item, remaining) for item in content)


def tensor_layouts(value: Any) -> list[tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of each tensor of an encoded value, in order."""
    if isinstance(value, list):
        return [layout for item in value for layout in tensor_layouts(item)]
    if not isinstance(value, dict):
        return []
    [(kind, content)] = value.items()
    return [(getattr(torch, content[0]), content[1])] if kind == "tensor" else tensor_layouts(content)
