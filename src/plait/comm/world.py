"""The ranks of the job, started by torchrun, by our launcher, by `mpirun` or `srun`, or a single process; and
their groups along the axes of a grid.

[Note: connections of several engines]
Connections last until the world is closed: destroying a communicator of NCCL is a collective, and ranks drop
an engine at different times. So engines share them: groups of the same ranks and channel, in meshes of
different engines, are one communicator (or shared segment) and one comm thread. All ranks run one program, so
what engines start there is in one order, and what a dropped engine has left in flight runs first.

Either all groups of a partition are new or none, on all ranks: a partition by axes consists of translations
of one set of ranks, and only one partition of all ranks does. After an exception, messages may be left that
are never received, so the next engine has new connections if there was one on any rank.
"""

import atexit
import datetime
import hashlib
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.collectives import Group, all_reduce, barrier
from plait.comm.comm_thread import CommThread
from plait.comm.device import (
    NodeBinding,
    allowed_processors,
    check_backend,
    claim_device,
    select_device,
    set_nccl_defaults,
    use_processors,
)
from plait.comm.objects import gather_texts
from plait.comm.rendezvous import RANK_VARIABLES, JobProcess, Rendezvous, has_outer_store
from plait.comm.shm.arena import Arena
from plait.comm.shm.rendezvous import HostPeers, connect_host_peers, host_identity
from plait.comm.shm.transport import open_group
from plait.comm.stats import CommLog, WaitClock
from plait.comm.store import JobStore
from plait.comm.subgroup_transport import SubgroupTransport
from plait.comm.torch_transport import TorchTransport, new_torch_group
from plait.comm.transport import NullTransport, Transport
from plait.errors import CommError, nearest
from plait.launchers import adopt_ranks, read_number
from plait.plan import Grid
from plait.plan.communicators import Communicator
from plait.plan.cost_model import TRANSPORTS

_ABORT_S = 10.0  # limit of aborting communications

_Key = tuple[str, tuple[int, ...], str, int | None]  # of shared connections: kind, ranks, channel, CTAs


@dataclass(frozen=True)
class Connection:
    """How the ranks of a job are connected."""

    transport: str = "auto"
    timeout: datetime.timedelta = datetime.timedelta(minutes=10)  # limit of a communication's wait for a rank
    store: dist.Store | None = None
    job_store: JobStore | None = None  # the same, with limits
    owns_process_group: bool = False  # the world destroys it
    dry_run_host_size: int | None = None  # ranks per host of a dry run; None: a real run
    binding: NodeBinding | None = None  # to the processors near the GPU


