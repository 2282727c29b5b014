"""Verbs between the ranks of one host, through memory that they share. The work is done in `native/`.

[Note: who owns a call's tensors]
A call that was started is executed by a thread in C, which knows addresses and not tensors: the link holds on
to the tensors of every call until it is over, also when nobody waits for it.

How ranks of one host come to form a group.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.shm import native_lib
from plait.comm.shm.arena import Arena, Mapping, as_tensor, reserve
from plait.comm.shm.native_calls import check_device, described, described_sum, in_words, reducible
from plait.comm.shm.rendezvous import HostPeers, open_peers
from plait.comm.transport import Call, OpType, Work, narrow_is_less_to_read
from plait.errors import CommError

_GONE, _LATE, _OTHER_SIZE = -1, -2, -4
_PENDING = 1
_SLICE_NS = 100_000_000  # a wait comes back to Python this often, for signals


@dataclass(frozen=True)
class Waits:
    """How long a rank waits for others."""

    timeout_s: float  # for one that lives
    spin_ns: int  # before it sleeps
    helper_spin_ns: int  # the same for calls that were started: the program computes meanwhile

    @classmethod
    def of(cls, num_ranks: int, timeout_s: float) -> "Waits":
        """Spinning takes the processor from the rank that is waited for where ranks outnumber processors."""
        crowded = num_ranks > len(os.sched_getaffinity(0))
        return cls(timeout_s, 1_000 if crowded else 50_000, 1_000 if crowded else 5_000)


class ShmTransport:
    """A group of ranks of one host."""

    name = "host"
    is_direct = True
    shares = True

    def __init__(
        self,
        neighbours: HostPeers,
        ranks: tuple[int, ...],
        place: int,
        control: Mapping,
        waits: Waits,
        *,
        is_own: bool = False,
    ) -> None:
        """`control`: the group's segment, of `pl_control_bytes`. `is_own`: this link alone has the
        `neighbours`."""
        self._owned = neighbours if is_own else None
        self._clib = neighbours.clib
        self._ranks = ranks
        self._place = place
        self._waits = waits
        self._arena: Arena | None = neighbours.arena
        self._mappings = [neighbours.mappings[rank] for rank in ranks]  # as long as peers' tensors are read
        self._control: Mapping | None = control
        self._files = (ctypes.c_int * len(ranks))(*(neighbours.files[rank] for rank in ranks))
        bases = (ctypes.c_void_p * len(ranks))(*(m.address for m in self._mappings))
        handle = self._clib.pl_open(
            control.address,
            len(ranks),
            place,
            bases,
            neighbours.arena.mapping.num_bytes,
            self._files,
            int(waits.timeout_s * 1e9),
            waits.spin_ns,
            waits.helper_spin_ns,
        )
        assert handle, "no memory for a group"
        self._handle: int | None = handle
        self._held: deque[tuple[int, Call]] = deque()  # see [Note: who owns a call's tensors]
        self._messages: list[_Message] = []
        self._lock = threading.Lock()  # of these two: calls may be started and waited for by several threads

    # --- the protocol

    def run(self, call: Call) -> None:
        if call.verb in (OpType.SEND, OpType.RECEIVE):
            self.start(call).wait()
            return
        code = self._clib.pl_run(self._open, ctypes.byref(described(call, len(self._ranks))))
        if code:
            raise self._error(call)

    def start(self, call: Call) -> Work:
        if call.verb in (OpType.SEND, OpType.RECEIVE):
            return self._start_message(call)
        about = described(call, len(self._ranks))
        with self._lock:
            self._forget_finished()
            ticket = self._clib.pl_start(self._open, ctypes.byref(about))
            self._held.append((ticket, call))
        return Work(
            lambda: self._finish(ticket, call),
            is_done=lambda: self._clib.pl_wait(self._open, ticket, 0) != _PENDING,
        )

    def start_sum(self, given: Tensor, *, scatter: bool, label: str) -> "ShmReduceWork":
        call = Call(OpType.REDUCE_SCATTER if scatter else OpType.ALL_REDUCE, label=label)
        check_device(call, given)
        buffer_bytes = 0
        if not self.arena.owns(given):
            own = self.arena.empty(given.numel(), given.dtype)
            buffer_bytes = own.nbytes
            given = own.copy_(given)
        return ShmReduceWork(self, given, call, scatter, buffer_bytes)

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        return narrow_is_less_to_read(len(self._ranks), narrow, wide)

    def cut(self) -> None:
        """Calls under way fail, here and on the peers."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._clib.pl_close(handle)
            self._held.clear()
            self._messages.clear()
            self._mappings.clear()  # whoever still holds the group then holds nobody's memory
            self._control = self._arena = None
            if self._owned is not None:
                self._owned.close()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.arena.empty(numel, dtype)

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        """One flat tensor of zeros, the same memory on all ranks of the group, which all have to ask for
        it."""
        num_bytes = max(1, numel * dtype.itemsize)
        about = torch.zeros(3, dtype=torch.int64)
        fd = -1
        if self._place == 0:
            fd = os.memfd_create("plait-shared", os.MFD_CLOEXEC)
            try:
                reserve(fd, 0, num_bytes)
            except CommError as error:
                about[2] = 1
                refused: CommError | None = error
            else:
                refused = None
            about[0], about[1] = os.getpid(), fd
        self.run(Call(OpType.BROADCAST, about, about, label="shared memory"))
        pid, number, failed = about.tolist()
        if failed:
            if self._place == 0:
                os.close(fd)
                assert refused is not None
                raise refused
            raise CommError("there is too little memory for what the ranks share", given=f"{num_bytes} bytes")
        if self._place:
            fd = open_peers(pid, number)
        try:
            mapping = Mapping(self._clib, fd, num_bytes)
            self.run(Call(OpType.BARRIER, label="shared memory"))  # all have opened it
        finally:
            os.close(fd)
        return as_tensor(mapping.address, numel, dtype, mapping)

    # --- calls

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "a verb on a group whose world is closed"
        return self._arena

    @property
    def _open(self) -> int:
        assert self._handle is not None, "a verb on a group whose world is closed"
        return self._handle

    def _finish(self, ticket: int, call: Call) -> None:
        code = _PENDING
        while code == _PENDING:
            code = self._clib.pl_wait(self._open, ticket, _SLICE_NS)
        with self._lock:
            self._forget_finished()
        if code:
            raise self._error(call)

    def _forget_finished(self) -> None:
        while self._held and self._clib.pl_wait(self._open, self._held[0][0], 0) != _PENDING:
            self._held.popleft()

    def _start_message(self, call: Call) -> Work:
        tensor = call.given if call.verb is OpType.SEND else call.taken
        check_device(call, tensor)
        if call.root == self._place:
            raise CommError(f"{call.verb.value} to oneself", given=f"rank {self._ranks[self._place]}")
        with self._lock:
            self._messages = [message for message in self._messages if message.wait(0)[0] == _PENDING]
            message = _Message(self, call.verb is OpType.SEND, call.root, tensor)
            self._messages.append(message)
        return Work(
            lambda: self._finish_message(message, call, tensor),
            is_done=lambda: message.wait(0)[0] != _PENDING,
        )

    def _finish_message(self, message: "_Message", call: Call, tensor: Tensor) -> None:
        code, found = _PENDING, 0
        while code == _PENDING:
            code, found = message.wait(_SLICE_NS)
        with self._lock:
            if message in self._messages:
                self._messages.remove(message)
        if code == _OTHER_SIZE and found not in (0, tensor.nbytes):
            raise CommError(
                f"{call} failed: two ranks mean different messages",
                given=f"rank {self._ranks[call.root]} sent {found} bytes, "
                f"rank {self._ranks[self._place]} expected {tensor.nbytes}",
            )
        if code:
            raise self._error(call)

    # --- errors

    def _error(self, call: Call) -> CommError:
        failure = native_lib.NativeFailure()
        self._clib.pl_failure_of(self._open, ctypes.byref(failure))
        rank = self._ranks[failure.peer]
        if failure.code == _GONE:
            return CommError(
                f"{call} failed: rank {rank} is gone",
                given="it ended, or left the group, while others waited for it",
                hint="look for the first rank that ended: its message is the cause",
            )
        if failure.code == _LATE:
            return CommError(
                f"{call} failed: rank {rank} did not come within {self._waits.timeout_s:g} s",
                given="it lives, but hangs or does something else",
                hint=f"py-spy dump of rank {rank}'s process; connect(timeout_s=...) if it is only slow",
            )
        if failure.code == _OTHER_SIZE:
            return CommError(
                f"{call} failed: the group has been given up",
                given=f"rank {rank} sent a message of another size than was expected",
            )
        said = native_lib.NativeSaid()
        lines = []
        for place, rank in enumerate(self._ranks):
            self._clib.pl_last_said(self._open, place, ctypes.byref(said))
            lines.append(f"rank {rank}: {in_words(said, self._ranks)}")
        return CommError(
            f"{call} failed: the ranks mean different calls",
            given="\n            ".join(lines),
            hint="the same calls in the same order on every rank; after a failure the group is of no use",
        )


