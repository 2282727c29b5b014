"""Collectives over a torch process group: NCCL, Gloo or any other backend.

[Note: direct exchange between owners]
Between CPU ranks bytes cost compute, and Gloo's ring moves them more often than needed: on 2 ranks its
reduce-scatter of 33.7 M float32 takes 130 ms, its all-gather of as many bf16 69 ms. On Gloo, every rank
instead sends each owner its range, and each owner adds what it received (52 ms); an all-gather sends the own
range to every peer, straight to its final address (18 ms). Both move the minimum, (p-1)/p of the tensor per
rank. Terms are added in rank order on every rank: equal bits everywhere.

[Note: narrow messages, wide sums]
bf16 gradients are to be summed in float32. An owner can widen what it received before it adds, so
contributions are sent in bf16 and the sum is float32: half the bytes. For an all-reduce, sending the full
contribution to every peer, which adds, moves (p-1) x 2 bytes per element, against 2(p-1)/p x 4 for a widened
ring: half for 2 ranks, three quarters for 3, no gain from 4 on. NCCL's bytes cost no compute: there
contributions are widened and its own collectives do the work.

[Note: group names]
`torch.distributed.new_group(use_local_synchronization=True)` lets members rendezvous under a name made of
their ranks and of the number of groups this process has created. Members that have created different numbers,
such as the first and a middle stage of a pipeline, would wait for each other under different names. So the
name is ours, the same on all of them.

[Note: polling Gloo messages]
Gloo's `is_completed` of a send or a receive is false until something has waited for it, and a wait with a
time limit breaks the connection when the limit passes. So the first poll makes a thread of the transport
wait, in the order of the polls. A caller that waits without polling needs no thread.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.comm_thread import CommThread
from plait.comm.transport import Call, OpType, PartialReduceWork, ReduceWork, Work, narrow_sends_less
from plait.errors import CommError

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_world = dist.distributed_c10d._world  # torch's registry of groups

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # then divided: Gloo has no mean
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class TorchTransport:
    """A torch process group as a transport; its world closes it.

    A closed transport holds nothing of torch's, even if the group is still referenced: Gloo's threads end
    with the last reference to it, and must do so before the interpreter exits, or they crash the process.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        group_rank: int,
        *,
        is_own: bool = False,
    ) -> None:
        """`ranks`: global ranks of the process group. `group_rank`: this rank's index among them. `is_own`:
        the process group is referenced by nothing else, so that it ends with the transport."""
        assert process_group is not None, "no process group"
        self._process_group: dist.ProcessGroup | None = process_group
        self._ranks = ranks
        self._group_rank = group_rank
        self._is_own = is_own
        self._waiter_thread: CommThread | None = None  # created by the first poll
        self.name = str(dist.get_backend(process_group))
        self.is_direct = self.name == "gloo"
        self.shares_memory = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert self._process_group is not None, "a collective on a group whose world is closed"
        return self._process_group

    def close(self) -> None:
        if self._waiter_thread is not None:
            self._waiter_thread.close()
        process_group, self._process_group = self._process_group, None
        if self._is_own and process_group is not None:
            _world.pg_map.pop(process_group, None)
            _world.pg_group_ranks.pop(process_group, None)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def start(self, call: Call) -> Work:
        if self.is_direct and call.op_type is OpType.ALL_GATHER:
            return self._start_direct_gather(call)
        work = _guard(call, lambda: self._torch_call(call))
        if self.is_direct and call.op_type in (OpType.SEND, OpType.RECEIVE):
            message = _GlooMessage(self, call, work)
            return Work(message.wait, is_done=message.is_done)
        waits: list[Callable[[], object]] = [] if work is None else [lambda: _guard(call, work.wait)]
        if call.op == "mean" and call.out is not None:
            out, size = call.out, len(self._ranks)
            waits.append(lambda: out.div_(size))
        return Work(*waits, is_done=None if work is None else work.is_completed)

    def wait_on_thread(self, wait: Callable[[], None]) -> Work:
        """Run `wait` on a thread. See [Note: polling Gloo messages]."""
        if self._waiter_thread is None:
            self._waiter_thread = CommThread(torch.device("cpu"))
        return self._waiter_thread.submit(wait)

    def _start_direct_gather(self, call: Call) -> Work:
        ranges = call.output.chunk(len(self._ranks))
        own = ranges[self._group_rank]
        if own.data_ptr() != call.input.data_ptr():
            own.copy_(call.input)
        peers = self._peers()
        return self._send_and_receive(call, [(own, peer) for peer in peers], [(ranges[p], p) for p in peers])

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str) -> ReduceWork:
        """NCCL supports `scatter` only. See [Note: narrow messages, wide sums]."""
        if not scatter:
            assert self.is_direct, "full contributions are exchanged on Gloo only"
            return self._exchange(
                Call(OpType.ALL_REDUCE, label=label), tensor, [(tensor, p) for p in self._peers()]
            )
        ranges = tensor.chunk(len(self._ranks))
        own = ranges[self._group_rank]
        call = Call(OpType.REDUCE_SCATTER, tensor, own, label=label)
        if not self.is_direct:
            return PartialReduceWork([own], self.start(call))
        return self._exchange(call, own, [(ranges[p], p) for p in self._peers()])

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        return self.is_direct and narrow_sends_less(len(self._ranks), narrow, wide)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError(f"cannot share {numel} x {dtype}: ranks of a process group share no memory")

    share = empty

    def _exchange(self, call: Call, own: Tensor, sends: list[tuple[Tensor, int]]) -> ReduceWork:
        terms = {group_rank: torch.empty_like(own) for _, group_rank in sends}
        work = self._send_and_receive(call, sends, [(term, group_rank) for group_rank, term in terms.items()])
        buffer_bytes = sum(term.nbytes for term in terms.values())
        terms[self._group_rank] = own
        return PartialReduceWork(
            [terms[group_rank] for group_rank in range(len(self._ranks))], work, buffer_bytes
        )

    def _send_and_receive(
        self, call: Call, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Work:
        """Send to and receive from group ranks. Messages between two ranks are matched in start order."""
        p2p_ops = [
            dist.P2POp(dist.isend, t, self._ranks[group_rank], self.process_group) for t, group_rank in sends
        ]
        p2p_ops += [
            dist.P2POp(dist.irecv, t, self._ranks[group_rank], self.process_group)
            for t, group_rank in receives
        ]
        works = _guard(call, lambda: dist.batch_isend_irecv(p2p_ops))
        return Work(*(partial(_guard, call, work.wait) for work in works))

    def _peers(self) -> list[int]:
        """The other group ranks, starting with the next one, so that not all send to the same rank first."""
        size = len(self._ranks)
        return [(self._group_rank + step) % size for step in range(1, size)]

    def _torch_call(self, call: Call) -> Any:
        """Start the call by torch's function."""
        group, root, op = self.process_group, self._ranks[call.root], _OPS[call.op]
        match call.op_type:
            case OpType.ALL_REDUCE:
                return dist.all_reduce(call.out, op, group, async_op=True)
            case OpType.REDUCE_SCATTER:
                return _reduce_into(call.out, call.source, op, group, async_op=True)
            case OpType.ALL_GATHER:
                return _gather_into(call.out, call.source, group, async_op=True)
            case OpType.BROADCAST:
                return dist.broadcast(call.output, root, group, async_op=True)
            case OpType.REDUCE:
                # Gloo leaves partial sums in the other ranks' tensors.
                tensor = call.input if call.root == self._group_rank else call.input.clone()
                return dist.reduce(tensor, root, op, group, async_op=True)
            case OpType.SCATTER:
                return dist.scatter(call.output, self._ranges(call.source), root, group, async_op=True)
            case OpType.GATHER:
                return dist.gather(call.input, self._ranges(call.out), root, group, async_op=True)
            case OpType.ALL_TO_ALL:
                return dist.all_to_all_single(call.out, call.source, group=group, async_op=True)
            case OpType.BARRIER:
                return dist.barrier(group, async_op=True)
            case OpType.SEND:
                return dist.isend(call.input, root, group)
            case OpType.RECEIVE:
                return dist.irecv(call.output, root, group)

    def _ranges(self, full: Tensor | None) -> list[Tensor] | None:
        return None if full is None else list(full.chunk(len(self._ranks)))


class _GlooMessage:
    """A Gloo send or receive. See [Note: polling Gloo messages]."""

    def __init__(self, transport: TorchTransport, call: Call, work: Any) -> None:
        self._transport = transport
        self._wait: Callable[[], None] = lambda: _guard(call, work.wait)  # references the tensor
        self._waiter_thread: Work | None = None

    def wait(self) -> None:
        self._wait()

    def is_done(self) -> bool:
        if self._waiter_thread is None:
            self._waiter_thread = self._transport.wait_on_thread(self._wait)
            self._wait = self._waiter_thread.wait
        return self._waiter_thread.is_done()


def new_torch_group(ranks: tuple[int, ...], rank: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group on its members only. `name`: unique to it. See [Note: group names]."""
    while name in _world.pg_names.values():
        name += "'"  # taken by a closed world whose process group is still alive
    world_group = dist.group.WORLD
    assert world_group is not None, "the world is closed"
    backend, store = _world.pg_map[world_group]
    device = world_group.bound_device_id
    process_group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        backend,
        store,
        name,  # type: ignore[arg-type]  # a subtype of str
        timeout=timeout,
        device_id=device,
    )
    _world.pg_group_ranks[process_group] = {member: group_rank for group_rank, member in enumerate(ranks)}
    return process_group


def gloo_transport(store: dist.Store, rank: int, size: int, timeout: timedelta) -> TorchTransport:
    """Return a Gloo transport over its own process group, independent of the program's torch.distributed."""
    backend_type = dist.ProcessGroup.BackendType.GLOO
    process_group = dist.ProcessGroup(store, rank, size)
    process_group._set_default_backend(backend_type)
    process_group._register_backend(
        torch.device("cpu"), backend_type, dist.ProcessGroupGloo(store, rank, size, timeout)
    )
    _world.pg_map[process_group] = ("gloo", store)
    _world.pg_group_ranks[process_group] = {group_rank: group_rank for group_rank in range(size)}
    return TorchTransport(process_group, tuple(range(size)), rank, is_own=True)


def _guard(call: Call, action: Callable[[], Any]) -> Any:
    """Convert torch's errors into CommError; the cause is chained, for --debug."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"{call} failed: a rank is gone, late or made a different call",
            given=str(error).splitlines()[0],
            hint="look for the first rank that ended: its error is the cause",
        ) from error
