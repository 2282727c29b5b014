"""Record the state that a module's forward changes, and restore it for a recomputation.

[Note: state that a forward changes]
A forward may change BatchNorm's running statistics, counters or the vectors of spectral norm. A second
forward would change them twice, and compute with other values than the first. So a recomputation runs with
the values from before the forward, and the current ones are restored afterwards. The first forward in
training mode, and in evaluation mode, shows which buffers and attributes change, mostly none; later ones
copy only these. A buffer that changes for the first time later is an error: its old value is lost.

The same holds for random generators: `random`'s and NumPy's global ones, and those that are attributes of the
modules. (torch's default generators are torch.utils.checkpoint's.) Copying the state of the global ones takes
10 to 50 us, too long for each forward of blocks that do not draw from them.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError

_STATE = ""  # not the name of an attribute
_Cell = tuple[Any, str]  # a buffer or an attribute of a module; a random generator and `_STATE`
_CONTAINERS = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))


class ModuleState:
    """Records the buffers and attributes of a module and its submodules that a forward changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By training mode; unknown before its first forward.
        self._changing: dict[bool, tuple[_Cell, ...]] = {}

    @property
    def training(self) -> bool:
        return self._module.training

    @contextmanager
    def recorded(self) -> Iterator[Mapping[_Cell, Any]]:
        """Run a forward inside the context. Yields a mapping that is filled at its end: what changes, and its
        value from before."""
        modules = list(self._module.modules())
        buffers = {(m, key): b for m in modules for key, b in m._buffers.items() if b is not None}
        versions = {cell: buffer._version for cell, buffer in buffers.items()}
        changing = self._changing.get(self.training)
        cells = _all_cells(modules, buffers) if changing is None else changing
        before = {cell: _copied(_read(cell), is_buffer=cell in buffers) for cell in cells}
        recorded: dict[_Cell, Any] = {}
        yield recorded
        changed = [c for c, b in buffers.items() if _read(c) is not b or b._version != versions[c]]
        if changing is None:
            # BatchNorm's kernel does not increase `_version`.
            changed += [c for c, b in buffers.items() if c not in changed and not _equal(b, before[c])]
            changed += [c for c in cells if c not in buffers and _differs(c, before[c])]
            changing = self._changing[self.training] = tuple(changed)
        elif late := [key for module, key in changed if (module, key) not in changing]:
            raise ModelError(
                "with recompute, a buffer changed for the first time after the first forward",
                given=f"{late[0]} of a block",
                expected="buffers that every forward in training changes, or none",
                hint="recompute=none",
            )
        recorded.update({cell: before[cell] for cell in changing})


def _all_cells(modules: Sequence[nn.Module], buffers: Iterable[_Cell]) -> tuple[_Cell, ...]:
    attributes = [(m, key) for m in modules for key in vars(m) if key not in _OF_TORCH]
    found = [random.getstate.__self__, *(vars(m)[key] for m, key in attributes)]  # type: ignore[attr-defined]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found.append(numpy.get_state.__self__)
    generators = dict.fromkeys(value for value in found if _is_generator(value))
    return (*buffers, *attributes, *((generator, _STATE) for generator in generators))


def _is_generator(value: Any) -> bool:
    cls = type(value)
    is_numpys = cls.__module__.startswith("numpy.random") and cls.__name__ in ("Generator", "RandomState")
    return is_numpys or isinstance(value, torch.Generator | random.Random)


@contextmanager
def put_back(recorded: Mapping[_Cell, Any]) -> Iterator[None]:
    """Set buffers and attributes to the recorded values inside the context."""
    now = {cell: _read(cell) for cell in recorded}
    for cell, value in recorded.items():
        _write(cell, _copied(value, is_buffer=_is_buffer(cell)))
    try:
        yield
    finally:
        for cell, value in now.items():
            _write(cell, value)


def _is_buffer(cell: _Cell) -> bool:
    owner, key = cell
    return key != _STATE and key in owner._buffers


def _values(cell: _Cell) -> dict[str, Any]:
    owner: nn.Module = cell[0]
    return owner._buffers if _is_buffer(cell) else vars(owner)


def _read(cell: _Cell) -> Any:
    owner, key = cell
    if key != _STATE:
        return _values(cell).get(key)
    if isinstance(owner, random.Random):
        return owner.getstate()
    return owner.bit_generator.state if hasattr(owner, "bit_generator") else owner.get_state()


def _write(cell: _Cell, value: Any) -> None:
    owner, key = cell
    if key != _STATE:
        _values(cell)[key] = value
    elif isinstance(owner, random.Random):
        owner.setstate(value)
    elif hasattr(owner, "bit_generator"):
        owner.bit_generator.state = value
    else:
        owner.set_state(value)


def _copied(value: Any, *, is_buffer: bool) -> Any:
    """A copy of what a forward may change in place."""
    if is_buffer and isinstance(value, Tensor):
        return value.clone()
    return value.copy() if type(value) in _CONTAINERS else value


def _equal(buffer: Tensor, before: Tensor) -> bool:
    return buffer.is_meta or torch.equal(buffer, before)


def _differs(cell: _Cell, before: Any) -> bool:
    value = _read(cell)
    if cell[1] == _STATE:
        return not torch.equal(value, before) if isinstance(value, Tensor) else repr(value) != repr(before)
    if type(value) is not type(before) or type(value) not in _CONTAINERS:
        return value is not before
    return _identities(value) != _identities(before)


def _identities(container: Any) -> Any:
    """The items of a container, compared as objects: comparing tensors gives tensors."""
    if type(container) is dict:
        return {key: id(value) for key, value in container.items()}
    return container if type(container) is set else [id(item) for item in container]
