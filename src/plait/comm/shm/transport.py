"""Collectives between the ranks of one host, through shared memory. Implemented in `native/`.

[Note: lifetime of a call's tensors]
A started call is executed by a C thread, which has addresses and not tensors: the transport references the
tensors of every call until it completes, even if nothing waits for it.
"""

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.shm.arena import Arena, Mapping, as_tensor, reserve
from plait.comm.shm.native_lib import (
    NativeCallInfo,
    NativeFailure,
    call_text,
    check_device,
    reduce_dtype_code,
    to_native_call,
    to_native_sum,
)
from plait.comm.shm.rendezvous import HostPeers, connect_host_peers, open_peer_file
from plait.comm.transport import Call, OpType, Transport, Work, narrow_reads_less
from plait.errors import CommError

_GONE, _LATE, _SIZE_MISMATCH, _DAMAGED = -1, -2, -4, -5
_PENDING = 1
_WAIT_SLICE_NS = 100_000_000  # a wait returns to Python this often, to handle signals
_SPIN_NS, _CROWDED_SPIN_NS = 50_000, 1_000  # of a rank that waits for others, before it sleeps
_HELPER_SPIN_NS = 5_000  # the same for started calls: the program computes meanwhile


class ShmTransport:
    """The transport of a group of ranks of one host."""

    name = "host"
    is_direct = True
    shares_memory = True
    takes_mean = True

    def __init__(
        self,
        peers: HostPeers,
        ranks: tuple[int, ...],
        group_rank: int,
        control: Mapping,
        timeout_s: float,
        *,
        is_own: bool = False,
    ) -> None:
        """`control`: the group's segment, of `pl_control_bytes`. `timeout_s`: of a wait for a live rank.
        `is_own`: the transport closes `peers`."""
        self._owned_peers = peers if is_own else None
        self._clib = peers.clib
        self._ranks = ranks
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._arena: Arena | None = peers.arena
        self._mappings = [peers.mappings[rank] for rank in ranks]  # mapped while peers' tensors are read
        self._control: Mapping | None = control
        self._files = (ctypes.c_int * len(ranks))(*(peers.files[rank] for rank in ranks))
        bases = (ctypes.c_void_p * len(ranks))(*(m.address for m in self._mappings))
        # With more ranks than processors, spinning takes the processor from the rank that is waited for.
        is_crowded = len(peers.ranks) > len(os.sched_getaffinity(0))
        handle = self._clib.pl_open(
            control.address,
            len(ranks),
            group_rank,
            bases,
            peers.arena.mapping.num_bytes,
            self._files,
            int(timeout_s * 1e9),
            _CROWDED_SPIN_NS if is_crowded else _SPIN_NS,
            _CROWDED_SPIN_NS if is_crowded else _HELPER_SPIN_NS,
        )
        assert handle, "no memory for a group"
        self._handle: int | None = handle
        # Another thread may be in a call, with the handle, while one closes: see the note in native/group.h.
        weakref.finalize(self, self._clib.pl_free, handle).atexit = False
        self._in_flight: deque[tuple[int, Call]] = deque()  # see [Note: lifetime of a call's tensors]
        self._messages: list[_ShmMessage] = []
        self._lock = threading.Lock()  # of these two: several threads may start calls and wait

    # --- the protocol

    def run(self, call: Call) -> None:
        if call.op_type in (OpType.SEND, OpType.RECEIVE):
            self.start(call).wait()
            return
        code = self._clib.pl_run(self._open_handle, ctypes.byref(to_native_call(call, len(self._ranks))))
        if code:
            raise self._error(call)

    def start(self, call: Call) -> Work:
        if call.op_type in (OpType.SEND, OpType.RECEIVE):
            return self._start_message(call)
        native_call = to_native_call(call, len(self._ranks))
        with self._lock:
            self._drop_finished()
            ticket = self._clib.pl_start(self._open_handle, ctypes.byref(native_call))
            self._in_flight.append((ticket, call))
        return Work(
            lambda: self._finish(ticket, call),
            is_done=lambda: self._clib.pl_wait(self._open_handle, ticket, 0) != _PENDING,
        )

    def exchange(
        self, call: Call, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Work:
        works = [
            self._start_message(Call(OpType.SEND, tensor, root=peer, label=call.label))
            for tensor, peer in sends
        ]
        works += [
            self._start_message(Call(OpType.RECEIVE, out=tensor, root=peer, label=call.label))
            for tensor, peer in receives
        ]
        return Work(*(work.wait for work in works), is_done=lambda: all(work.is_done() for work in works))

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str, wide: bool = False) -> "ShmReduceWork":  # noqa: ARG002
        call = Call(OpType.REDUCE_SCATTER if scatter else OpType.ALL_REDUCE, label=label)
        check_device(call, tensor)
        buffer_bytes = 0
        if not self.arena.owns(tensor):
            own = self.arena.empty(tensor.numel(), tensor.dtype)
            buffer_bytes = own.nbytes
            tensor = own.copy_(tensor)
        return ShmReduceWork(self, tensor, call, scatter, buffer_bytes)

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        return narrow_reads_less(len(self._ranks), narrow, wide)

    def close(self) -> None:
        """Close. Calls in progress fail, here and on the peers."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._clib.pl_close(handle)
            self._in_flight.clear()
            self._messages.clear()
            self._mappings.clear()  # a group that is still referenced keeps no memory
            self._control = self._arena = None
            if self._owned_peers is not None:
                self._owned_peers.close()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.arena.empty(numel, dtype)

    def share(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return one flat tensor of zeros, the same memory on all ranks of the group. Collective."""
        num_bytes = max(1, numel * dtype.itemsize)
        descriptor = torch.zeros(4, dtype=torch.int64)  # pid, fd, whether rank 0 failed, bytes
        descriptor[3] = num_bytes
        refusal = CommError(
            "too little memory for the ranks' shared memory",
            given=f"{num_bytes} bytes",
            expected="free memory, and space in /dev/shm",
            hint="fewer ranks on this host, or a higher memory limit of the container",
        )
        if self._group_rank == 0:
            fd = os.memfd_create("plait-shared", os.MFD_CLOEXEC)
            descriptor[0], descriptor[1] = os.getpid(), fd
            try:
                reserve(fd, 0, num_bytes)
            except CommError as error:
                descriptor[2], refusal = 1, error
                os.close(fd)
        self.run(Call(OpType.BROADCAST, descriptor, descriptor, label="shared memory"))
        pid, peer_fd, failed, first_bytes = descriptor.tolist()
        if failed:
            raise refusal
        if num_bytes != first_bytes:  # beyond the end of the file a rank would die
            raise CommError(
                "the ranks share a tensor of different sizes",
                given=f"{num_bytes} bytes, and {first_bytes} on the group's first rank",
                expected="the same model, plan and versions of libraries on all ranks",
                hint="the same arguments on every rank",
            )
        if self._group_rank:
            fd = open_peer_file(pid, peer_fd)
        try:
            mapping = Mapping(self._clib, fd, num_bytes)
            self.run(Call(OpType.BARRIER, label="shared memory"))  # all have opened it
        finally:
            os.close(fd)
        return as_tensor(mapping.address, numel, dtype, mapping)

    # --- calls

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "a collective on a group whose world is closed"
        return self._arena

    @property
    def _open_handle(self) -> int:
        assert self._handle is not None, "a collective on a group whose world is closed"
        return self._handle

    def _finish(self, ticket: int, call: Call) -> None:
        code = _PENDING
        while code == _PENDING:
            code = self._clib.pl_wait(self._open_handle, ticket, _WAIT_SLICE_NS)
        with self._lock:
            self._drop_finished()
        if code:
            raise self._error(call)

    def _drop_finished(self) -> None:
        while self._in_flight and self._clib.pl_wait(self._open_handle, self._in_flight[0][0], 0) != _PENDING:
            self._in_flight.popleft()

    def _start_message(self, call: Call) -> Work:
        tensor = call.input if call.op_type is OpType.SEND else call.output
        check_device(call, tensor)
        if call.root == self._group_rank:
            raise CommError(
                f"{call.op_type.value} to the same rank",
                given=f"rank {self._ranks[self._group_rank]}",
                expected="another rank",
                hint="out.copy_(tensor)",
            )
        with self._lock:
            self._messages = [message for message in self._messages if message.wait(0)[0] == _PENDING]
            message = _ShmMessage(self, call.op_type is OpType.SEND, call.root, tensor)
            self._messages.append(message)
        return Work(
            lambda: self._finish_message(message, call, tensor),
            is_done=lambda: message.wait(0)[0] != _PENDING,
        )

    def _finish_message(self, message: "_ShmMessage", call: Call, tensor: Tensor) -> None:
        code, num_bytes_sent = _PENDING, 0
        while code == _PENDING:
            code, num_bytes_sent = message.wait(_WAIT_SLICE_NS)
        with self._lock:
            if message in self._messages:
                self._messages.remove(message)
        if code == _SIZE_MISMATCH and num_bytes_sent not in (0, tensor.nbytes):
            raise CommError(
                f"{call} failed: the sizes of the message differ",
                given=f"rank {self._ranks[call.root]} sent {num_bytes_sent} bytes, "
                f"rank {self._ranks[self._group_rank]} expected {tensor.nbytes}",
            )
        if code:
            raise self._error(call)

    # --- errors

    def _error(self, call: Call) -> CommError:
        failure = NativeFailure()
        self._clib.pl_failure_of(self._open_handle, ctypes.byref(failure))
        is_known = 0 <= failure.peer < len(self._ranks)  # shared memory may be damaged
        rank = self._ranks[failure.peer] if is_known else -1
        if failure.code == _GONE:
            return CommError(
                f"{call} failed: rank {rank} is gone",
                given="it ended, or left the group, while others waited for it",
                hint="look for the first rank that ended: its error is the cause",
            )
        if failure.code == _LATE:
            return CommError(
                f"{call} failed: rank {rank} did not arrive within {self._timeout_s:g} s",
                given="it is alive, but hangs or runs something else",
                hint=f"py-spy dump of rank {rank}'s process; connect(timeout_s=...) if it is only slow",
            )
        if failure.code == _SIZE_MISMATCH:
            return CommError(
                f"{call} failed: the group has failed before",
                given=f"rank {rank} sent a message of an unexpected size",
            )
        if failure.code == _DAMAGED:
            return CommError(
                f"{call} failed: the memory that the ranks share is damaged",
                given=f"the description of rank {rank}'s tensor points outside of its memory",
                hint="look for code that writes beyond a tensor's end; transport='gloo' shares no memory",
            )
        info = NativeCallInfo()
        lines = []
        for group_rank, rank in enumerate(self._ranks):
            self._clib.pl_last_said(self._open_handle, group_rank, ctypes.byref(info))
            lines.append(f"rank {rank}: {call_text(info, self._ranks)}")
        return CommError(
            f"{call} failed: the ranks made different calls",
            given="\n".join(lines),
            hint="make the same calls in the same order on every rank; a failed group stays unusable",
        )


