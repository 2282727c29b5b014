"""State of one server: master weights, optimizer states and the sum of the step's gradients, by chunk.

[Note: no torn reads]
Each chunk has a lock, under which it is updated and copied out: a worker gets all of a chunk from before an
update or all of it from after. Small chunks, which are updated by one call of the optimizer,
share a lock. Which updates a worker gets is decided by the clocks, see `clocks.py`.

[Note: sums in rank order]
The gradients of a step are added in the order of the workers' ranks, whatever the order in which they came.
So every run has the same bits, which are also the bits of a reduce-scatter over the same ranks.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm import sum_into
from plait.comm.connection import Message, as_bytes
from plait.engine.optimizer import load_options
from plait.engine.spec import TrainingSpec
from plait.optim.clip import clip_values, squared_norm
from plait.optim.flat_optimizer import FlatSlice, make_optimizer
from plait.optim.stepper import ChunkedOptimizer
from plait.optim.update_kinds import state_kinds
from plait.server.clocks import AppliedOnce
from plait.server.protocol import MAX_NUMEL, Chunk, Verb, mask_of

# The gradient that a worker has pushed for a chunk of this server, by worker and the chunk's index.
Gradients = Callable[[int, int], Tensor]


class ServerState:
    """The chunks of one server. Thread-safe."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        spec: TrainingSpec,
        dtype: torch.dtype,
        forward: Callable[[Message], object],
    ) -> None:
        """`dtype`: of master weights and gradients. `forward`: called before each change, with what has the
        same effect on a replica. Raises ConfigError for the optimizer's arguments."""
        self.chunks = chunks
        self._forward = forward
        numel = sum(chunk.numel for chunk in chunks)
        self._master, self._sums = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        ends = torch.tensor([0, *(chunk.numel for chunk in chunks)]).cumsum(0).tolist()
        self._slices = [
            FlatSlice.from_views(chunk.group, self._master[start:stop], self._sums[start:stop])
            for chunk, start, stop in zip(chunks, ends, ends[1:], strict=False)
        ]
        optimizer, arguments = spec.given.optimizer, spec.given.optimizer_args
        self.kinds = sorted(state_kinds(optimizer, arguments, spec.groups))
        self._optimizer = make_optimizer(optimizer, arguments, self._slices, spec.groups)
        self._chunked = ChunkedOptimizer(self._optimizer, self.kinds)
        self._clip_value = spec.given.clip_value
        self._batches = _batches(chunks)
        locks = [threading.Lock() for _ in self._batches]
        self._chunk_locks = [locks[number] for number, batch in enumerate(self._batches) for _ in batch]
        self._lock = threading.Lock()  # of the sums and the optimizer
        self._applied = AppliedOnce()
        self._summed: tuple[int, tuple[int, ...]] | None = None
        self._squares = 0.0

    def sum(self, clock: int, workers: tuple[int, ...], gradients: Gradients) -> float:
        """Add up the workers' gradients of a clock, once; return the sum's squared norm."""
        with self._lock:
            return self._sum(clock, workers, gradients)

    def load_sum(self, clock: int, workers: tuple[int, ...], payload: Tensor) -> None:
        """Take the sum that the server of this replica has forwarded."""
        parts = payload.view(self._sums.dtype).split([chunk.numel for chunk in self.chunks])
        with self._lock:
            self._add_up(clock, workers, ([part] for part in parts))

    def _sum(self, clock: int, workers: tuple[int, ...], gradients: Gradients) -> float:
        if self._summed == (clock, workers) or self._applied.has(clock, workers):
            return self._squares  # if it has been applied, its workers may write the next gradient
        chunks = range(len(self.chunks))
        self._add_up(clock, workers, ([gradients(worker, index) for worker in workers] for index in chunks))
        sums = as_bytes(self._sums)
        self._forward(Message(Verb.SUM, clock=clock, value=mask_of(workers), payload=sums))
        return self._squares

    def _add_up(
        self, clock: int, workers: tuple[int, ...], contributions: Iterable[Sequence[Tensor]]
    ) -> None:
        """`contributions`: of each chunk, in the order of [Note: sums in rank order]."""
        self._summed = None
        squares = []
        for flat, parts in zip(self._slices, contributions, strict=True):
            total = flat.leaf.grad
            assert total is not None, "a chunk without a sum"
            squares.append(_sum_into(total, parts))
        self._squares = float(torch.stack(squares).sum()) if squares else 0.0
        self._summed = (clock, workers)

    def apply(
        self, clock: int, workers: tuple[int, ...], update: Mapping[str, Any], gradients: Gradients
    ) -> bool:
        """Step the optimizer with the sum of these gradients, unless that was done before; return whether it
        was done now. `update`: the gradients' factor, and the options of the optimizer's groups."""
        with self._lock:
            if self._applied.has(clock, workers):
                return False
            self._sum(clock, workers, gradients)
            self._forward(Message.of_json(Verb.APPLY, update, clock=clock, value=mask_of(workers)))
            self._applied.record(clock, workers)
            self._summed = None
            options = {key: _option(value) for key, value in update["options"].items()}
            load_options(self._optimizer, options, options.__getitem__)
            for batch in self._batches:
                leaves = [self._slices[index].leaf for index in batch]
                factor = update["factor"]
                if self._clip_value is not None:
                    sums = [leaf.grad for leaf in leaves if leaf.grad is not None]
                    clip_values(sums, factor, self._clip_value)
                    factor = 1.0
                with self._chunk_locks[batch[0]]:
                    self._chunked.step(leaves, factor, clock)
            return True

    def read(self, index: int, into: Tensor | None = None) -> Tensor:
        """Copy a chunk's weights; see [Note: no torn reads]."""
        weights = self._slices[index].leaf.detach()
        with self._chunk_locks[index]:
            return weights.clone() if into is None else into.copy_(weights)

    # --- saving and loading

    def read_state(self, index: int) -> list[Tensor]:
        """A chunk's weights and states, in the order of `kinds`, as flat tensors; no states before the first
        step. Counters are of one element, in float64."""
        with self._lock:
            leaf = self._slices[index].leaf
            state = self._chunked.state(leaf)
            values = [_saved(kind, state) for kind in self.kinds] if state else []
            return [leaf.detach().clone(), *values]

    def write_state(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Load what `read_state` returned."""
        with self._lock, torch.no_grad():
            leaf, (weights, *values) = self._slices[index].leaf, tensors
            with self._chunk_locks[index]:
                leaf.copy_(weights)
            self._chunked.load(leaf, self._state_of(values))

    def _state_of(self, values: Sequence[Tensor]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for kind, value in zip(self.kinds, values, strict=False):
            form, _, name = kind.rpartition(".")
            if form == "number":
                number = value.item()
                state[name] = int(number) if number == int(number) else number
            else:
                state[name] = value.to(torch.float32).view(()) if form == "scalar" else value
        return state

    def forget_updates(self) -> None:
        """Begin another training: its clocks may be lower."""
        with self._lock:
            self._applied, self._summed = AppliedOnce(), None


def _batches(chunks: Sequence[Chunk]) -> list[range]:
    """Successive chunks of at most MAX_NUMEL elements together, for one call of the optimizer."""
    batches: list[range] = []
    numel = 0
    for index, chunk in enumerate(chunks):
        numel += chunk.numel
        if not batches or numel > MAX_NUMEL:
            batches.append(range(index, index))
            numel = chunk.numel
        batches[-1] = range(batches[-1].start, index + 1)
    return batches


def _sum_into(total: Tensor, contributions: Sequence[Tensor]) -> Tensor:
    """Write the sum of the contributions, in their order, and return its squared norm."""
    squares = sum_into(total, contributions)
    if squares is None:
        total.copy_(contributions[0])
        for contribution in contributions[1:]:
            total.add_(contribution)
        squares = squared_norm(total)
    return squares


def _option(value: float | bool) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _saved(kind: str, state: Mapping[str, Any]) -> Tensor:
    form, _, name = kind.rpartition(".")
    value = state[name]
    return torch.tensor([float(value)], dtype=torch.float64) if form else value.detach().clone()
