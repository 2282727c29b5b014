"""Record how constructors set the values of parameters on meta, to set real ones in the same way.

A library's own initialization may leave out parameters whose constructor gives them values: a bias that is
created as zeros. On meta these values are lost. So the calls that set them are recorded: a function that
creates a tensor with values, and in-place functions on all of a tensor, without other tensors. After any
other change, the values are unknown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_RECORDED = "plait_recorded"  # of a parameter on meta: the calls that set its values
_CREATORS = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace)
_CHANGED = object()


@dataclass(frozen=True)
class _RecordedCall:
    """A call of a function that creates a tensor, or that changes one in place, which is _CHANGED here."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def apply(self, values: Tensor) -> None:
        if self.func in _CREATORS:
            kwargs = {**self.kwargs, "device": values.device, "dtype": values.dtype}
            values.copy_(self.func(*self.args, **kwargs))
        else:
            given = (self.args, self.kwargs)
            args, kwargs = tree_map(lambda leaf: values if leaf is _CHANGED else leaf, given)
            self.func(*args, **kwargs)


class RecordedConstruction(TorchFunctionMode):
    """Inside the context, record the calls that set values of tensors on meta; and create scalars on the CPU
    instead: constants, which no initialization knows."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, list[_RecordedCall]] = {}  # by storage
        self._unknown: set[int] = set()  # storages with other changes
        self._alive: list[Any] = []  # storages, so that no address is reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args and isinstance(args[0], int | float):
            kwargs = {"device": "cpu"} | kwargs
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        if func in _CREATORS:
            self._add(result, func, args, kwargs, is_known=True)
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                is_known = len(tensors) == 1 and _is_all_of_its_storage(tensor)
                self._add(tensor, func, args, kwargs, is_known=is_known)
        return result

    def attach(self, model: nn.Module) -> None:
        """Store the calls on the model's parameters."""
        for parameter in model.parameters():
            storage = parameter.untyped_storage()._cdata
            if storage in self._calls.keys() - self._unknown and _is_all_of_its_storage(parameter):
                setattr(parameter, _RECORDED, tuple(self._calls[storage]))

    def _add(self, tensor: Tensor, func: Any, args: Any, kwargs: Any, *, is_known: bool) -> None:
        if tensor.is_meta:
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            args, kwargs = tree_map_only(Tensor, lambda _: _CHANGED, (args, kwargs))
            self._calls.setdefault(storage._cdata, []).append(_RecordedCall(func, args, kwargs))
            self._unknown |= set() if is_known else {storage._cdata}


def repeat_construction(parameter: Tensor, values: Tensor) -> None:
    """Set values as the constructor of this parameter on meta did, as far as recorded."""
    calls: Sequence[_RecordedCall] = getattr(parameter, _RECORDED, ())
    for call in calls:
        call.apply(values)


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    num_bytes = math.prod(tensor.shape) * tensor.element_size()
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == num_bytes
