"""Step an element-wise optimizer whose states are in memory, in bf16 or in a file, as the plan chooses.

[Note: streamed states]
In memory and full width, states are in `optimizer.state` and a step is torch's own, over all leaves at once.
Otherwise they are streamed: a leaf's states are loaded and widened, the optimizer steps with this leaf as its
only parameter, and the states are stored again. An element-wise optimizer updates a leaf independently of the
others, so the results are those of one step over all. Callers split leaves to at most CHUNK elements, so that
a chunk's weights, gradient and states stay in cache from one pass to the next.
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

CHUNK = 2**18  # elements of a leaf with streamed states
_AHEAD = 8  # leaves whose pages are prefetched while one is stepped


@dataclass(frozen=True)
class _Counter:
    """The value of a scalar tensor.

    Kept instead of the tensor: small allocations that outlive a leaf's first step fragment the heap between
    the next leaf's large ones, and it grew by a third of the size of all states.
    """

    value: float
    dtype: torch.dtype


@dataclass
class _LeafState:
    """A leaf's states between steps. `flat` and `counters` are empty before its first one."""

    group: int
    position: int
    flat: dict[str, Tensor] = field(default_factory=dict)  # as large as the leaf, in the stored dtype
    counters: dict[str, Any] = field(default_factory=dict)  # see `_pack_counter`
    mapped: dict[str, Tensor] = field(default_factory=dict)  # memory in the file, by name


