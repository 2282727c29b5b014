"""Verbs over a process group of torch: NCCL, Gloo, or whatever else it was made with.

[Note: ranges straight to their owners]
Between CPU ranks bytes cost compute, and Gloo's ring moves them more often than needed: on 2 ranks its
reduce-scatter of 33.7 M float32 takes 130 ms, its all-gather of as many bf16 69 ms. Where it is the
transport, every rank sends each owner its range and each owner adds what it received (52 ms); an
all-gather sends the own range to every peer, into the place where it is read (18 ms). Both move the
least bytes there are, (p-1)/p of the tensor per rank. Sums are added in the order of ranks, whoever
adds: equal bits everywhere.

[Note: narrow tensors on the wire, wide sums]
bf16 gradients are to be summed in float32. An owner that adds what it received can widen it first, so
contributions travel as they are and the sum is float32: half the bytes. For an all-reduce, sending
one's whole contribution to every peer, which adds, moves (p-1) x 2 bytes per element, against
2(p-1)/p x 4 for a widened ring: half for 2 ranks, three quarters for 3, no gain from 4 on. NCCL's bytes
cost no compute: there contributions are widened and its own collectives do the work.

[Note: names of groups]
`torch.distributed.new_group(use_local_synchronization=True)` lets members meet under a name that it makes of
their ranks and of how many groups this process has made. Members that have made different numbers, such as
the first and a middle stage of a pipeline, would wait for each other under different names. So the name is
ours, the same on all of them.

[Note: who asks Gloo whether a message is through]
Gloo's `is_completed` of a send or a receive is false until somebody has waited for it, and a wait with a time
limit breaks the connection when the limit passes. So the first who asks has a thread of the link wait, in the
order of the questions. Who waits and never asks needs no thread.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.comm_thread import CommThread
from plait.comm.transport import Call, OpType, PartialReduceWork, ReduceWork, Work, narrow_is_less_to_send
from plait.errors import CommError

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_world = dist.distributed_c10d._world  # the tables by which torch's functions know a group

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # and divided afterwards: Gloo has no mean
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class TorchTransport:
    """The process group behind a group; its world cuts it when it closes.

    Whoever still holds the group then holds nothing of torch's: Gloo's threads end with the last
    reference to it, and have to before Python does, or they take the process down.
    """

    def __init__(
        self, handle: dist.ProcessGroup | None, ranks: tuple[int, ...], place: int, *, is_own: bool = False
    ) -> None:
        """`ranks`: of the process group, as its program numbers them. `place`: this one's among them.
        `is_own`: nobody else knows the process group, so that it ends with the link."""
        assert handle is not None, "no process group"
        self._handle: dist.ProcessGroup | None = handle
        self._ranks = ranks
        self._place = place
        self._is_own = is_own
        self._aside: CommThread | None = None  # from the first question on
        self.name = str(dist.get_backend(handle))
        self.is_direct = self.name == "gloo"
        self.shares = False

    @property
    def handle(self) -> dist.ProcessGroup:
        assert self._handle is not None, "a verb on a group whose world is closed"
        return self._handle

    def cut(self) -> None:
        if self._aside is not None:
            self._aside.close()
        handle, self._handle = self._handle, None
        if self._is_own and handle is not None:
            _world.pg_map.pop(handle, None)
            _world.pg_group_ranks.pop(handle, None)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def start(self, call: Call) -> Work:
        if self.is_direct and call.verb is OpType.ALL_GATHER:
            return self._start_direct_gather(call)
        work = _guard(call, lambda: _START[call.verb](self, call))
        if self.is_direct and call.verb in (OpType.SEND, OpType.RECEIVE):
            message = _Message(self, call, work)
            return Work(message.wait, is_done=message.is_done)
        waits: list[Callable[[], object]] = [] if work is None else [lambda: _guard(call, work.wait)]
        if call.op == "mean" and call.out is not None:
            out, size = call.out, len(self._ranks)
            waits.append(lambda: out.div_(size))
        return Work(*waits, is_done=None if work is None else work.is_completed)

    def wait_aside(self, wait: Callable[[], None]) -> Work:
        """Has a thread call it. See [Note: who asks Gloo whether a message is through]."""
        if self._aside is None:
            self._aside = CommThread(torch.device("cpu"))
        return self._aside.submit(wait)

    def _start_direct_gather(self, call: Call) -> Work:
        ranges = call.taken.chunk(len(self._ranks))
        own = ranges[self._place]
        if own.data_ptr() != call.given.data_ptr():
            own.copy_(call.given)
        peers = self._peers()
        return self._send_and_receive(call, [(own, peer) for peer in peers], [(ranges[p], p) for p in peers])

    def start_sum(self, given: Tensor, *, scatter: bool, label: str) -> ReduceWork:
        """NCCL scatters only. See [Note: narrow tensors on the wire, wide sums]."""
        if not scatter:
            assert self.is_direct, "whole contributions are exchanged where that is cheaper"
            return self._exchange(
                Call(OpType.ALL_REDUCE, label=label), given, [(given, p) for p in self._peers()]
            )
        ranges = given.chunk(len(self._ranks))
        own = ranges[self._place]
        call = Call(OpType.REDUCE_SCATTER, given, own, label=label)
        if not self.is_direct:
            return PartialReduceWork([own], self.start(call))
        return self._exchange(call, own, [(ranges[p], p) for p in self._peers()])

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        return self.is_direct and narrow_is_less_to_send(len(self._ranks), narrow, wide)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError(f"no memory for {numel} x {dtype}: ranks of a process group share none")

    share = empty

    def _exchange(self, call: Call, mine: Tensor, sends: list[tuple[Tensor, int]]) -> ReduceWork:
        parts = {place: torch.empty_like(mine) for _, place in sends}
        pending = self._send_and_receive(call, sends, [(part, place) for place, part in parts.items()])
        buffer_bytes = sum(part.nbytes for part in parts.values())
        parts[self._place] = mine
        return PartialReduceWork([parts[place] for place in range(len(self._ranks))], pending, buffer_bytes)

    def _send_and_receive(
        self, call: Call, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Work:
        """Tensors to and from places in the group. Two ranks' messages meet in the order they start in."""
        operations = [dist.P2POp(dist.isend, t, self._ranks[place], self.handle) for t, place in sends]
        operations += [dist.P2POp(dist.irecv, t, self._ranks[place], self.handle) for t, place in receives]
        works = _guard(call, lambda: dist.batch_isend_irecv(operations))
        return Work(*(_waiter(call, work) for work in works))

    def _peers(self) -> list[int]:
        """The other ranks' places in the group, the next one first: not all send to the same at once."""
        size = len(self._ranks)
        return [(self._place + step) % size for step in range(1, size)]

    # --- how torch names the verbs

    def _all_reduce(self, call: Call) -> Any:
        return dist.all_reduce(call.out, _OPS[call.op], self.handle, async_op=True)

    def _reduce_scatter(self, call: Call) -> Any:
        return _reduce_into(call.out, call.source, _OPS[call.op], self.handle, async_op=True)

    def _all_gather(self, call: Call) -> Any:
        return _gather_into(call.out, call.source, self.handle, async_op=True)

    def _broadcast(self, call: Call) -> Any:
        return dist.broadcast(call.taken, self._ranks[call.root], self.handle, async_op=True)

    def _reduce(self, call: Call) -> Any:
        # Gloo leaves partial sums in the tensors of the others.
        given = call.given if call.root == self._place else call.given.clone()
        return dist.reduce(given, self._ranks[call.root], _OPS[call.op], self.handle, async_op=True)

    def _scatter(self, call: Call) -> Any:
        pieces = None if call.source is None else list(call.source.chunk(len(self._ranks)))
        return dist.scatter(call.taken, pieces, self._ranks[call.root], self.handle, async_op=True)

    def _gather(self, call: Call) -> Any:
        pieces = None if call.out is None else list(call.out.chunk(len(self._ranks)))
        return dist.gather(call.given, pieces, self._ranks[call.root], self.handle, async_op=True)

    def _all_to_all(self, call: Call) -> Any:
        return dist.all_to_all_single(call.out, call.source, group=self.handle, async_op=True)

    def _barrier(self, _: Call) -> Any:
        return dist.barrier(self.handle, async_op=True)

    def _send(self, call: Call) -> Any:
        return dist.isend(call.given, self._ranks[call.root], self.handle)

    def _receive(self, call: Call) -> Any:
        return dist.irecv(call.taken, self._ranks[call.root], self.handle)


