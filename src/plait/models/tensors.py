"""The tensors in a value of any structure."""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, dataclasses and attributes of other objects, but not of modules."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        for leaf in tree_leaves(pending.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, _OPAQUE):
                seen.add(id(leaf))
                pending.extend(getattr(leaf, "__dict__", {}).values())
                pending.extend(getattr(leaf, key, None) for key in getattr(type(leaf), "__slots__", ()))


def summary(tensor: Tensor) -> Tensor:
    """The projection on a fixed direction, and the norm, in float64: equal for equal tensors, and otherwise
    apart by about the norm of the difference. NaN counts as 0, infinity as 1."""
    flat = torch.nan_to_num(tensor.detach().double().flatten(), posinf=1.0, neginf=-1.0)
    direction = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float64))
    return torch.stack([flat @ direction, flat.norm()])


def storage_key(tensor: Tensor) -> int:
    """The address of a tensor's storage, which views share; it may be reused once the storage is freed."""
    return tensor.untyped_storage()._cdata


def direct_tensors(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results: in lists, tuples and values of dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in direct_tensors(value)]