class _ShmMessage:
    """A message in progress, with its tensor. Its C object lives as long as this one."""

    def __init__(self, transport: ShmTransport, is_send: bool, peer: int, tensor: Tensor) -> None:
        function = transport._clib.pl_send if is_send else transport._clib.pl_receive
        self._transport = transport
        self._tensor = tensor
        self._handle = function(transport._open_handle, peer, tensor.data_ptr(), tensor.nbytes)
        assert self._handle, "no memory for a message, or a closed group"

    def wait(self, max_ns: int) -> tuple[int, int]:
        """Return the code, and the size of the sender's message if it is known."""
        num_bytes_sent = ctypes.c_uint64(0)
        wait = self._transport._clib.pl_message_wait
        return wait(
            self._transport._open_handle, self._handle, max_ns, ctypes.byref(num_bytes_sent)
        ), num_bytes_sent.value

    def __del__(self) -> None:
        if self._transport._handle is not None:
            self._transport._clib.pl_message_free(self._transport._handle, self._handle)


class ShmReduceWork:
    """A sum that each rank adds up for itself, directly from its peers' contributions."""

    def __init__(
        self, transport: ShmTransport, tensor: Tensor, call: Call, scatter: bool, buffer_bytes: int
    ) -> None:
        """`call`: for errors, without tensors: the arena references this work until peers have read its
        input."""
        self.buffer_bytes = buffer_bytes
        self.squares: Tensor | None = None
        self._transport = transport
        self._call = call
        self._input: Tensor | None = tensor  # until it is added up here; then the arena defers its reuse
        self._begin = tensor.numel() // len(transport._ranks) * transport._group_rank if scatter else 0
        number = ctypes.c_uint32(0)
        native_call = to_native_sum(tensor, call.label)
        if transport._clib.pl_sum_start(
            transport._open_handle, ctypes.byref(native_call), ctypes.byref(number)
        ):
            raise transport._error(call)
        self._number = number.value

    @property
    def is_ready(self) -> bool:
        """True once every rank has contributed: then `into` does not wait."""
        return bool(self._transport._clib.pl_sum_is_ready(self._transport._open_handle, self._number))

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        """Write the sum as one chunk: squares are computed on the fly, and large sums bypass the cache."""
        transport, squares = self._transport, ctypes.c_double(0.0)
        assert self._input is not None, "`into` was called twice"
        try:
            failed = transport._clib.pl_sum_into(
                transport._open_handle,
                self._number,
                out.data_ptr(),
                reduce_dtype_code("sum", out.dtype),
                self._begin,
                out.numel(),
                1.0,
                int(add),
                ctypes.byref(squares),
            )
            if failed:
                raise transport._error(self._call)
            self.squares = torch.tensor(squares.value, dtype=torch.float64)
            if out.numel():
                yield out
        finally:  # also if the caller stops early: this and later sums end when all ranks are done
            if transport._handle is not None:
                transport._clib.pl_sum_done(transport._handle, self._number)
                if not self._is_read():
                    transport.arena.defer(self._input, self._is_read)
            self._input = None

    def release(self) -> None:
        """Block until the peers have read this rank's input: it may be overwritten."""
        if self._transport._handle is not None and self._transport._clib.pl_sum_release(
            self._transport._open_handle, self._number
        ):
            raise self._transport._error(self._call)

    def _is_read(self) -> bool:
        transport = self._transport
        return transport._handle is None or bool(
            transport._clib.pl_sum_is_released(transport._handle, self._number)
        )


