"""A mapping from tensors that does not keep them alive."""

import weakref
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


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
