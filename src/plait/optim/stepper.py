"""Step an optimizer whose states are in memory, in bf16, in 8-bit codes or in a file, as the plan chooses.

[Note: streamed states]
In memory and full width, states are in `optimizer.state` and a step is torch's own, over all leaves at once.
Otherwise they are streamed: a leaf's states are loaded and widened, the optimizer steps with this leaf as its
only parameter, and the states are stored again. Those of AdamW8bit are: see `adamw_8bit.py`. An element-wise
optimizer updates a leaf independently of the others: the results are the same as of one step over all.
Callers split leaves to at most CHUNK elements, so that a chunk's weights, gradient and states stay in cache
from one pass to the next.

[Note: leaves in files]
What a file holds is stepped in a block's buffer (see `disk_tensors.py`): the optimizer's parameter is then a
copy of the leaf. Leaves whose weights share a page of the file are one block. The mapping of the file is for
all other accesses: initial weights, saving and loading, between the updates.

[Note: stochastic rounding of states]
bf16 has 8 bits of mantissa: a relative change of less than 1/512 is lost. `exp_avg_sq` with beta2 = 0.999
moves by 1/1000 of its distance per step, so rounding to nearest freezes it at its first value. Rounding up
with a probability equal to the truncated fraction is unbiased (Gupta et al. 2015, 1502.02551; Zamirai et al.
2020, 2010.06192).

The noise is a function of the training step, the state's name and the element's position, so that repeating a
step, also after a resume, gives the same bits. Elements _PERIOD apart share their noise; it is independent
from step to step.
"""

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plait.optim.adamw_8bit import AdamW8bit, dequantize, quantize, stored_bytes
from plait.optim.disk_tensors import DiskPipeline, MappedFile, PageSpan, mapped_bytes
from plait.optim.flat_optimizer import MixedOptimizer, scaled_step

