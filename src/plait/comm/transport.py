"""The transport of a group's collectives: calls as values, and the protocol that transports implement."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from plait.comm.stats import WaitClock


class OpType(Enum):
    """Collectives and messages of a group of p ranks. A full tensor has p times the elements of a shard."""

    ALL_REDUCE = "all-reduce"  # source is out, on every rank
    REDUCE_SCATTER = "reduce-scatter"  # source: full; out: shard
    ALL_GATHER = "all-gather"  # source: shard, which may be the own range of out; out: full
    BROADCAST = "broadcast"  # source on the root, out elsewhere
    REDUCE = "reduce"  # source on every rank; out, which is source, on the root
    SCATTER = "scatter"  # source: full, on the root; out: shard
    GATHER = "gather"  # source: shard; out: full, on the root
    ALL_TO_ALL = "all-to-all"  # source and out: full, one range to and from each rank
    BARRIER = "barrier"
    SEND = "send"  # source; root is the receiver
    RECEIVE = "receive"  # out; root is the sender


@dataclass(frozen=True, slots=True)
class Call:
    """One communication, from this rank's side. Tensors are contiguous; groups of size 1 never get here."""

    op_type: OpType
    source: Tensor | None = None  # this rank's input
    out: Tensor | None = None  # this rank's output
    op: str = "sum"  # one of OPS of `collectives.py`
    root: int = 0  # group rank of the root, or of the peer of a send or receive
    label: str = ""  # name of the data, for errors: the unit

    @property
    def input(self) -> Tensor:
        assert self.source is not None, f"a {self.op_type.value} in which this rank has no input"
        return self.source

    @property
    def output(self) -> Tensor:
        assert self.out is not None, f"a {self.op_type.value} in which this rank has no output"
        return self.out

    def __str__(self) -> str:
        return f"{self.op_type.value} of {self.label}" if self.label else self.op_type.value


class Work:
    """A communication in progress. Its tensors are in use until `wait` returns."""

    def __init__(self, *waits: Callable[[], object], is_done: Callable[[], bool] | None = None) -> None:
        """`waits`: callables that complete it, in this order. `is_done`: whether none of them would block."""
        self._waits = list(waits)
        self._is_done = is_done
        self._clock: WaitClock | None = None
        self._operation: object = None

    def timed_by(self, clock: WaitClock | None, operation: object) -> "Work":
        """Return self, with `wait` counted by the clock as a wait for `operation`."""
        self._clock, self._operation = clock, operation
        return self

    @property
    def is_over(self) -> bool:
        """True if nothing is left to wait for. False before `wait` unless it completed at once."""
        return not self._waits

    def is_done(self) -> bool:
        """Return whether `wait` would return (or raise) at once, without making a stream wait. Polls the
        transport without blocking; False until `wait` on transports that cannot be polled."""
        return not self._waits or (self._is_done is not None and self._is_done())

    def wait(self) -> None:
        """Block until done (on CUDA: make the current stream wait). Raises CommError if a peer is lost."""
        if self._clock is None or not self._waits:
            self._finish()
        else:
            with self._clock.during(self._operation):
                self._finish()

    def _finish(self) -> None:
        while self._waits:
            self._waits[0]()  # kept if a signal interrupts it
            del self._waits[:1]
        self._is_done = self._operation = None  # they reference the tensors


class ReduceWork(Protocol):
    """A reduction in progress. `buffer_bytes`: held for what peers send, until it completes. `squares`: sum
    of squares of all that `into` has written, a float64 scalar, if the transport computes it."""

    buffer_bytes: int

    @property
    def squares(self) -> Tensor | None: ...

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        """Write the sum to `out` (or add it), in its dtype and in rank order, chunk by chunk.

        Yields each chunk of `out` when it is done, so that the caller can use it while it is in cache. `out`
        may be this rank's part of the input itself.
        """

    @property
    def is_ready(self) -> bool:
        """True if `into` is known not to wait for a peer."""

    def release(self) -> None:
        """After `into`: block until this rank's input may be overwritten."""


