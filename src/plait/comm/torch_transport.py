"""Collectives over a torch process group: NCCL, Gloo or any other backend.

[Note: direct exchange between owners]
Between CPU ranks bytes cost compute, and Gloo's ring moves them more often than needed: on 2 ranks its
reduce-scatter of 33.7 M float32 takes 130 ms, its all-gather of as many bf16 69 ms. On Gloo, every rank
instead sends each owner its range, and each owner adds what it received (52 ms); an all-gather sends the own
range to every peer, straight to its final address (18 ms). Both move the minimum, (p-1)/p of the tensor per
rank. Terms are added in rank order on every rank: equal bits everywhere.

[Note: receives before sends]
Gloo sends a message when the receiver has announced that it can take it. The announcement travels on the
connection that carries this rank's own messages to the same peer: that of a receive started after a send may
wait until all bytes of that send have left. The two directions of a link are then used one after the other,
and an exchange takes twice as long. So receives are started first. Gloo's own all-to-all starts sends first.

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
name is ours, the same on all of them. It is a prefix of every key in the store, and so a hash of the ranks.

[Note: groups of members only]
If the default group is bound to a device, torch makes every later communicator by `ncclCommSplit`, which
waits for all ranks of the job. A group that only its members create must not be a split: the default group is
unbound while it is made, and the device is passed, so that NCCL connects the members at once.

[Note: current stream]
On CUDA a started call runs on the communicator's own stream: two hops between streams, 10 to 20 us. A call
whose result is needed at once (`run`) is passed to torch as `async_op=False`, and runs on the current stream.

[Note: polling Gloo messages]
Gloo's `is_completed` of a send or a receive is false until something has waited for it, and a wait with a
time limit breaks the connection when the limit passes. So the first poll makes a thread of the transport
wait, in the order of the polls. A caller that waits without polling needs no thread.
"""

