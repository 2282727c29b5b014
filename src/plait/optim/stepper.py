"""Steps an element-wise optimizer, its states kept where and how the plan says.

[Note: states that visit]
In memory and in full width, states live in `optimizer.state` and a step is torch's own, over all leaves at
once. Otherwise they visit: a leaf's states are brought in and widened, the optimizer is shown this leaf alone
and steps it, and they go back. What an element-wise optimizer does to a leaf does not depend on the others,
so the numbers are those of one step over all. Callers cut leaves to at most CHUNK elements: of a chunk's
weights, gradient and states, what is written last is still in cache when it is read next.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plait.optim.flat import scaled_step
from plait.optim.mapped import MappedFile, mapped_bytes
from plait.optim.rounding import StochasticRounding

CHUNK = 2**18  # elements of a leaf whose states visit
_AHEAD = 8  # leaves whose pages are read while one is stepped


@dataclass(frozen=True)
class _Counter:
    """A tensor of one number, without the tensor.

    A small block of memory that outlives a leaf's first step lies in the way of the next leaf's large ones:
    the heap grew by a third of all states that never stayed in it.
    """

    value: float
    dtype: torch.dtype


@dataclass
class _Kept:
    """What is kept of a leaf between steps. Both are empty before its first one."""

    group: int
    position: int
    flat: dict[str, Tensor] = field(default_factory=dict)  # as large as the leaf, as they are stored
    rest: dict[str, Any] = field(default_factory=dict)  # counters, thin
    places: dict[str, Tensor] = field(default_factory=dict)  # in the file, by name


class ChunkedOptimizer:
    """Steps some leaves of an optimizer at a time. See [Note: states that visit]."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: Iterable[str],
        *,
        states: Literal["fp32", "bf16"] = "fp32",
        folder: Path | None = None,
        masters: MappedFile | None = None,
        positions: Mapping[Tensor, int] | None = None,
    ) -> None:
        """`optimizer` holds all leaves, the states are those that `state_kinds` found.

        states      what they are kept in; fp32 stands for the leaf's own dtype
        folder      where a file keeps those that are as large as the leaf; None: in memory
        masters     the file that the leaves lie in, if they do
        positions   where each leaf begins in its unit, which seeds rounding; its storage offset if not said

        Raises ConfigError when the folder cannot hold the file.
        """
        self.optimizer = optimizer
        self._narrow = states == "bf16"
        self._masters = masters
        self._kept = {
            leaf: _Kept(index, leaf.storage_offset() if positions is None else positions[leaf])
            for index, group in enumerate(optimizer.param_groups)
            for leaf in group["params"]
        }
        self._visiting = self._narrow or folder is not None or masters is not None
        self._rounding = StochasticRounding()
        self._wide: dict[str, Tensor] = {}  # where states are widened, by name; as large as the largest leaf
        self._file: MappedFile | None = None
        if folder is not None:
            names = sorted(name for name in kinds if "." not in name)
            self._file = self._placed(folder, names)

    def step(self, leaves: Sequence[Tensor], factor: float, number: int) -> None:
        """One step of these leaves, their gradients multiplied by `factor`, which they are afterwards.

        `number` counts training steps (skipped ones or not, but each at most once): every leaf is stepped
        once in each, in one call or in several. When this raises, the optimizer's groups are whole again.
        """
        if not self._visiting or not leaves:
            with self._only(leaves):
                scaled_step(self.optimizer, factor)
            return
        self._rounding.begin(number)
        for leaf in leaves[:_AHEAD]:
            self._expect(leaf)
        for index, leaf in enumerate(leaves):
            for later in leaves[index + _AHEAD : index + _AHEAD + 1]:
                self._expect(later)
            self._visit(leaf, factor)
            self._forget(leaf)

    def state(self, leaf: Tensor) -> dict[str, Any]:
        """The leaf's state as the optimizer would hold it; {} before the first step.

        States in memory and full width, or in a file, are views of what lives on.
        """
        if not self._visiting:
            return dict(self.optimizer.state.get(leaf, {}))
        kept = self._kept[leaf]
        wide = {name: stored.to(leaf.dtype) for name, stored in kept.flat.items()}
        return {**wide, **{name: _thick(value) for name, value in kept.rest.items()}}

    def load(self, leaf: Tensor, state: Mapping[str, Any]) -> None:
        """Takes over what `state` gave, the tensors themselves: they are the stepper's from now on. Counters
        stay on the device that they come on."""
        if not self._visiting:
            self.optimizer.state.pop(leaf, None)
            if state:
                self.optimizer.state[leaf] = dict(state)
            return
        kept = self._kept[leaf]
        kept.flat, kept.rest = {}, {}
        for name, value in state.items():
            if _is_flat(value, leaf):
                place = self._place(kept, name, value)
                kept.flat[name] = value if place is value else place.copy_(value)
            else:
                kept.rest[name] = _thin(value)
        self._forget(leaf)

    def clear(self) -> None:
        """Forgets all states: the next step is the first."""
        self.optimizer.state.clear()
        for kept in self._kept.values():
            kept.flat, kept.rest = {}, {}

    @property
    def state_bytes(self) -> int:
        """Of states in this rank's memory; those of `disk_bytes` and one leaf's widened ones left out."""
        held: list[Any] = [v for state in self.optimizer.state.values() for v in state.values()]
        for kept in self._kept.values():
            held += [stored for name, stored in kept.flat.items() if name not in kept.places]
            held += kept.rest.values()
        return sum(value.nbytes for value in held if isinstance(value, Tensor))

    @property
    def disk_bytes(self) -> int:
        """The size of the states' file."""
        return 0 if self._file is None else self._file.num_bytes

    def close(self) -> None:
        """Forgets all states and gives the disk's space back."""
        self.clear()
        self._wide.clear()
        for kept in self._kept.values():
            kept.places = {}
        if self._file is not None:
            self._file.close()
            self._file = None

    def _placed(self, folder: Path, names: list[str]) -> MappedFile:
        """A file with a place for each leaf's states, in the order in which they are stepped."""
        dtypes = {leaf: self._stored_dtype(leaf) for leaf in self._kept}
        sizes = (mapped_bytes(leaf.numel(), dtype) for leaf, dtype in dtypes.items())
        file = MappedFile(folder, sum(sizes) * len(names))
        for leaf, kept in self._kept.items():
            kept.places = {name: file.take(leaf.numel(), dtypes[leaf]) for name in names}
        return file

    def _visit(self, leaf: Tensor, factor: float) -> None:
        """One step of one leaf; its state is in `optimizer.state` meanwhile."""
        kept = self._kept[leaf]
        if kept.flat or kept.rest:
            flat = {name: self._widened(name, stored, leaf) for name, stored in kept.flat.items()}
            rest = {name: _thick(value) for name, value in kept.rest.items()}
            self.optimizer.state[leaf] = {**flat, **rest}
        try:
            with self._only([leaf]):
                scaled_step(self.optimizer, factor)
            state = self.optimizer.state.get(leaf, {})
            kept.rest = {name: _thin(value) for name, value in state.items() if not _is_flat(value, leaf)}
            for name in state.keys() - kept.rest.keys():
                self._keep(kept, name, state[name])
        finally:
            self.optimizer.state.pop(leaf, None)

    def _widened(self, name: str, stored: Tensor, leaf: Tensor) -> Tensor:
        return stored if stored.dtype == leaf.dtype else self._wide_for(name, leaf).copy_(stored)

    def _keep(self, kept: _Kept, name: str, value: Tensor) -> None:
        if kept.flat.get(name) is value:
            return  # it was stepped where it is kept
        place = kept.flat[name] = self._place(kept, name, value)
        if not self._narrow:
            if place is not value:
                place.copy_(value)
            return
        wide = self._wide_for(name, value)
        if value.data_ptr() != wide.data_ptr():  # the optimizer made it: whose memory it is, it knows
            wide.copy_(value)
        self._rounding.round(wide, place, name, kept.position)

    def _place(self, kept: _Kept, name: str, value: Tensor) -> Tensor:
        """Where a state is kept from now on; `value` itself when it may be."""
        place = kept.places.get(name, kept.flat.get(name))
        if place is not None:
            return place
        dtype = self._stored_dtype(value)
        return value if dtype == value.dtype else torch.empty_like(value, dtype=dtype, requires_grad=False)

    def _stored_dtype(self, leaf: Tensor) -> torch.dtype:
        return torch.bfloat16 if self._narrow else leaf.dtype

    def _wide_for(self, name: str, leaf: Tensor) -> Tensor:
        if name not in self._wide:
            largest = max(leaf.numel() for leaf in self._kept)
            self._wide[name] = torch.empty(largest, dtype=leaf.dtype, device=leaf.device)
        return self._wide[name][: leaf.numel()]

    def _expect(self, leaf: Tensor) -> None:
        if self._masters is not None:
            self._masters.expect(leaf)
        if self._file is not None:
            for place in self._kept[leaf].places.values():
                self._file.expect(place)

    def _forget(self, leaf: Tensor) -> None:
        if self._masters is not None:
            self._masters.forget(leaf)
        if self._file is not None:
            for place in self._kept[leaf].places.values():
                self._file.forget(place)

    @contextmanager
    def _only(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Shows the optimizer these leaves alone, in their groups as the user left them."""
        whole = self.optimizer.param_groups
        chosen: dict[int, list[Tensor]] = {}
        for leaf in leaves:
            chosen.setdefault(self._kept[leaf].group, []).append(leaf)
        params = {index: whole[index]["params"] for index in chosen}
        try:
            for index, some in chosen.items():
                whole[index]["params"] = some
            self.optimizer.param_groups = [whole[index] for index in sorted(chosen)]
            yield
        finally:
            self.optimizer.param_groups = whole
            for index, every in params.items():
                whole[index]["params"] = every


def _is_flat(value: object, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape and value.dtype == leaf.dtype


def _thin(value: Any) -> Any:
    """A counter of the CPU, which can be read for nothing, as a number."""
    if isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
        return _Counter(value.item(), value.dtype)
    return value


def _thick(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Counter) else value
