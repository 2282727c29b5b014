"""Record the buffers and attributes that a module's forward changes, and restore them for a recomputation.

[Note: state that a forward changes]
A forward may change BatchNorm's running statistics, counters or the vectors of spectral norm. A second
forward would change them twice, and compute with other values than the first. So a recomputation runs with
the values from before the forward, and the current ones are restored afterwards. The first forward shows
which buffers and attributes change, mostly none; later ones copy only these. A buffer that changes for the
first time later is an error: its old value is lost.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError

_Cell = tuple[nn.Module, str]  # a buffer or an attribute
_CONTAINERS = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))


class ModuleState:
    """Records the buffers and attributes of a module and its submodules that a forward changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: tuple[_Cell, ...] | None = None  # unknown before the first forward

    @contextmanager
    def recorded(self) -> Iterator[Mapping[_Cell, Any]]:
        """Run a forward inside the context. Yields a mapping that is filled at its end: the buffers and
        attributes that change, with their values from before."""
        modules = list(self._module.modules())
        buffers = {(m, key): b for m in modules for key, b in m._buffers.items() if b is not None}
        versions = {cell: buffer._version for cell, buffer in buffers.items()}
        cells = self._changing
        if cells is None:
            attributes = ((m, key) for m in modules for key in vars(m) if key not in _OF_TORCH)
            cells = (*buffers, *attributes)
        before = {cell: _copied(_read(cell), is_buffer=cell in buffers) for cell in cells}
        recorded: dict[_Cell, Any] = {}
        yield recorded
        changed = [c for c, b in buffers.items() if _read(c) is not b or b._version != versions[c]]
        if self._changing is None:
            # BatchNorm's kernel does not increase `_version`.
            changed += [c for c, b in buffers.items() if c not in changed and not _equal(b, before[c])]
            changed += [c for c in cells if c not in buffers and _differs(_read(c), before[c])]
            self._changing = tuple(changed)
        elif late := [key for module, key in changed if (module, key) not in self._changing]:
            raise ModelError(
                "with recompute, a buffer changed for the first time after the first forward",
                given=f"{late[0]} of a block",
                expected="buffers that every forward in training changes, or none",
                hint="recompute=none",
            )
        recorded.update({cell: before[cell] for cell in self._changing})


@contextmanager
def put_back(recorded: Mapping[_Cell, Any]) -> Iterator[None]:
    """Set buffers and attributes to the recorded values inside the context."""
    now = {cell: _read(cell) for cell in recorded}
    for (module, key), value in recorded.items():
        _values(module, key)[key] = _copied(value, is_buffer=key in module._buffers)
    try:
        yield
    finally:
        for (module, key), value in now.items():
            _values(module, key)[key] = value


def _values(module: nn.Module, key: str) -> dict[str, Any]:
    return module._buffers if key in module._buffers else vars(module)


def _read(cell: _Cell) -> Any:
    module, key = cell
    return _values(module, key).get(key)


def _copied(value: Any, *, is_buffer: bool) -> Any:
    """A copy of what a forward may change in place."""
    if is_buffer and isinstance(value, Tensor):
        return value.clone()
    return value.copy() if type(value) in _CONTAINERS else value


def _equal(buffer: Tensor, before: Tensor) -> bool:
    return buffer.is_meta or torch.equal(buffer, before)


def _differs(value: Any, before: Any) -> bool:
    if type(value) is not type(before) or type(value) not in _CONTAINERS:
        return value is not before
    return _identities(value) != _identities(before)


def _identities(container: Any) -> Any:
    """The items of a container, compared as objects: comparing tensors gives tensors."""
    if type(container) is dict:
        return {key: id(value) for key, value in container.items()}
    return container if type(container) is set else [id(item) for item in container]