from collections.abc import Callable, Sequence
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
_CPU = torch.device("cpu")

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
        device: torch.device = _CPU,
        is_own: bool = False,
    ) -> None:
        """`ranks`: global ranks of the process group. `group_rank`: this rank's index among them. `device`:
        of the tensors. `is_own`: the process group is referenced by nothing else, so that it ends with the
        transport."""
        assert process_group is not None, "no process group"
        self._process_group: dist.ProcessGroup | None = process_group
        self._ranks = ranks
        self._group_rank = group_rank
        self._is_own = is_own
        self._waiter_thread: CommThread | None = None  # created by the first poll
        self.device = device
        self.name = backend_of(process_group, device) or "none"
        self.is_direct = self.name == "gloo"
        self.shares_memory = False
        self.takes_mean = self.name == "nccl"

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
        """See [Note: current stream]."""
        if self.device.type == "cpu" or call.op_type in (OpType.SEND, OpType.RECEIVE):
            self.start(call).wait()
            return
        _guard(call, lambda: self._torch_call(call, async_op=False))
        if call.op == "mean" and call.out is not None and not self.takes_mean:
            call.out.div_(len(self._ranks))

    def start(self, call: Call) -> Work:
        if self.is_direct and call.op_type is OpType.ALL_GATHER:
            return self._start_direct_gather(call)
        if self.is_direct and call.op_type is OpType.ALL_TO_ALL:
            return self._start_direct_all_to_all(call)
        if call.op_type in (OpType.SEND, OpType.RECEIVE):
            return self._start_message(call)
        work = _guard(call, lambda: self._torch_call(call, async_op=True))
        waits: list[Callable[[], object]] = [] if work is None else [lambda: _guard(call, work.wait)]
        if call.op == "mean" and call.out is not None and not self.takes_mean:
            out, size = call.out, len(self._ranks)
            waits.append(lambda: out.div_(size))
        return Work(*waits, is_done=None if work is None else work.is_completed)

    def _start_message(self, call: Call) -> Work:
        """Start a send or a receive; on NCCL as a group of one, or torch warns that messages are in order."""
        if not self.is_direct:
            sends = [(call.input, call.root)] if call.op_type is OpType.SEND else []
            receives = [(call.output, call.root)] if call.op_type is OpType.RECEIVE else []
            return self.exchange(call, sends, receives)
        group, peer = self.process_group, self._ranks[call.root]
        if call.op_type is OpType.SEND:
            work = _guard(call, lambda: dist.isend(call.input, peer, group))
        else:
            work = _guard(call, lambda: dist.irecv(call.output, peer, group))
        message = _GlooMessage(self, call, work)
        return Work(message.wait, is_done=message.is_done)

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
        return self.exchange(call, [(own, peer) for peer in peers], [(ranges[p], p) for p in peers])

    def _start_direct_all_to_all(self, call: Call) -> Work:
        """See [Note: receives before sends]."""
        sends, receives = (full.view(-1).chunk(len(self._ranks)) for full in (call.input, call.output))
        receives[self._group_rank].copy_(sends[self._group_rank])
        peers = self._peers()
        return self.exchange(call, [(sends[p], p) for p in peers], [(receives[p], p) for p in peers])

    def start_sum(self, tensor: Tensor, *, scatter: bool, label: str, wide: bool = False) -> ReduceWork:
        """NCCL supports `scatter` only. See [Note: narrow messages, wide sums]."""
        if not scatter:
            assert self.is_direct, "full contributions are exchanged on Gloo only"
            return self._exchange(
                Call(OpType.ALL_REDUCE, label=label), tensor, [(tensor, p) for p in self._peers()]
            )
        ranges = tensor.chunk(len(self._ranks))
        own = ranges[self._group_rank]
        call = Call(OpType.REDUCE_SCATTER, tensor, own, label=label)
        if not self.is_direct and not wide:
            return PartialReduceWork([own], self.start(call))
        return self._exchange(call, own, [(ranges[p], p) for p in self._peers()])

    def sends_narrow(self, narrow: torch.dtype, wide: torch.dtype) -> bool:
        return self.is_direct and narrow_sends_less(len(self._ranks), narrow, wide)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError(f"cannot share {numel} x {dtype}: ranks of a process group share no memory")

    share = empty

    def _exchange(self, call: Call, own: Tensor, sends: list[tuple[Tensor, int]]) -> ReduceWork:
        terms = {group_rank: torch.empty_like(own) for _, group_rank in sends}
        work = self.exchange(call, sends, [(term, group_rank) for group_rank, term in terms.items()])
        buffer_bytes = sum(term.nbytes for term in terms.values())
        terms[self._group_rank] = own
        return PartialReduceWork(
            [terms[group_rank] for group_rank in range(len(self._ranks))], work, buffer_bytes
        )

    def exchange(
        self, call: Call, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Work:
        """On NCCL in one group, because its stream runs one call after the other. See [Note: receives before
        sends]."""
        group = self.process_group
        messages = [(dist.irecv, *receive) for receive in receives] + [(dist.isend, *send) for send in sends]

        def start() -> list[Any]:
            if self.is_direct:  # a batch of two small messages takes 25 us more of each rank
                return [message(tensor, None, group, 0, rank) for message, tensor, rank in messages]
            batch = [dist.P2POp(f, tensor, self._ranks[rank], group) for f, tensor, rank in messages]
            return dist.batch_isend_irecv(batch)

        works = _guard(call, start)
        return Work(
            *(partial(_guard, call, work.wait) for work in works),
            is_done=lambda: all(work.is_completed() for work in works),
        )

    def _peers(self) -> list[int]:
        """The other group ranks, starting with the next one, so that not all send to the same rank first."""
        size = len(self._ranks)
        return [(self._group_rank + step) % size for step in range(1, size)]

    def _torch_call(self, call: Call, *, async_op: bool) -> Any:
        """Start the call by torch's function."""
        group, root, op = self.process_group, self._ranks[call.root], _OPS[call.op]
        if call.op == "mean" and self.takes_mean:
            op = dist.ReduceOp.AVG
        match call.op_type:
            case OpType.ALL_REDUCE:
                return dist.all_reduce(call.out, op, group, async_op=async_op)
            case OpType.REDUCE_SCATTER:
                return _reduce_into(call.out, call.source, op, group, async_op=async_op)
            case OpType.ALL_GATHER:
                return _gather_into(call.out, call.source, group, async_op=async_op)
            case OpType.BROADCAST:
                return dist.broadcast(call.output, root, group, async_op=async_op)
            case OpType.REDUCE:
                # Gloo leaves partial sums in the other ranks' tensors.
                tensor = call.input if call.root == self._group_rank else call.input.clone()
                return dist.reduce(tensor, root, op, group, async_op=async_op)
            case OpType.SCATTER:
                return dist.scatter(call.output, self._ranges(call.source), root, group, async_op=async_op)
            case OpType.GATHER:
                return dist.gather(call.input, self._ranges(call.out), root, group, async_op=async_op)
            case OpType.ALL_TO_ALL:
                return dist.all_to_all_single(call.out, call.source, group=group, async_op=async_op)
            case OpType.BARRIER:
                return dist.barrier(group, async_op=async_op)
            case OpType.SEND | OpType.RECEIVE:
                raise AssertionError("a message is not a collective")

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


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the backend that communicates tensors on a device, or None. Process groups of all
    devices have names such as `undefined` and `cpu:gloo,cuda:nccl`."""
    config = dist.distributed_c10d.BackendConfig(dist.get_backend(process_group))
    name: str | None = config.get_device_backend_map().get(device.type)
    return name


def new_torch_group(
    ranks: tuple[int, ...],
    rank: int,
    name: str,
    timeout: timedelta,
    device: torch.device,
    *,
    splits: bool = False,
    max_ctas: int | None = None,
) -> dist.ProcessGroup:
    """Create a process group on its members only. `name`: unique to it. See [Note: group names].

    `splits`: all ranks of the job call it at the same point, each for its own group of a partition; then it
    is a split of the default group if that is bound to a device. Otherwise see [Note: groups of members
    only]. `max_ctas`: limit of the thread blocks of NCCL's kernels.
    """
    while name in _world.pg_names.values():
        name += "'"  # taken by a closed world whose process group is still alive
    world_group = dist.group.WORLD
    assert world_group is not None, "the world is closed"
    backend, store = backend_of(world_group, device), _world.pg_map[world_group][1]
    assert backend is not None, f"a process group without a backend for {device.type}"
    bound_device = world_group.bound_device_id
    if not splits:
        world_group.bound_device_id = None
    try:
        process_group, _ = dist.distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]  # a subtype of str
            backend_options=_nccl_options(max_ctas, timeout) if backend == "nccl" else None,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    finally:
        world_group.bound_device_id = bound_device
    _world.pg_group_ranks[process_group] = {member: group_rank for group_rank, member in enumerate(ranks)}
    return process_group


def _nccl_options(max_ctas: int | None, timeout: timedelta) -> Any:
    """Return options for NCCL, or None for torch's."""
    if max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    return options


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
    """Convert torch's errors into CommError; the cause is chained, for --debug. Errors of the device, which
    an earlier kernel has caused, stay what they are."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if is_device_error(error):
            error.add_note(
                f"Reported by {call}, which did not cause it: an earlier kernel failed, for example for an "
                "index out of range. CUDA_LAUNCH_BLOCKING=1 shows which."
            )
            raise
        raise CommError(
            f"{call} failed: a rank is gone, late or made a different call",
            given=str(error).splitlines()[0],
            hint="look for the first rank that ended: its error is the cause",
        ) from error


def is_device_error(error: RuntimeError) -> bool:
    """Return whether an error says that a kernel or the GPU failed, and not a communication."""
    accelerator_error: Any = getattr(torch, "AcceleratorError", ())
    texts = ("CUDA error", "device-side assert", "illegal memory access", "CUBLAS_STATUS", "CUDNN_STATUS")
    return isinstance(error, accelerator_error) or any(text in str(error) for text in texts)
