"""NCCL on the simulated device: `torch.distributed.ProcessGroupNCCL`, with the data moved by plait's host
transport.

[Note: semantics of NCCL]
Each communicator has a stream. A collective with `async_op=True` runs there: the stream waits for the current
one when the collective is issued, and `Work.wait` makes the current stream wait for it; the host does not
block. With `async_op=False` it runs on the current stream (torch >= 2.8). Tensors are contiguous, of NCCL's
dtypes and on the rank's device. The work references them until `wait`; messages call record_stream instead,
because a sender need not wait. A barrier blocks the host.

[Note: splits]
While the default group is bound to a device (`device_id=`), torch makes every other group by ncclCommSplit,
which is collective over all ranks of the default group: ranks that are not in the new group call it without a
color. Here, the n-th split of each rank must meet the n-th of every other; otherwise `SplitTimeout` names the
ranks that never called.
"""

import datetime
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.shm.rendezvous import HostPeers, connect_host_peers
from plait.comm.shm.transport import open_group
from plait.comm.torch_backend import PlaitGroup
from plait.comm.torch_transport import gloo_transport
from support.virtual_cuda.device import Event, Stream, current_stream, native

DTYPES = frozenset(
    {
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
SPLIT_S = float(os.environ.get("VIRTUAL_CUDA_SPLIT_S", "10"))  # limit of the wait for the other ranks

c10d = dist.distributed_c10d

# ruff: noqa: ARG002  # signatures are torch's


class SplitTimeout(RuntimeError):
    """On real devices, the ranks hang here."""


@dataclass(frozen=True)
class Communicator:
    """One communicator of this rank. `split`: made by ncclCommSplit. `max_ctas`: None without a limit."""

    number: int
    name: str
    ranks: tuple[int, ...]
    split: bool
    max_ctas: int | None


@dataclass
class _Job:
    """State of a default group and of all communicators within. `peers`: the ranks' shared memory."""

    store: Any
    peers: HostPeers | None
    rank: int
    size: int
    num_splits: int = 0
    communicators: list[Communicator] = field(default_factory=list)


_job: _Job | None = None


def communicators() -> list[Communicator]:
    """Return this rank's communicators, in order of creation."""
    return [] if _job is None else list(_job.communicators)


class Options:
    """`ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = _Config()
        self.split_from: VirtualNCCL | None = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = datetime.timedelta(minutes=10)


class _Config:
    """`ncclConfig_t`: any option may be set."""


class Work(dist.Work):
    """A collective or a message on a stream. See [Note: semantics of NCCL]."""

    def __init__(
        self, data: dist.Work | None, stream: torch.Stream, tensors: list[Tensor], *, blocks: bool
    ) -> None:
        """`data`: the transport's work; None for tensors without contents. `blocks`: `wait` blocks the
        host."""
        super().__init__()
        self._data = data
        self._stream = stream
        self._tensors: list[Tensor] | None = tensors
        self._blocks = blocks
        self._event = Event()
        self._event.record(stream)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._data is not None:
            self._data.wait()  # of the simulation: the data is there when the stream gets to it
        current_stream().wait_event(self._event)
        self._tensors = None
        if self._blocks:
            native.sync_stream(self._stream.stream_id, "nccl:barrier")
        return True

    def is_completed(self) -> bool:
        return (self._data is None or self._data.is_completed()) and self._event.query()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        tensors = list(self._tensors or ())
        self.wait()
        future = torch.futures.Future(devices=[tensor.device for tensor in tensors[:1]] or None)
        future.set_result(tensors)
        return future


class VirtualNCCL(PlaitGroup):
    """`torch.distributed.ProcessGroupNCCL`, and the process group around it."""

    Options = Options
    supports_splitting = True
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        split = options.split_from is not None
        if split:
            _split(ranks)
        if not options.global_ranks_in_group:  # the default group
            _start_job(store, rank, size, options._timeout)
        assert _job is not None
        transport = None
        if size > 1:
            assert _job.peers is not None, "ranks of the simulated device share the memory of one host"
            transport = open_group(_job.peers, ranks, rank, store, "vnccl", options._timeout)
        super().__init__(transport, rank, size)
        self.options = options
        self.stream = Stream()
        self._num_calls = 0
        self._number = len(_job.communicators)
        max_ctas = getattr(options.config, "max_ctas", None)
        _job.communicators.append(Communicator(self._number, options.group_name, ranks, split, max_ctas))

    # --- the process group

    def getBackendName(self) -> str:
        return "nccl"

    name = getBackendName

    def _get_backend(self, device: Any = None) -> "VirtualNCCL":
        return self

    def _set_group_desc(self, description: str) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        super().shutdown()
        if not self.options.global_ranks_in_group:
            _end_job()

    _shutdown = shutdown

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        _split(())

    def split_group(
        self, ranks: list[int], timeout: Any = None, opts: Any = None, group_name: str = "", **_: Any
    ) -> "VirtualNCCL | None":
        is_member = self.rank() in ranks
        if not is_member:
            _split(())
            return None
        assert _job is not None
        options = opts or Options()
        options.split_from, options.global_ranks_in_group = self, [*ranks]
        options.group_name = group_name
        group = VirtualNCCL(
            dist.PrefixStore(f"{group_name}/", _job.store), ranks.index(self.rank()), len(ranks), options
        )
        group._set_group_name(group_name)
        return group

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        aliases, call = _aliases(tensors), super().allreduce
        return self._start("all_reduce", tensors, tensors, opts, lambda: call(aliases, opts))

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> Work:
        aliases = _aliases([output, shard])
        call = super().all_gather_single
        return self._start("all_gather", [shard], [output], opts, lambda: call(*aliases, opts))

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, full: Tensor, opts: Any = None) -> Work:
        [out, source] = _aliases([output, full])
        call = super().reduce_scatter_single
        # The output may be this rank's range of the input.
        return self._start("reduce_scatter", [full], [output], opts, lambda: call(out, source.clone(), opts))

    _reduce_scatter_base = reduce_scatter_single

    def allgather(self, lists: list[list[Tensor]], shards: list[Tensor], opts: Any = None) -> Work:
        into, aliases = [_aliases(each) for each in lists], _aliases(shards)
        call, writes = super().allgather, [tensor for each in lists for tensor in each]
        return self._start("all_gather_list", shards, writes, opts, lambda: call(into, aliases, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        aliases, call = _aliases(tensors), super().broadcast
        return self._start("broadcast", tensors, tensors, opts, lambda: call(aliases, opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        aliases, call = _aliases(tensors), super().reduce
        return self._start("reduce", tensors, tensors, opts, lambda: call(aliases, opts))

    def gather(self, lists: list[list[Tensor]], shards: list[Tensor], opts: Any) -> Work:
        into, aliases, call = [_aliases(each) for each in lists], _aliases(shards), super().gather
        writes = [tensor for each in lists for tensor in each]
        return self._start("gather", shards, writes, opts, lambda: call(into, aliases, opts))

    def scatter(self, outputs: list[Tensor], lists: list[list[Tensor]], opts: Any) -> Work:
        into, sources, call = _aliases(outputs), [_aliases(each) for each in lists], super().scatter
        reads = [tensor for each in lists for tensor in each]
        return self._start("scatter", reads, outputs, opts, lambda: call(into, sources, opts))

    def all_to_all_single(self, output: Tensor, full: Tensor, *splits: Any, opts: Any = None) -> Work:
        *splits, opts = (*splits, opts) if len(splits) == 2 else splits
        [into, source], call = _aliases([output, full]), super().all_to_all_single
        return self._start("all_to_all", [full], [output], opts, lambda: call(into, source, *splits, opts))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        call = super().barrier
        return self._start("barrier", [], [], opts, lambda: call(opts))

    # --- messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        aliases, call = _aliases(tensors), super().send
        return self._start("send", tensors, [], None, lambda: call(aliases, to), peer=to)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        aliases, call = _aliases(tensors), super().recv
        return self._start("recv", [], tensors, None, lambda: call(aliases, source), peer=source)

    def _start(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        opts: Any,
        start: Callable[[], dist.Work],
        peer: int = -1,
    ) -> Work:
        tensors = [*reads, *writes]
        for tensor in tensors:
            _check(name, tensor)
        stream: torch.Stream = self.stream
        if peer < 0 and not getattr(opts, "asyncOp", True):
            stream = current_stream()
        else:
            stream.wait_stream(current_stream())
        self._num_calls += peer < 0  # messages are counted for each pair of ranks
        number = self._num_calls if peer < 0 else _batch
        native.operate(stream.stream_id, f"nccl:{name}", [*reads], [*writes], self._number, number, peer)
        for tensor in tensors if peer >= 0 else ():
            native.record_stream(tensor, stream.stream_id, f"nccl:{name}")
        data = None if any(map(native.is_large, tensors)) else start()
        return Work(data, stream, tensors, blocks=name == "barrier")


def _aliases(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [native.alias_on_cpu(tensor.detach()) for tensor in tensors]


def _check(name: str, tensor: Tensor) -> None:
    device = torch.device("cuda", native.current_device())
    if tensor.device != device:
        raise RuntimeError(f"NCCL {name}: a tensor on {tensor.device}, current device {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"NCCL {name}: a tensor that is not contiguous")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"NCCL {name}: {tensor.dtype} is not supported")


def _start_job(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Connect the ranks' shared memory for a new default group."""
    global _job
    _end_job()
    peers = None
    if size > 1:
        base = gloo_transport(dist.PrefixStore("vnccl-gloo", store), rank, size, timeout)
        peers, _, reason = connect_host_peers(rank, size, base, wanted=True)
        base.close()
        assert peers is not None, reason
    _job = _Job(store, peers, rank, size)


def _end_job() -> None:
    """Leave the other ranks, and release the store, whose file is deleted with its last reference."""
    global _job
    ended, _job = _job, None
    if ended is not None and ended.peers is not None:
        ended.peers.close()


def _split(ranks: tuple[int, ...]) -> None:
    """ncclCommSplit of the default group: `ranks` of the new one that this rank is in, or none."""
    assert _job is not None, "a split before the default group"
    number, _job.num_splits = _job.num_splits, _job.num_splits + 1
    store = dist.PrefixStore(f"vnccl-split/{number}", _job.store)
    store.set(str(_job.rank), ",".join(map(str, ranks)) or "none")
    end_s = time.monotonic() + SPLIT_S
    missing = [*range(_job.size)]
    while missing := [rank for rank in missing if not store.check([str(rank)])]:
        if time.monotonic() > end_s:
            raise SplitTimeout(
                f"ncclCommSplit number {number}, for ranks {list(ranks)}: ranks {missing} never call it"
            )
        time.sleep(0.002)


_batch = 0  # number of the messages that are one kernel of NCCL; 0: none is being made
_batch_numbers = itertools.count(1)


def _grouped(start: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`dist.batch_isend_irecv`, whose messages are one kernel: none waits for another."""

    @functools.wraps(start)
    def run(operations: Any) -> Any:
        global _batch
        _batch = next(_batch_numbers)
        try:
            return start(operations)
        finally:
            _batch = 0

    return run


def install() -> None:
    """Make the simulated NCCL torch's."""
    for module in (dist, c10d):
        module.ProcessGroupNCCL = VirtualNCCL  # type: ignore[misc, assignment]
        module.is_nccl_available = lambda: True  # type: ignore[assignment]
    dist.batch_isend_irecv = _grouped(dist.batch_isend_irecv)  # type: ignore[assignment]
    c10d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)
    c10d._NCCL_AVAILABLE = True
    torch.cuda.nccl.version = lambda: (2, 28, 3)  # type: ignore[assignment]


install()