class World:
    """All ranks of the job. Created by `connect`; ended by `close`."""

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        device: torch.device,
        connection: Connection = Connection(),
    ) -> None:
        """Use `connect`. Raises CommError."""
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.device = device
        self.timeout = connection.timeout
        self.store = connection.job_store or JobStore(None, rank, connection.timeout.total_seconds())
        self.comm_log = CommLog()
        self.clock = WaitClock()  # of the creating thread: the training thread
        self._connection = connection
        self._pid = os.getpid()
        self._transports: list[Transport] = []
        self._comm_threads: list[CommThread] = []
        self._process_group = dist.group.WORLD if size > 1 else None
        self._host_peers: HostPeers | None = None
        self._num_opened: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._shared: dict[_Key | None, tuple[Transport, CommThread]] = {}
        self.num_processes, self.process_rank = 1, 0  # of a job with servers; each process has its own world
        self.was_interrupted = False  # an exception left messages, see [Note: connections of several engines]
        self.arena: Arena | None = None
        self._leave: Callable[[], None] | None = None
        if size > 1 and device.type == "cpu":
            self._connect_host(connection.transport)
            self.store.is_gone = self._is_gone
        self.group = self.new_group(tuple(range(size)))

    @classmethod
    def alone(cls, device: torch.device) -> "World":
        """Return a world of one rank, independent of any other this process belongs to."""
        return cls(0, 1, 0, device)

    @classmethod
    def of_process(cls, process: JobProcess, arena: Arena | None) -> "World":
        """Return a world of one rank, which shares the job's store. `arena`: where the job's other processes
        reach parameters and gradients."""
        world = cls.alone(torch.device("cpu"))
        world.store, world.num_processes, world.process_rank = process.store, process.size, process.rank
        world.arena = arena
        return world

    def before_close(self, leave: Callable[[], None]) -> None:
        """Call `leave` once, when this world is closed or Python ends."""
        self._leave = leave
        atexit.register(self._exit)

    @classmethod
    def dry_run(cls, rank: int, size: int, transport: str, host_size: int | None = None) -> "World":
        """Return one rank of a simulated job, on meta: `comm_log` counts what it would communicate, and
        nothing is sent. `transport`: host, gloo or nccl. `host_size`: ranks per host; None: all on one host.
        """
        meta, ranks_per_host = torch.device("meta"), size if host_size is None else host_size
        return cls(rank, size, rank, meta, Connection(transport, dry_run_host_size=ranks_per_host))

    @property
    def transport(self) -> str:
        """The transport of the group of all ranks: host, gloo or nccl; "none" for a single rank."""
        return self.group.transport_or_none.name if self.group.transport_or_none is not None else "none"

    def barrier(self) -> None:
        """Block until every rank has reached the barrier."""
        barrier(self.group)

    def host_size(self) -> int | None:
        """Ranks on each host, by the launcher's LOCAL_WORLD_SIZE and LOCAL_RANK; None if these are not those
        of hosts with equally many neighbours each. The same on all ranks. Collective."""
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        is_one = local_size < 1 or self.size % local_size or self.local_rank != self.rank % local_size
        own = 0.0 if is_one else float(local_size)
        sizes = torch.tensor([own, -own], device=self.device)
        all_reduce(sizes, self.group, "max")
        most, least = sizes.tolist()
        return int(most) if most and most == -least else None

    def any_flag(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on one. Collective."""
        return self.any_flags(flag)[0]

    def any_flags(self, *flags: bool) -> tuple[bool, ...]:
        """Return `any_flag` of each, in one all-reduce. Collective, with the same number of flags."""
        votes = torch.tensor([float(flag) for flag in flags], device=self.device)
        all_reduce(votes, self.group, "max")
        return tuple(vote > 0 for vote in votes.tolist())

    def is_alive(self) -> bool:
        """Return whether the process group that it was created for is still the default one, and this process
        is not a fork of the one that created it."""
        if os.getpid() != self._pid:
            return False
        if self.size == 1:
            return not dist.is_initialized() or dist.get_world_size() == 1
        return dist.is_initialized() and self._process_group is dist.group.WORLD

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank is known to have ended or left: True only for other ranks of this host."""
        peers = self._host_peers
        is_peer = peers is not None and rank != self.rank and rank in peers.files
        return is_peer and peers is not None and not peers.is_alive(rank)

    @property
    def shares_communicators(self) -> bool:
        """True if most groups share one communicator. See [Note: few communicators] in
        `plan/communicators.py`."""
        return self.device.type == "cuda"

    def new_group(self, ranks: tuple[int, ...], channel: str = "") -> Group:
        """Create a group of these ranks, which include this one, with connections of its own. All of them
        must call it at the same point of the program; see `Mesh.group` for channels."""
        return self._group(ranks, channel, (), partial(self._own_transport, ranks, channel))

    def split_group(
        self, ranks: tuple[int, ...], channel: str, axes: tuple[str, ...], max_ctas: int | None = None
    ) -> Group:
        """Return a group with a communicator for each group of a partition of all ranks, which others of the
        same ranks and channel share: [Note: connections of several engines]. Collective over all ranks of the
        job: see [Note: creation order of communicators] in `plan/communicators.py`."""
        make = partial(self._own_transport, ranks, channel, splits=True, max_ctas=max_ctas)
        return self._group(ranks, channel, axes, make, ("split", ranks, channel, max_ctas))

    def subgroup(self, ranks: tuple[int, ...], channel: str = "", axes: tuple[str, ...] = ()) -> Group:
        """Return a group for small or rare messages, which shares its connections like `split_group`'s; with
        `shares_communicators`, it has those of all ranks. Then it is not a collective."""
        make = partial(self._own_transport, ranks, channel)
        if self.shares_communicators:
            make = partial(self._shared_transport, ranks)
        return self._group(ranks, channel, axes, make, ("subgroup", ranks, channel, None))

    def renew_connections(self) -> None:
        """Give later groups new connections if messages may be left in the old ones. Collective."""
        failed = any(comm_thread.has_failed for _, comm_thread in self._shared.values())
        if self.any_flag(self.was_interrupted or failed):
            self._shared.clear()
        self.was_interrupted = False

    def _check_member(self, ranks: tuple[int, ...]) -> None:
        if self.rank not in ranks:
            raise CommError(
                "a rank cannot create a group without itself",
                given=f"rank {self.rank}, ranks {list(ranks)}",
                expected="ranks that include this one",
                hint="call new_group on the ranks of the group only",
            )

    def _group(
        self,
        ranks: tuple[int, ...],
        channel: str,
        axes: tuple[str, ...],
        make: Callable[[], Transport],
        key: _Key | None = None,
    ) -> Group:
        """`key`: of connections to share."""
        self._check_member(ranks)
        group_rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return Group(ranks, group_rank, None)
        if key in self._shared:
            transport, comm_thread = self._shared[key]
        else:
            transport, comm_thread = make(), CommThread(self.device, self.clock)
            self._transports.append(transport)
            self._comm_threads.append(comm_thread)
            if key is not None:
                self._shared[key] = transport, comm_thread
        return Group(ranks, group_rank, transport, comm_thread, axes, channel, self.comm_log, self.clock)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat tensor that transports access in place."""
        if self._host_peers is not None:
            return self._host_peers.arena.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _connect_host(self, transport: str) -> None:
        base = TorchTransport(self._process_group, tuple(range(self.size)), self.rank)
        wanted = transport in ("auto", "host")
        self._host_peers, hosts, reason = connect_host_peers(self.rank, self.size, base, wanted=wanted)
        base.close()
        if reason and transport == "host":
            raise CommError(
                "ranks of one host cannot share memory",
                given=reason,
                expected="shared memory for transport=host",
                hint="transport=auto or gloo",
            )
        if reason and hosts.index(hosts[self.rank]) == self.rank:  # once per host
            warnings.warn(
                f"ranks of one host communicate through Gloo, which is slower: {reason}", stacklevel=4
            )

    def _own_transport(
        self, ranks: tuple[int, ...], channel: str, *, splits: bool = False, max_ctas: int | None = None
    ) -> Transport:
        group_rank, peers = ranks.index(self.rank), self._host_peers
        if self._connection.dry_run_host_size is not None:
            name = self._connection.transport
            is_one_host = len({rank // self._connection.dry_run_host_size for rank in ranks}) == 1
            return NullTransport("gloo" if name == "host" and not is_one_host else name, len(ranks))
        if peers is not None and set(ranks) <= set(peers.ranks):
            assert self._connection.store is not None, "ranks without a store"
            key = f"plait/{peers.key}/{self._group_name(ranks, channel)}"
            return open_group(peers, ranks, group_rank, self._connection.store, key, self.timeout)
        process_group = self._process_group
        assert process_group is not None, "the world is closed"
        if len(ranks) < self.size or channel or self._is_lazy(process_group):
            name = f"plait/{self._group_name(ranks, channel)}"
            process_group = new_torch_group(
                ranks, self.rank, name, self.timeout, self.device, splits=splits, max_ctas=max_ctas
            )
        return TorchTransport(process_group, ranks, group_rank, device=self.device)

    def _is_lazy(self, process_group: dist.ProcessGroup) -> bool:
        """Return whether NCCL connects the ranks of a program's group only when it is used, and pairs of them
        by communicators of their own."""
        return self.device.type == "cuda" and process_group.bound_device_id is None

    def _shared_transport(self, ranks: tuple[int, ...]) -> Transport:
        base = self.group.transport
        assert isinstance(base, TorchTransport), f"no messages through {base.name}"
        return base if len(ranks) == self.size else SubgroupTransport(base, ranks, ranks.index(self.rank))

    def _group_name(self, ranks: tuple[int, ...], channel: str) -> str:
        """Name of the next group of these ranks, the same on all of them: short, see [Note: group names] in
        `torch_transport.py`."""
        self._num_opened[ranks, channel] += 1
        digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
        return f"{digest}/{channel}/{self._num_opened[ranks, channel]}"

    def close(self) -> None:
        """Leave the job; the next `connect` joins again. Groups of this world cannot be used any more."""
        global _world
        if os.getpid() != self._pid:  # a fork: its inherited resources belong to the parent
            return
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
            atexit.unregister(self._exit)
        for comm_thread in self._comm_threads:
            comm_thread.close()
        for transport in self._transports:
            transport.close()
        self._process_group = None
        if self._connection.binding is not None:
            self._connection.binding.release()
        if self._connection.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._connection = Connection()  # without the store
        self.store.close()
        host_peers, self._host_peers = self._host_peers, None
        if host_peers is not None:
            host_peers.close()
        if _world is self:
            _world = None
            atexit.unregister(self._exit)

    def use_processors(self) -> None:
        """Use this rank's share of the processors near its GPU, for work on the CPU. Collective."""
        if self.device.type == "cuda":
            text = f"{host_identity()} {sorted(allowed_processors())}"
            texts = gather_texts(text, self.group, self.device, label="processors")
            use_processors(max(1, len(allowed_processors()) // texts.count(text)))

    def abort(self) -> None:
        """Abort NCCL's communications in a process that ends because of an error: kernels that wait for other
        ranks would keep it from exiting, and its launcher from ending those. Does nothing on CPUs, or if the
        process group is the program's own."""
        is_ours = self._connection.owns_process_group and self._process_group is not None
        if self.device.type == "cuda" and is_ours and self.is_alive():
            abort: Any = dist.distributed_c10d._abort_process_group
            thread = threading.Thread(target=abort, name="plait-abort", daemon=True)
            thread.start()
            thread.join(_ABORT_S)

    def _exit(self) -> None:
        """Leave the job when Python ends. See TorchTransport, which NCCL does not need: it waits for peers
        when destroyed."""
        if self.device.type == "cpu":
            self.close()
        elif os.getpid() == self._pid:
            self.store.close()


class Mesh:
    """This rank's coordinates on the grid, and its groups: those with communicators are created at once,
    others on first use.

    Only its members create a group: all of them must request it at the same point of the program.
    """

    def __init__(self, world: World, grid: Grid, communicators: Sequence[Communicator] = ()) -> None:
        """`communicators`: of the plan. With `World.shares_communicators` they are created here, by all ranks
        at the same point of the program, and other groups have no communicators of their own."""
        assert world.size == grid.num_ranks, f"{world.size} ranks for a grid of {grid.num_ranks}"
        self.world = world
        self.grid = grid
        self.coord = grid.coord(world.rank)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        for each in communicators if world.shares_communicators else ():
            ranks = grid.group(world.rank, *each.axes)
            self._groups[ranks, each.channel] = world.split_group(
                ranks, each.channel, each.axes, each.max_ctas
            )

    def group(self, *axes: str, channel: str = "") -> Group:
        """Return the group of the ranks that differ from this one along `axes` only.

        Groups of the same ranks on different channels have separate connections (NCCL: streams): what is
        started on one neither waits for work in flight on another, nor must be in one order with it. On NCCL
        this holds for the plan's communicators; the channels of other groups share one.
        """
        return self._cached_group(self.grid.group(self.world.rank, *axes), channel, axes)

    def subgroup(self, axis: str, coords: Sequence[int], *, channel: str = "") -> Group:
        """Return the group of the ranks at these coordinates of one axis, which include this rank."""
        axis_ranks = self.grid.group(self.world.rank, axis)
        return self._cached_group(tuple(axis_ranks[coord] for coord in coords), channel, (axis,))

    def message_group(
        self, axis: str, source: int, target: int, *, channel: str, shared_channel: str
    ) -> tuple[Group, int]:
        """Return a group for messages from one coordinate of an axis to another, and the other rank's index
        in it. `shared_channel`: of the communicator of the axis that they use if communicators are shared."""
        is_source = self.coord[axis] == source
        axis_ranks = self.grid.group(self.world.rank, axis)
        shared = self._groups.get((axis_ranks, shared_channel))
        if shared is not None:
            return replace(shared, axes=(axis,), channel=channel), target if is_source else source
        group = self.subgroup(axis, sorted((source, target)), channel=channel)
        return group, 1 - group.rank

    def _cached_group(self, ranks: tuple[int, ...], channel: str, axes: Sequence[str]) -> Group:
        key = (ranks, channel if len(ranks) > 1 else "")
        if key not in self._groups:
            self._groups[key] = self.world.subgroup(*key, self.grid.used(*axes))
        return self._groups[key]


# torch has one default process group per process, so there is one world that owns it.
_world: World | None = None


def connect(*, timeout_s: float = 600.0, device: str | None = None, transport: str = "auto") -> World:
    """Join the ranks that torchrun, our launcher, `mpirun` or `srun` announced in the environment; without
    one, run alone.

    Uses one GPU per rank and NCCL if CUDA is available (or `device="cuda"`), else CPU and Gloo. A second call
    returns the same world, whatever its arguments, as long as its process group lives. An existing process
    group of the program is used, with the GPU that it has selected. `timeout_s`: limit of a communication's
    wait for a rank. `transport` of CPU ranks: `host`, shared memory between the ranks of one host and Gloo
    between hosts; `gloo` everywhere; `auto` is `host` where possible. GPUs use `nccl`, which is their `auto`.
    Raises CommError.
    """
    global _world
    device = _transport_device(transport, device)
    if _world is not None and _world.is_alive():
        return _world
    store, job_store, has_process_group = None, None, dist.is_initialized()
    if not has_process_group:
        adopt_ranks()
    rank, size, local_rank = (read_number(os.environ, *variable) for variable in RANK_VARIABLES)
    timeout = datetime.timedelta(seconds=timeout_s)
    if has_process_group:
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()  # no public API
        if "LOCAL_RANK" not in os.environ and torch.cuda.is_available():
            local_rank = torch.cuda.current_device()
    torch_device = select_device(device, local_rank, dist.group.WORLD)
    if size > 1 and has_process_group:
        assert dist.group.WORLD is not None, "no process group"
        check_backend(dist.group.WORLD, torch_device)
        clients = {*range(1, size)} if rank == 0 and not has_outer_store() else ()
        job_store = JobStore(store, rank, timeout_s, clients)
    elif size > 1:
        process = Rendezvous(rank, size, timeout_s).join()
        store, job_store = process.base, process.store
        try:
            _join(process, torch_device, timeout)
        except BaseException:
            process.store.close()
            raise
    connection = Connection(
        transport,
        timeout,
        store,
        job_store,
        owns_process_group=store is not None and not has_process_group,
        binding=NodeBinding.near(torch_device) if torch_device.type == "cuda" else None,
    )
    _world = World(rank, size, local_rank, torch_device, connection)
    atexit.register(_world._exit)
    if torch_device.type == "cuda":
        _abort_after_errors()
    return _world


@cache  # installs it once
def _abort_after_errors() -> None:
    """Call the world's `abort` after an uncaught exception is printed."""
    previous = sys.excepthook

    def print_and_abort(*error: Any) -> None:
        previous(*error)
        if _world is not None:
            _world.abort()

    sys.excepthook = print_and_abort


def _transport_device(transport: str, device: str | None) -> str | None:
    """Return the requested device, or the one that the transport requires."""
    if transport not in TRANSPORTS:
        raise CommError(
            "unknown transport",
            given=repr(transport),
            expected=", ".join(TRANSPORTS),
            hint=nearest(transport, TRANSPORTS) or "auto",
        )
    required = {"host": "cpu", "gloo": "cpu", "nccl": "cuda"}.get(transport)
    if required is not None and device not in (None, required):
        raise CommError(
            f"{transport} does not support that device",
            given=f"transport={transport!r} device={device!r}",
            expected=f"device={required!r}",
            hint="transport='auto'",
        )
    return device or required


def _join(process: JobProcess, device: torch.device, timeout: datetime.timedelta) -> None:
    """Connect this rank with the others, which are there."""
    cuda = device.type == "cuda"
    if cuda:
        claim_device(device, process.store, process.rank)
        set_nccl_defaults()
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("plait", process.base),
            rank=process.rank,
            world_size=process.size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CommError(
            "the process group cannot be created",
            given=f"rank {process.rank} of {process.size}: {str(error).splitlines()[0]}",
            expected="ranks that run, and reach each other over the network",
            hint="look for the first rank that ended; or set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
        ) from error