class _Message:
    """One on its way, with its tensor. In C it lives as long as this."""

    def __init__(self, link: ShmTransport, sends: bool, peer: int, tensor: Tensor) -> None:
        function = link._clib.pl_send if sends else link._clib.pl_receive
        self._link = link
        self._tensor = tensor
        self._handle = function(link._open, peer, tensor.data_ptr(), tensor.nbytes)
        assert self._handle, "no memory for a message"

    def wait(self, most_ns: int) -> tuple[int, int]:
        """The code, and the bytes that the sender's message has where that is known."""
        found = ctypes.c_uint64(0)
        wait = self._link._clib.pl_message_wait
        return wait(self._link._open, self._handle, most_ns, ctypes.byref(found)), found.value

    def __del__(self) -> None:
        if self._link._handle is not None:
            self._link._clib.pl_message_free(self._link._handle, self._handle)


class ShmReduceWork:
    """A sum that each rank adds up for itself, straight from where its peers' contributions lie."""

    def __init__(
        self, link: ShmTransport, given: Tensor, call: Call, scatter: bool, buffer_bytes: int
    ) -> None:
        """`call`: names it in letters, and holds no tensors: the arena holds on to this sum until peers have
        read what it gave."""
        self.buffer_bytes = buffer_bytes
        self.squares: Tensor | None = None
        self._link = link
        self._call = call
        self._given: Tensor | None = given  # until it was added up here; then the arena knows when it is read
        self._begin = given.numel() // len(link._ranks) * link._place if scatter else 0
        number = ctypes.c_uint32(0)
        about = described_sum(given, call.label)
        if link._clib.pl_sum_start(link._open, ctypes.byref(about), ctypes.byref(number)):
            raise link._error(call)
        self._number = number.value

    @property
    def is_ready(self) -> bool:
        """Whether every rank has given its part: `into` will not wait."""
        return bool(self._link._clib.pl_sum_is_ready(self._link._open, self._number))

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        """In one run: squares are taken on the way, and a large sum is written past the cache."""
        link, squares = self._link, ctypes.c_double(0.0)
        assert self._given is not None, "a sum that is added up twice"
        try:
            failed = link._clib.pl_sum_into(
                link._open,
                self._number,
                out.data_ptr(),
                reducible("sum", out.dtype),
                self._begin,
                out.numel(),
                1.0,
                int(add),
                ctypes.byref(squares),
            )
            if failed:
                raise link._error(self._call)
            self.squares = torch.tensor(squares.value, dtype=torch.float64)
            if out.numel():
                yield out
        finally:  # also when nobody wants the rest: this and later sums end when all of us say so
            if link._handle is not None:
                link._clib.pl_sum_done(link._handle, self._number)
                if not self._is_read():
                    link.arena.defer(self._given, self._is_read)
            self._given = None

    def release(self) -> None:
        """Returns when the peers have read what this rank gave: it may be overwritten."""
        if self._link._handle is not None and self._link._clib.pl_sum_release(self._link._open, self._number):
            raise self._link._error(self._call)

    def _is_read(self) -> bool:
        link = self._link
        return link._handle is None or bool(link._clib.pl_sum_is_released(link._handle, self._number))