_POLL_S = 0.001  # initial interval; it grows while a rank waits
_MAX_POLL_S = 0.02


def open_group(
    peers: HostPeers,
    ranks: tuple[int, ...],
    group_rank: int,
    store: dist.Store,
    key: str,
    timeout: timedelta,
    *,
    is_own: bool = False,
) -> ShmTransport:
    """Return the transport of these ranks, which all call it with the same unused `key`. Group rank 0 creates
    the control segment and sets the key to its address. `is_own`: the transport closes `peers`.

    Raises CommError when a rank does not arrive.
    """
    size = peers.clib.pl_control_bytes(len(ranks))
    if group_rank == 0:
        fd = os.memfd_create("plait-group", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        store.set(key, f"{os.getpid()} {fd}")
    else:
        _wait_for_key(store, key, peers, ranks, timeout.total_seconds())
        try:
            fd = open_peer_file(*map(int, store.get(key).split()))
        except OSError as error:
            raise _group_error(ranks, f"rank {ranks[0]} is gone") from error
    try:
        control = Mapping(peers.clib, fd, size)
        transport = ShmTransport(peers, ranks, group_rank, control, timeout.total_seconds(), is_own=is_own)
        try:
            transport.run(Call(OpType.BARRIER, label="a new group"))  # all have opened the control segment
        except CommError as error:
            transport.close()
            raise _group_error(ranks, error.fact.partition("failed: ")[2]) from error
    finally:
        os.close(fd)
    return transport


def open_host_group(
    base: Transport, rank: int, size: int, store: dist.Store, timeout: timedelta
) -> tuple[ShmTransport | None, str]:
    """Return a transport of all ranks of `base`, or None and why they share no memory. Collective."""
    peers, hosts, reason = connect_host_peers(rank, size, base, wanted=True)
    if peers is not None and len(set(hosts)) == 1:
        return open_group(peers, tuple(range(size)), rank, store, peers.key, timeout, is_own=True), ""
    if peers is not None:
        peers.close()
    return None, reason or f"{len(set(hosts))} hosts"


def _wait_for_key(
    store: dist.Store, key: str, peers: HostPeers, ranks: tuple[int, ...], timeout_s: float
) -> None:
    """Block until group rank 0 has set the key. Raises CommError when it is gone or does not arrive."""
    deadline_s, poll_s = time.monotonic() + timeout_s, _POLL_S
    while True:
        is_alive = peers.is_alive(ranks[0])  # checked first: it may have set it and ended since
        if store.check([key]):
            return
        if not is_alive:
            raise _group_error(ranks, f"rank {ranks[0]} is gone")
        if time.monotonic() > deadline_s:
            raise _group_error(ranks, f"rank {ranks[0]} did not arrive within {timeout_s:g} s")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _MAX_POLL_S)


def _group_error(ranks: tuple[int, ...], reason: str) -> CommError:
    return CommError(
        f"the group of ranks {list(ranks)} cannot be created: {reason}",
        hint="all ranks of a group must create it at the same point of the program",
    )
