"""What carries the verbs of a group: calls as values, and the protocol that transports fulfil."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from plait.comm.stats import WaitClock


class OpType(Enum):
    """What ranks can do together. p ranks; whole tensors have p times the elements of a piece."""

    ALL_REDUCE = "all-reduce"  # source is out, on every rank
    REDUCE_SCATTER = "reduce-scatter"  # source: whole; out: piece
    ALL_GATHER = "all-gather"  # source: piece, which may be the own range of out; out: whole
    BROADCAST = "broadcast"  # source at the root, which is out elsewhere
    REDUCE = "reduce"  # source everywhere; out, which is source, at the root
    SCATTER = "scatter"  # source: whole, at the root; out: piece
    GATHER = "gather"  # source: piece; out: whole, at the root
    ALL_TO_ALL = "all-to-all"  # source and out: whole, one range for and from each rank
    BARRIER = "barrier"
    SEND = "send"  # source; root is the receiver
    RECEIVE = "receive"  # out; root is the sender


@dataclass(frozen=True, slots=True)
class Call:
    """One communication, as this rank takes part in it. Tensors are contiguous; size 1 never comes here."""

    verb: OpType
    source: Tensor | None = None  # what this rank gives
    out: Tensor | None = None  # what it gets
    op: str = "sum"  # sum, mean, max, min
    root: int = 0  # a place in the group: of the one that differs from the others, or of the other one
    label: str = ""  # of what: the unit's name, for errors

    @property
    def given(self) -> Tensor:
        assert self.source is not None, f"a {self.verb.value} in which this rank gives nothing"
        return self.source

    @property
    def taken(self) -> Tensor:
        assert self.out is not None, f"a {self.verb.value} in which this rank gets nothing"
        return self.out

    def __str__(self) -> str:
        return f"{self.verb.value} of {self.label}" if self.label else self.verb.value


class Work:
    """A communication under way. The tensors it was given are in use until `wait` returns."""

    def __init__(self, *waits: Callable[[], object], is_done: Callable[[], bool] | None = None) -> None:
        """`waits`: what is to be called, in this order, to end it. `is_done`: whether none would block."""
        self._waits = list(waits)
        self._is_done = is_done
        self._clock: WaitClock | None = None
        self._what: object = None

    def by(self, clock: WaitClock | None, what: object) -> "Work":
        """Itself, its `wait` counted by the clock as the communication `what`."""
        self._clock, self._what = clock, what
        return self

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for. What can only be found out by waiting is not over."""
        return not self._waits

    def is_done(self) -> bool:
        """Whether `wait` would return (or raise) at once, and no stream would wait either. Asks the
        transport, without waiting; False, until it was waited for, where only waiting can tell."""
        return not self._waits or (self._is_done is not None and self._is_done())

    def wait(self) -> None:
        """Blocks until done (on CUDA: makes the current stream wait). Raises CommError if a peer is lost."""
        if self._clock is None or not self._waits:
            self._end()
        else:
            with self._clock.during(self._what):
                self._end()

    def _end(self) -> None:
        while self._waits:
            self._waits[0]()  # interrupted by a signal, it is still to be done
            del self._waits[:1]
        self._is_done = self._what = None  # which hold the tensors too


class ReduceWork(Protocol):
    """A sum over ranks under way. `buffer_bytes`: held for what peers send, until it is over. `squares`: of
    all that `into` has written, a float64 scalar, if the transport takes them on the way."""

    buffer_bytes: int

    @property
    def squares(self) -> Tensor | None: ...

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        """Fills `out` with the sum (adds it there), in its dtype and in rank order, run by run.

        Yields each run of `out` as it is done, for whatever else is to be done with it in the cache. `out`
        may be this rank's part of what was given itself.
        """

    @property
    def is_ready(self) -> bool:
        """Whether `into` is known not to wait for a peer."""

    def release(self) -> None:
        """After `into`: returns when what this rank gave may be overwritten."""