_LOOK_S = 0.001  # how often the board is read at first; a rank that waits long looks less often
_LOOK_SELDOM_S = 0.02


@dataclass(frozen=True)
class Mailbox:
    """Where ranks leave words for each other: a store."""

    leave: Callable[[str, str], object]
    has: Callable[[str], bool]
    read: Callable[[str], str]

    @classmethod
    def of(cls, store: dist.Store) -> "Mailbox":
        return cls(store.set, lambda key: store.check([key]), lambda key: bytes(store.get(key)).decode())


def open_group(
    neighbours: HostPeers,
    ranks: tuple[int, ...],
    place: int,
    board: Mailbox,
    key: str,
    timeout: timedelta,
    *,
    is_own: bool = False,
) -> ShmTransport:
    """The group of these ranks, who all call it with the same `key`, which nobody has used before. The first
    makes the control segment and leaves word of it. `is_own`: the link closes `neighbours` when it is cut.

    Raises CommError when a rank does not come.
    """
    size = neighbours.clib.pl_control_bytes(len(ranks))
    if place == 0:
        fd = os.memfd_create("plait-group", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        board.leave(key, f"{os.getpid()} {fd}")
    else:
        word = _find(board, key, neighbours, ranks, 0, timeout.total_seconds())
        try:
            fd = open_peers(*map(int, word.split()))
        except OSError as error:
            raise _missing(ranks, f"rank {ranks[0]} is gone") from error
    try:
        waits = Waits.of(len(neighbours.ranks), timeout.total_seconds())
        link = ShmTransport(
            neighbours, ranks, place, Mapping(neighbours.clib, fd, size), waits, is_own=is_own
        )
        try:
            link.run(Call(OpType.BARRIER, label="a new group"))  # all have opened what the first one holds
        except CommError as error:
            link.cut()
            raise _missing(ranks, error.fact.partition("failed: ")[2]) from error
    finally:
        os.close(fd)
    return link


def _find(
    board: Mailbox, key: str, neighbours: HostPeers, ranks: tuple[int, ...], peer: int, timeout_s: float
) -> str:
    """The word that a rank leaves. Raises CommError when it is gone, or does not come."""
    until_s, pause_s = time.monotonic() + timeout_s, _LOOK_S
    while True:
        is_here = neighbours.is_here(ranks[peer])  # asked first: it may have left word and gone since
        if board.has(key):
            return board.read(key)
        if not is_here:
            raise _missing(ranks, f"rank {ranks[peer]} is gone")
        if time.monotonic() > until_s:
            raise _missing(ranks, f"rank {ranks[peer]} did not come within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_SELDOM_S)


def _missing(ranks: tuple[int, ...], what: str) -> CommError:
    return CommError(
        f"the group of ranks {list(ranks)} cannot form: {what}",
        hint="all ranks of a group ask for it at the same point of the program",
    )