class Transport(Protocol):
    """Communication between at least two ranks. Calls are matched by their order in the group; sends and
    receives by their order between two ranks.

    Implemented by `ShmTransport`, `TorchTransport`, `SubgroupTransport` and `NullTransport`.
    """

    name: str
    is_direct: bool  # contributions to a sum are sent unreduced; the receiver adds them in a wide dtype
    shares_memory: bool  # ranks access each other's memory, if allocated by `empty` or `share`
    takes_mean: bool  # a mean costs no more than a sum

    def start(self, call: Call) -> Work:
        """Start a call and return. Raises CommError, as `Work.wait` and `run` do, when a rank is lost."""

    def run(self, call: Call) -> None:
        """Run a call to completion."""

    def exchange(
        self, call: Call, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Work:
        """Start messages to and from other group ranks, none of which waits for another of them. Between two
        ranks they are matched in start order. `call`: for errors."""

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str, wide: bool = False) -> ReduceWork:
        """Sum flat tensors: each rank gets its own range of the sum (`scatter`) or all of it. `tensor` is in
        use, and may be overwritten, until `ReduceWork.into` is exhausted. `wide`: see `start_scattered_sum`;
        only NCCL differs."""

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        """Return whether exchanging full narrow contributions beats widening and all-reducing them."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that peers read and write in place. Only if `shares_memory`."""

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros, the same memory on all ranks. Collective. If `shares_memory`."""

    def close(self) -> None:
        """Release all resources. Nothing may be called afterwards."""


class PartialReduceWork:
    """A sum whose terms are available once `pending` has completed."""

    def __init__(self, terms: list[Tensor], pending: Work, buffer_bytes: int = 0) -> None:
        self._terms = terms  # one per rank, in rank order; or a single one, the sum itself
        self._pending = pending
        self.buffer_bytes = buffer_bytes

    squares: Tensor | None = None

    @property
    def is_ready(self) -> bool:
        return self._pending.is_over

    def release(self) -> None:
        """Do nothing: peers received copies."""

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        self._pending.wait()
        first, *rest = self._terms
        length = max(1, out.numel()) if out.is_cuda else _CHUNK_NUMEL  # a GPU pays for every launch
        in_place = any(term.data_ptr() == out.data_ptr() for term in self._terms)
        if in_place and not rest:
            assert not add, "a sum added to itself"
            yield from out.split(length)
            return
        needs_scratch = rest and (add or in_place)
        scratch = torch.empty(length, dtype=out.dtype, device=out.device) if needs_scratch else None
        for start in range(0, out.numel(), length):
            chunk = out[start : start + length]
            if add and not rest:
                chunk.add_(first[start : start + length])
                yield chunk
                continue
            total = chunk if scratch is None else scratch[: chunk.numel()]
            total.copy_(first[start : start + length])
            for term in rest:
                total.add_(term[start : start + length])
            if add:
                chunk.add_(total)
            elif scratch is not None:
                chunk.copy_(total)
            yield chunk


class CountedWork:
    """A reduction whose waits are counted. Its first chunk waits; PartialReduceWork only adds after it."""

    def __init__(self, work: ReduceWork, clock: WaitClock, operation: str) -> None:
        self._work = work
        self._clock = clock
        self._operation = operation
        self.buffer_bytes = work.buffer_bytes

    @property
    def squares(self) -> Tensor | None:
        return self._work.squares

    @property
    def is_ready(self) -> bool:
        return self._work.is_ready

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        runs = self._work.into(out, add=add)
        with self._clock.during(self._operation):
            first = next(runs, None)
        if first is not None:
            yield first
            yield from runs

    def release(self) -> None:
        with self._clock.during(self._operation):
            self._work.release()


_CHUNK_NUMEL = 1 << 17  # elements: 512 KiB of float32


def narrow_reads_less(num_ranks: int, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether exchanging narrow contributions moves less memory than a wide all-reduce, on shared
    memory: every rank reads (p-1) extra narrow ones, where an all-reduce of wide ones reads and writes each
    once more."""
    return narrow.itemsize < wide.itemsize and (num_ranks - 1) * narrow.itemsize < 2 * wide.itemsize


def narrow_sends_less(num_ranks: int, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether exchanging narrow contributions sends less than a wide all-reduce, over Gloo: (p-1)
    narrow ones against 2 (p-1)/p wide ones."""
    return num_ranks * narrow.itemsize < 2 * wide.itemsize


class NullTransport:
    """A fake transport for dry runs, with the properties of the named one and no peers: calls are logged by
    the group and move nothing.

    It shows what a rank would communicate, by running the program on meta tensors in one process, for any
    number of ranks.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        """`name`: host, gloo or nccl."""
        self.name = name
        self.is_direct = name != "nccl"
        self.shares_memory = name == "host"
        self.takes_mean = name != "gloo"
        self._num_ranks = num_ranks

    def start(self, call: Call) -> Work:  # noqa: ARG002
        return Work()

    def run(self, call: Call) -> None: ...

    def exchange(self, call: Call, sends: object, receives: object) -> Work:  # noqa: ARG002
        return Work()

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str, wide: bool = False) -> ReduceWork:  # noqa: ARG002
        """Return the input as the sum, or one rank's range of it."""
        return PartialReduceWork([tensor[: tensor.numel() // self._num_ranks] if scatter else tensor], Work())

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        if self.shares_memory:
            return narrow_reads_less(self._num_ranks, narrow, wide)
        return self.is_direct and narrow_sends_less(self._num_ranks, narrow, wide)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device="meta")

    def close(self) -> None: ...