class ChunkedOptimizer:
    """An optimizer that steps a few leaves at a time. See [Note: streamed states]."""

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
        """`optimizer` has all leaves; `kinds` are its states, from `state_kinds`.

        states      dtype in which states are stored; fp32 means the leaf's own dtype
        folder      where to put a file for states that are as large as the leaf; None: in memory
        masters     the file of the leaves themselves, if they are in one
        positions   each leaf's first element in its unit, a seed of rounding; default: its storage offset

        Raises ConfigError if the folder cannot hold the file.
        """
        self.optimizer = optimizer
        self._narrow = states == "bf16"
        self._masters = masters
        self._states = {
            leaf: _LeafState(index, leaf.storage_offset() if positions is None else positions[leaf])
            for index, group in enumerate(optimizer.param_groups)
            for leaf in group["params"]
        }
        self._streams = self._narrow or folder is not None or masters is not None
        self._rounding = StochasticRounding()
        self._wide: dict[str, Tensor] = {}  # scratch for widened states, by name, of the largest leaf's size
        self._file: MappedFile | None = None
        if folder is not None:
            names = sorted(name for name in kinds if "." not in name)
            self._file = self._map_states(folder, names)

    def step(self, leaves: Sequence[Tensor], factor: float, number: int) -> None:
        """Step these leaves, with gradients multiplied by `factor`; the gradients may be scaled in place.

        `number`: of the training step (with or without skipped ones, but each at most once). Every leaf is
        stepped once per training step, in one call or in several. On an exception the optimizer's groups are
        restored.
        """
        if not self._streams or not leaves:
            with self._only(leaves):
                scaled_step(self.optimizer, factor)
            return
        self._rounding.begin(number)
        self._prefetch(leaves[:_AHEAD])
        for index, leaf in enumerate(leaves):
            self._prefetch(leaves[index + _AHEAD : index + _AHEAD + 1])
            self._step_streamed(leaf, factor)
            self._evict(leaf)

    def state(self, leaf: Tensor) -> dict[str, Any]:
        """The leaf's state in the optimizer's own form; {} before the first step. Not copies, except of
        states that are stored narrow."""
        if not self._streams:
            return dict(self.optimizer.state.get(leaf, {}))
        leaf_state = self._states[leaf]
        wide = {name: stored.to(leaf.dtype) for name, stored in leaf_state.flat.items()}
        return {**wide, **{name: _unpack_counter(value) for name, value in leaf_state.counters.items()}}

    def load(self, leaf: Tensor, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. Takes ownership of the tensors; counters stay on their device."""
        if not self._streams:
            self.optimizer.state.pop(leaf, None)
            if state:
                self.optimizer.state[leaf] = dict(state)
            return
        leaf_state = self._states[leaf]
        leaf_state.flat, leaf_state.counters = {}, {}
        for name, value in state.items():
            if _is_flat(value, leaf):
                memory = self._memory_for(leaf_state, name, value)
                leaf_state.flat[name] = value if memory is value else memory.copy_(value)
            else:
                leaf_state.counters[name] = _pack_counter(value)
        self._evict(leaf)

    def clear(self) -> None:
        """Discard all states: the next step is the first."""
        self.optimizer.state.clear()
        for leaf_state in self._states.values():
            leaf_state.flat, leaf_state.counters = {}, {}

    @property
    def state_bytes(self) -> int:
        """Bytes of states in this rank's memory, without those of `disk_bytes` and one leaf's widened
        ones."""
        stored_values: list[Any] = [v for state in self.optimizer.state.values() for v in state.values()]
        for leaf_state in self._states.values():
            stored_values += [
                stored for name, stored in leaf_state.flat.items() if name not in leaf_state.mapped
            ]
            stored_values += leaf_state.counters.values()
        return sum(value.nbytes for value in stored_values if isinstance(value, Tensor))

    @property
    def disk_bytes(self) -> int:
        """Size of the states' file."""
        return 0 if self._file is None else self._file.num_bytes

    def close(self) -> None:
        """Discard all states and free the disk space."""
        self.clear()
        self._wide.clear()
        for leaf_state in self._states.values():
            leaf_state.mapped = {}
        if self._file is not None:
            self._file.close()
            self._file = None

    def _map_states(self, folder: Path, names: list[str]) -> MappedFile:
        """Create a file with memory for each leaf's states, in the order in which leaves are stepped."""
        dtypes = {leaf: self._stored_dtype(leaf) for leaf in self._states}
        sizes = (mapped_bytes(leaf.numel(), dtype) for leaf, dtype in dtypes.items())
        file = MappedFile(folder, sum(sizes) * len(names))
        for leaf, leaf_state in self._states.items():
            leaf_state.mapped = {name: file.allocate(leaf.numel(), dtypes[leaf]) for name in names}
        return file

    def _step_streamed(self, leaf: Tensor, factor: float) -> None:
        """Step one leaf; its state is in `optimizer.state` meanwhile."""
        leaf_state = self._states[leaf]
        if leaf_state.flat or leaf_state.counters:
            state = {
                name: stored if stored.dtype == leaf.dtype else self._wide_for(name, leaf).copy_(stored)
                for name, stored in leaf_state.flat.items()
            }
            counters = {name: _unpack_counter(value) for name, value in leaf_state.counters.items()}
            self.optimizer.state[leaf] = {**state, **counters}
        try:
            with self._only([leaf]):
                scaled_step(self.optimizer, factor)
            state = self.optimizer.state.get(leaf, {})
            leaf_state.counters = {
                name: _pack_counter(value) for name, value in state.items() if not _is_flat(value, leaf)
            }
            for name in state.keys() - leaf_state.counters.keys():
                self._store(leaf_state, name, state[name])
        finally:
            self.optimizer.state.pop(leaf, None)

    def _store(self, leaf_state: _LeafState, name: str, value: Tensor) -> None:
        if leaf_state.flat.get(name) is value:
            return  # it was stepped in place
        memory = leaf_state.flat[name] = self._memory_for(leaf_state, name, value)
        if not self._narrow:
            if memory is not value:
                memory.copy_(value)
            return
        wide = self._wide_for(name, value)
        if value.data_ptr() != wide.data_ptr():  # the optimizer allocated it
            wide.copy_(value)
        self._rounding.round(wide, memory, name, leaf_state.position)

    def _memory_for(self, leaf_state: _LeafState, name: str, value: Tensor) -> Tensor:
        """The memory in which a state is stored from now on; `value` itself if possible."""
        memory = leaf_state.mapped.get(name, leaf_state.flat.get(name))
        if memory is not None:
            return memory
        dtype = self._stored_dtype(value)
        return value if dtype == value.dtype else torch.empty_like(value, dtype=dtype, requires_grad=False)

    def _stored_dtype(self, leaf: Tensor) -> torch.dtype:
        return torch.bfloat16 if self._narrow else leaf.dtype

    def _wide_for(self, name: str, leaf: Tensor) -> Tensor:
        if name not in self._wide:
            largest = max(leaf.numel() for leaf in self._states)
            self._wide[name] = torch.empty(largest, dtype=leaf.dtype, device=leaf.device)
        return self._wide[name][: leaf.numel()]

    def _prefetch(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            for file, tensor in self._mapped(leaf):
                file.prefetch(tensor)

    def _evict(self, leaf: Tensor) -> None:
        for file, tensor in self._mapped(leaf):
            file.evict(tensor)

    def _mapped(self, leaf: Tensor) -> Iterator[tuple[MappedFile, Tensor]]:
        """Yield the leaf and its states, those that are in a file, each with its file."""
        if self._masters is not None:
            yield self._masters, leaf
        if self._file is not None:
            for memory in self._states[leaf].mapped.values():
                yield self._file, memory

    @contextmanager
    def _only(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Restrict the optimizer to these leaves, in their groups with the user's options."""
        all_groups = self.optimizer.param_groups
        chosen: dict[int, list[Tensor]] = {}
        for leaf in leaves:
            chosen.setdefault(self._states[leaf].group, []).append(leaf)
        params = {index: all_groups[index]["params"] for index in chosen}
        try:
            for index, selected in chosen.items():
                all_groups[index]["params"] = selected
            self.optimizer.param_groups = [all_groups[index] for index in sorted(chosen)]
            yield
        finally:
            self.optimizer.param_groups = all_groups
            for index, all_leaves in params.items():
                all_groups[index]["params"] = all_leaves


def _is_flat(value: object, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape and value.dtype == leaf.dtype


def _pack_counter(value: Any) -> Any:
    """A CPU counter, which is free to read, as a number."""
    if isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
        return _Counter(value.item(), value.dtype)
    return value


def _unpack_counter(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Counter) else value
