"""The tensors in a value of any structure; a mapping from tensors."""

import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

V = TypeVar("V")
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


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a module's call, which for a block is what the one before it has returned: of
    keywords alone, `hidden_states`, or the first."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))


def with_first_argument(
    value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another first one."""
    if args:
        return (value, *args[1:]), dict(kwargs)
    return (), {**kwargs, "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs)): value}


def summary(tensor: Tensor) -> Tensor:
    """The projection on a fixed direction, and the norm, in float64: equal for equal tensors, and otherwise
    apart by about the norm of the difference. NaN counts as 0, infinity as 1."""
    flat = torch.nan_to_num(tensor.detach().double().flatten(), posinf=1.0, neginf=-1.0)
    direction = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float64))
    return torch.stack([flat @ direction, flat.norm()])


class WeakTensorMap(Generic[V]):
    """Values by tensor, each valid while its tensor is alive and not modified in place."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != _version(tensor):
            return None
        return entry[2]

    def put(self, tensor: Tensor, value: V) -> None:
        key, entries = id(tensor), self._entries

        def discard(dead: weakref.ref[Tensor]) -> None:
            if key in entries and entries[key][0] is dead:
                del entries[key]

        entries[key] = (weakref.ref(tensor, discard), _version(tensor), value)

    def clear(self) -> None:
        self._entries.clear()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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