class Transport(Protocol):
    """Carries what at least two ranks say to each other. Calls are matched by their order in the group;
    sends and receives by their order between two ranks."""

    name: str
    is_direct: bool  # contributions to a sum travel as they are and are added up wide, by their owners
    shares: bool  # ranks read and write each other's memory, if it is of `empty` or `share`

    def start(self, call: Call) -> Work:
        """Returns at once. Raises CommError, as `Work.wait` and `run` do, when a rank is lost."""

    def run(self, call: Call) -> None:
        """The same, to its end."""

    def start_sum(self, given: Tensor, *, scatter: bool, label: str) -> ReduceWork:
        """Sums flat tensors, each rank's own range of them (`scatter`) or all. `given` is in use, and may be
        overwritten, until `ReduceWork.into` is through."""

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        """Whether a sum of whole narrow contributions on every rank beats widening them and all-reducing."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Where the transport shares: a flat tensor that peers read and write where it lies."""

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Where the transport shares: one flat tensor of zeros, the same memory on all ranks of the group,
        which all have to ask for it."""

    def cut(self) -> None:
        """Lets go of everything. Nothing may be called afterwards."""


class PartialReduceWork:
    """A sum whose terms are here when `pending` has been waited for."""

    def __init__(self, parts: list[Tensor], pending: Work, buffer_bytes: int = 0) -> None:
        self._parts = parts  # one per rank, in rank order; a single one that is the sum already
        self._pending = pending
        self.buffer_bytes = buffer_bytes

    squares: Tensor | None = None

    @property
    def is_ready(self) -> bool:
        return self._pending.is_over

    def release(self) -> None:
        """Peers got copies."""

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        self._pending.wait()
        first, *others = self._parts
        length = max(1, out.numel()) if out.is_cuda else _CACHED  # a GPU pays for every launch
        in_place = any(part.data_ptr() == out.data_ptr() for part in self._parts)
        if in_place and not others:
            assert not add, "a sum added to itself"
            yield from out.split(length)
            return
        needs_scratch = others and (add or in_place)
        scratch = torch.empty(length, dtype=out.dtype, device=out.device) if needs_scratch else None
        for start in range(0, out.numel(), length):
            run = out[start : start + length]
            if add and not others:
                run.add_(first[start : start + length])
                yield run
                continue
            total = run if scratch is None else scratch[: run.numel()]
            total.copy_(first[start : start + length])
            for part in others:
                total.add_(part[start : start + length])
            if add:
                run.add_(total)
            elif scratch is not None:
                run.copy_(total)
            yield run


class CountedWork:
    """A sum whose waiting is counted. Its first run waits; PartialReduceWork only adds up after it."""

    def __init__(self, summing: ReduceWork, clock: WaitClock, what: str) -> None:
        self._summing = summing
        self._clock = clock
        self._what = what
        self.buffer_bytes = summing.buffer_bytes

    @property
    def squares(self) -> Tensor | None:
        return self._summing.squares

    @property
    def is_ready(self) -> bool:
        return self._summing.is_ready

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        runs = self._summing.into(out, add=add)
        with self._clock.during(self._what):
            first = next(runs, None)
        if first is not None:
            yield first
            yield from runs

    def release(self) -> None:
        with self._clock.during(self._what):
            self._summing.release()


_CACHED = 1 << 17  # elements: 512 KiB of float32


def narrow_is_less_to_read(num_ranks: int, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Where ranks share memory, every rank reads all contributions: (p-1) narrow ones more than it has to,
    where an all-reduce of wide ones reads and writes each once more."""
    return narrow.itemsize < wide.itemsize and (num_ranks - 1) * narrow.itemsize < 2 * wide.itemsize


def narrow_is_less_to_send(num_ranks: int, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Over Gloo: (p-1) narrow contributions against 2 (p-1)/p wide ones."""
    return num_ranks * narrow.itemsize < 2 * wide.itemsize