_START: dict[OpType, Callable[[TorchTransport, Call], Any]] = {
    OpType.ALL_REDUCE: TorchTransport._all_reduce,
    OpType.REDUCE_SCATTER: TorchTransport._reduce_scatter,
    OpType.ALL_GATHER: TorchTransport._all_gather,
    OpType.BROADCAST: TorchTransport._broadcast,
    OpType.REDUCE: TorchTransport._reduce,
    OpType.SCATTER: TorchTransport._scatter,
    OpType.GATHER: TorchTransport._gather,
    OpType.ALL_TO_ALL: TorchTransport._all_to_all,
    OpType.BARRIER: TorchTransport._barrier,
    OpType.SEND: TorchTransport._send,
    OpType.RECEIVE: TorchTransport._receive,
}


class _Message:
    """One of Gloo's. See [Note: who asks Gloo whether a message is through]."""

    def __init__(self, link: TorchTransport, call: Call, work: Any) -> None:
        self._link = link
        self._wait: Callable[[], None] = lambda: _guard(call, work.wait)  # holds the tensor
        self._aside: Work | None = None

    def wait(self) -> None:
        self._wait()

    def is_done(self) -> bool:
        if self._aside is None:
            self._aside = self._link.wait_aside(self._wait)
            self._wait = self._aside.wait
        return self._aside.is_done()


def among(ranks: tuple[int, ...], rank: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group that its members alone make. `name`: no other group of theirs has it. See [Note: names of
    groups]."""
    while name in _world.pg_names.values():
        name += "'"  # of a world that was closed while its process group lives
    everyone = dist.group.WORLD
    assert everyone is not None, "a world that was left"
    backend, store = _world.pg_map[everyone]
    device = everyone.bound_device_id
    handle, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        backend,
        store,
        name,  # type: ignore[arg-type]  # a kind of str
        timeout=timeout,
        device_id=device,
    )
    _world.pg_group_ranks[handle] = {member: place for place, member in enumerate(ranks)}
    return handle


def over_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> TorchTransport:
    """Gloo on its own: a process group that the program's torch.distributed has not made."""
    kind = dist.ProcessGroup.BackendType.GLOO
    handle = dist.ProcessGroup(store, rank, size)
    handle._set_default_backend(kind)
    handle._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
    _world.pg_map[handle] = ("gloo", store)
    _world.pg_group_ranks[handle] = {place: place for place in range(size)}
    return TorchTransport(handle, tuple(range(size)), rank, is_own=True)


def _waiter(call: Call, work: dist.Work) -> Callable[[], object]:
    return lambda: _guard(call, work.wait)


def _guard(call: Call, action: Callable[[], Any]) -> Any:
    """Turns the transport's errors into ours: the cause stands below, for --debug."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"{call} failed: a rank is gone, late or sent something else",
            given=str(error).splitlines()[0],
            hint="look for the first rank that ended: its message is the cause",
        ) from error