_PERIOD = 8192  # elements: 32 KB of noise, which stay in the L1 cache


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
    is_coded: bool  # in 8-bit codes
    flat: dict[str, Tensor] = field(default_factory=dict)  # of all elements, as they are stored
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
        targets: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """`optimizer` has all leaves; `kinds` are its states, from `state_kinds`.

        states      dtype in which states are stored; fp32 means the leaf's own dtype
        folder      where to put a file for states that are as large as the leaf; None: in memory
        masters     the file of the leaves themselves, if they are in one
        positions   each leaf's first element in its unit, a seed of rounding and the origin of blocks, in
                    the order in which leaves are stepped; default: its storage offset
        targets     where to round a leaf's updated weights to, while they are in cache

        Raises ConfigError if the folder cannot hold the file.
        """
        self.optimizer = optimizer
        self._narrow = states == "bf16"
        self._masters = masters
        self._states = {
            leaf: _LeafState(index, leaf.storage_offset() if positions is None else positions[leaf], is_coded)
            for index, (group, is_coded) in enumerate(_groups(optimizer))
            for leaf in group["params"]
        }
        self._order = [*(self._states if positions is None else positions)]
        self._streams = self._narrow or folder is not None or masters is not None
        self._rounding = _StochasticRounding()
        self._wide: dict[str, Tensor] = {}  # scratch for widened states, by name, of the largest leaf's size
        self._file: MappedFile | None = None
        if folder is not None:
            names = sorted(name for name in kinds if "." not in name)
            self._file = self._map_states(folder, names)
        self._targets = targets or {}
        self._spans: dict[Tensor, list[PageSpan]] = {}  # of a leaf's block, for leaves that have one
        self._block_of: dict[Tensor, int] = {}
        self._pipeline: DiskPipeline | None = None
        if blocks := self._make_blocks():
            self._pipeline = DiskPipeline(blocks)

    @property
    def leaves(self) -> Sequence[Tensor]:
        """All leaves, in the order in which they are stepped."""
        return self._order

    def options(self, leaf: Tensor) -> dict[str, Any]:
        """The options of the leaf's group."""
        return self.optimizer.param_groups[self._states[leaf].group]

    def step(self, leaves: Sequence[Tensor], factor: float, number: int, *, finish: bool = True) -> None:
        """Step these leaves, with gradients multiplied by `factor`; the gradients may be scaled in place.

        `number`: of the training step (with or without skipped ones, but each at most once). Every leaf is
        stepped once per training step, in one call or in several; `finish=False` if another call, or
        `finish`, follows at once. On an exception the optimizer's groups are restored. Raises RunError if a
        file cannot be read or written; some leaves have then been stepped.
        """
        streamed = [leaf for leaf in leaves if self._is_streamed(leaf)]
        if len(streamed) < len(leaves) or not leaves:
            with self._only({}, [leaf for leaf in leaves if not self._is_streamed(leaf)]):
                scaled_step(self.optimizer, factor)
        if not streamed:
            return
        self._rounding.begin(number)
        try:
            for block, in_block in itertools.groupby(streamed, self._block_of.get):
                self._step_block(block, in_block, factor)
            if finish:
                self.finish()
        except BaseException:
            if self._pipeline is not None:
                self._pipeline.abandon()
            raise

    def finish(self) -> None:
        """Wait until updated leaves and states are in their files. Raises RunError."""
        if self._pipeline is not None:
            self._pipeline.finish()

    def state(self, leaf: Tensor) -> dict[str, Any]:
        """The leaf's state in the optimizer's own form; {} before the first step. Not copies, except of
        states that are stored narrow."""
        if not self._is_streamed(leaf):
            return dict(self.optimizer.state.get(leaf, {}))
        leaf_state = self._states[leaf]
        wide = {
            name: self._widen(stored, torch.empty_like(leaf, requires_grad=False), name, leaf)
            if leaf_state.is_coded
            else stored.to(leaf.dtype)
            for name, stored in leaf_state.flat.items()
        }
        return {**wide, **{name: _unpack_counter(value) for name, value in leaf_state.counters.items()}}

    def load(self, leaf: Tensor, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. Takes ownership of the tensors; counters stay on their device."""
        if not self._is_streamed(leaf):
            self.optimizer.state.pop(leaf, None)
            if state:
                self.optimizer.state[leaf] = dict(state)
            return
        leaf_state = self._states[leaf]
        leaf_state.flat, leaf_state.counters = {}, {}
        for name, value in state.items():
            if _is_flat(value, leaf):
                memory = leaf_state.mapped.get(name, leaf_state.flat.get(name))
                memory = self._new_memory(leaf, value) if memory is None else memory
                if leaf_state.is_coded:
                    quantize(value, memory, leaf_state.position, name)
                elif memory is not value:
                    memory.copy_(value)
                leaf_state.flat[name] = memory
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
        """Bytes of states in this rank's memory, without `disk_bytes` and one leaf's widened states."""
        stored_values: list[Any] = [v for state in self.optimizer.state.values() for v in state.values()]
        for leaf_state in self._states.values():
            stored_values += [
                stored for name, stored in leaf_state.flat.items() if name not in leaf_state.mapped
            ]
            stored_values += leaf_state.counters.values()
        return sum(value.nbytes for value in stored_values if isinstance(value, Tensor))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the blocks of files in memory."""
        return 0 if self._pipeline is None else self._pipeline.nbytes

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
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._block_of.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _map_states(self, folder: Path, names: list[str]) -> MappedFile:
        """Create a file with memory for each leaf's states, in the order in which leaves are stepped."""
        forms = {leaf: self._stored_form(leaf) for leaf in self._order}
        file = MappedFile(folder, sum(mapped_bytes(*form) for form in forms.values()) * len(names))
        for leaf, form in forms.items():
            self._states[leaf].mapped = {name: file.allocate(*form) for name in names}
        return file

    def _make_blocks(self) -> list[list[PageSpan]]:
        """The spans of each block. See [Note: leaves in files]."""
        blocks: list[list[PageSpan]] = []
        for leaf in self._order:
            spans = [PageSpan(file, *file.pages(tensor)) for file, tensor in self._mapped(leaf)]
            if not spans:
                continue
            merged = _merged(spans)
            if self._masters is not None and blocks and merged[0].start < blocks[-1][0].stop:
                merged = _merged([*blocks.pop(), *spans])
            blocks.append(merged)
            self._block_of[leaf] = len(blocks) - 1
        self._spans = {leaf: blocks[index] for leaf, index in self._block_of.items()}
        return blocks

    def _step_block(self, block: int | None, leaves: Iterable[Tensor], factor: float) -> None:
        """Step leaves of one block, or leaves in memory."""
        if block is None or self._pipeline is None:
            for leaf in leaves:
                self._step_streamed(leaf, leaf, {}, factor)
            return
        memory = self._pipeline.load(block)
        for leaf in leaves:
            parameter = leaf
            if self._masters is not None:
                parameter = self._staged(memory, leaf, self._masters, leaf).detach().requires_grad_()
                parameter.grad = leaf.grad
            staged = {
                name: self._staged(memory, leaf, self._file, mapped)
                for name, mapped in self._states[leaf].mapped.items()
                if self._file is not None
            }
            self._step_streamed(leaf, parameter, staged, factor)
        self._pipeline.store()

    def _staged(self, memory: Tensor, leaf: Tensor, file: MappedFile, tensor: Tensor) -> Tensor:
        """The copy in `memory`, which holds the leaf's block, of a tensor in a file."""
        position, base = file.offset(tensor), 0
        for span in self._spans[leaf]:
            if span.file is file and span.start <= position < span.stop:
                start = base + position - span.start
                return memory[start : start + tensor.nbytes].view(tensor.dtype)
            base += span.num_bytes
        raise AssertionError("the tensor is not in the leaf's block")

    def _step_streamed(
        self, leaf: Tensor, parameter: Tensor, staged: Mapping[str, Tensor], factor: float
    ) -> None:
        """Step one leaf; its state is in `optimizer.state` meanwhile.

        `parameter`: the leaf, or its copy in a block's buffer; `staged`: copies of states there.
        """
        leaf_state = self._states[leaf]
        if leaf_state.flat or leaf_state.counters:
            stored = {name: staged.get(name, memory) for name, memory in leaf_state.flat.items()}
            state = {
                name: memory
                if memory.dtype == leaf.dtype
                else self._widen(memory, self._wide_for(name, leaf), name, leaf)
                for name, memory in stored.items()
            }
            counters = {name: _unpack_counter(value) for name, value in leaf_state.counters.items()}
            self.optimizer.state[parameter] = {**state, **counters}
        try:
            with self._only({leaf: parameter}, [leaf]):
                scaled_step(self.optimizer, factor)
            state = self.optimizer.state.get(parameter, {})
            leaf_state.counters = {
                name: _pack_counter(value) for name, value in state.items() if not _is_flat(value, leaf)
            }
            for name in state.keys() - leaf_state.counters.keys():
                self._store(leaf, name, state[name], staged.get(name, leaf_state.flat.get(name)))
        finally:
            self.optimizer.state.pop(parameter, None)
        if leaf in self._targets:
            self._targets[leaf].copy_(parameter.detach())

    def _store(self, leaf: Tensor, name: str, value: Tensor, memory: Tensor | None) -> None:
        """Store a state in `memory`; None: in memory that it gets now."""
        leaf_state = self._states[leaf]
        if memory is not value:  # otherwise it was stepped in place
            memory = self._new_memory(leaf, value) if memory is None else memory
            if leaf_state.is_coded:
                quantize(value, memory, leaf_state.position, name)
            elif self._narrow:
                wide = self._wide_for(name, value)
                if value.data_ptr() != wide.data_ptr():  # the optimizer allocated it
                    wide.copy_(value)
                self._rounding.round(wide, memory, name, leaf_state.position)
            elif memory is not value:
                memory.copy_(value)
        leaf_state.flat[name] = leaf_state.mapped.get(name, memory)

    def _widen(self, stored: Tensor, wide: Tensor, name: str, leaf: Tensor) -> Tensor:
        """Write a state that is stored narrow to `wide`."""
        leaf_state = self._states[leaf]
        return (
            dequantize(stored, wide, leaf_state.position, name) if leaf_state.is_coded else wide.copy_(stored)
        )

    def _new_memory(self, leaf: Tensor, value: Tensor) -> Tensor:
        """The memory in which a state is stored from now on; `value` itself if possible."""
        numel, dtype = self._stored_form(leaf)
        return value if dtype == value.dtype else torch.empty(numel, dtype=dtype, device=value.device)

    def _stored_form(self, leaf: Tensor) -> tuple[int, torch.dtype]:
        """Number of elements and dtype of the memory of one of the leaf's states."""
        leaf_state = self._states[leaf]
        if leaf_state.is_coded:
            return stored_bytes(leaf.numel(), leaf_state.position), torch.uint8
        return leaf.numel(), torch.bfloat16 if self._narrow else leaf.dtype

    def _is_streamed(self, leaf: Tensor) -> bool:
        return self._streams or self._states[leaf].is_coded

    def _wide_for(self, name: str, leaf: Tensor) -> Tensor:
        if name not in self._wide:
            largest = max(leaf.numel() for leaf in self._states if self._is_streamed(leaf))
            self._wide[name] = torch.empty(largest, dtype=leaf.dtype, device=leaf.device)
        return self._wide[name][: leaf.numel()]

    def _evict(self, leaf: Tensor) -> None:
        for file, tensor in self._mapped(leaf):
            file.evict(tensor)

    def _mapped(self, leaf: Tensor) -> Iterator[tuple[MappedFile, Tensor]]:
        """Yield the leaf and its states as far as they are in a file, each with its file."""
        if self._masters is not None:
            yield self._masters, leaf
        if self._file is not None:
            for memory in self._states[leaf].mapped.values():
                yield self._file, memory

    @contextmanager
    def _only(self, copies: Mapping[Tensor, Tensor], leaves: Sequence[Tensor]) -> Iterator[None]:
        """Restrict the optimizer to these leaves, or `copies` of them, in their groups with the user's
        options."""
        all_groups = self.optimizer.param_groups
        chosen: dict[int, list[Tensor]] = {}
        for leaf in leaves:
            chosen.setdefault(self._states[leaf].group, []).append(copies.get(leaf, leaf))
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


def _merged(spans: Iterable[PageSpan]) -> list[PageSpan]:
    """The same pages, in as few spans as possible: adjacent and overlapping spans of a file are merged."""
    merged: list[PageSpan] = []
    by_file: dict[MappedFile, list[PageSpan]] = {}
    for span in spans:
        by_file.setdefault(span.file, []).append(span)
    for of_file in by_file.values():
        first, *others = sorted(of_file, key=lambda span: span.start)
        merged.append(first)
        for span in others:
            if span.start <= merged[-1].stop:
                merged[-1] = replace(merged[-1], stop=max(merged[-1].stop, span.stop))
            else:
                merged.append(span)
    return merged


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the groups, and whether their states are stored in codes."""
    for group in optimizer.param_groups:
        own = optimizer.by_name[group["optimizer"]] if isinstance(optimizer, MixedOptimizer) else optimizer
        yield group, isinstance(own, AdamW8bit)


def _is_flat(value: object, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape and value.dtype == leaf.dtype


def _pack_counter(value: Any) -> Any:
    """A CPU counter, which is free to read, as a number."""
    if isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
        return _Counter(value.item(), value.dtype)
    return value


def _unpack_counter(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Counter) else value


class _StochasticRounding:
    """Rounds float32 to bf16 with the noise of one training step."""

    def __init__(self) -> None:
        self._number = -1
        self._noise: dict[tuple[str, torch.device], Tensor] = {}

    def begin(self, number: int) -> None:
        """Use the noise of training step `number` from now on."""
        if number != self._number:
            self._noise.clear()
        self._number = number

    def round(self, wide: Tensor, narrow: Tensor, name: str, position: int) -> None:
        """Round a contiguous `wide`, which is overwritten, into `narrow`. `position`: of its first element.

        Values that bf16 represents stay unchanged; a NaN becomes infinite.
        """
        if wide.dtype != torch.float32:
            wide = wide.float()
        # With noise, a NaN whose mantissa is all ones would overflow into a zero.
        wide.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        bits = wide.view(torch.int32)
        first = position % _PERIOD
        noise = self._noise_for(name, wide.device)[first : first + _PERIOD]
        body = bits.numel() // _PERIOD * _PERIOD
        bits[:body].view(-1, _PERIOD).add_(noise)
        bits[body:].add_(noise[: bits.numel() - body])
        narrow.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def _noise_for(self, name: str, device: torch.device) -> Tensor:
        """16 random bits per element of a period, repeated once: a period may start at any position."""
        key = name, device
        if key not in self._noise:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._number}/{name}".encode()))
            period = torch.randint(2**16, (_PERIOD,), generator=generator, dtype=torch.int32)
            noise = torch.cat([period, period])
            if device.type == "cuda":
                noise = noise.pin_memory()  # or the copy would block
            self._noise[key] = noise.to(device, non_blocking=True)
        return self._noise[key]
