"""Joining the ranks that this process was started with: by torchrun, by our launcher, or alone."""

import atexit
import datetime
import os
import warnings
from collections import Counter

import torch
import torch.distributed as dist

from plait.comm.collectives import Group, all_reduce, barrier
from plait.comm.comm_thread import CommThread
from plait.comm.null_transport import NullTransport
from plait.comm.shm import HostPeers, Mailbox, meet, open_group
from plait.comm.stats import CommLog, WaitClock
from plait.comm.store import JobStore
from plait.comm.torch_transport import TorchTransport, among
from plait.comm.transport import Transport
from plait.errors import CommError, unknown_key_hint

TRANSPORTS = ("auto", "host", "gloo", "nccl")

# Where our launcher puts the file through which its ranks meet: a FileStore listens on no port, while
# torch's TCPStore listens on every interface even for a loopback address.
RENDEZVOUS_FILE = "PLAIT_RENDEZVOUS_FILE"


class World:
    """All ranks of the job. Made by `connect`; ended by `close`."""

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        device: torch.device,
        *,
        store: dist.Store | None = None,
        owned: bool = False,
        timeout: datetime.timedelta = datetime.timedelta(minutes=10),
        transport: str = "auto",
        dry_host_size: int | None = None,
    ) -> None:
        """Use `connect`. `dry_host_size`: of a world of nobody, see `dry`. Raises CommError."""
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.device = device
        self.timeout = timeout  # how long a communication may wait for a rank
        self.ledger = CommLog()
        self.clock = WaitClock()  # of the thread that makes the world: the one that trains
        self._dry = None if dry_host_size is None else (transport, dry_host_size)
        self._pid = os.getpid()
        self._store = store
        self._told = JobStore(store, rank, timeout.total_seconds())
        self._owned = owned  # the process group is ours to destroy: the program had made none
        self._links: list[Transport] = []
        self._backgrounds: list[CommThread] = []
        self._handle = dist.group.WORLD if size > 1 else None
        self._neighbours: HostPeers | None = None
        self._opened: Counter[tuple[tuple[int, ...], str]] = Counter()
        if size > 1 and device.type == "cpu":
            self._meet(transport)
        self.group = self.group_of(tuple(range(size)))

    @classmethod
    def alone(cls, device: torch.device) -> "World":
        """One rank that communicates with nobody, whatever else this process takes part in."""
        return cls(0, 1, 0, device)

    @classmethod
    def dry(cls, rank: int, size: int, transport: str, host_size: int | None = None) -> "World":
        """A rank of a job that there is not, on meta: its ledger counts what it would say, and nothing else
        comes of it. `transport`: host, gloo or nccl. `host_size`: how many ranks there are to a host; None:
        one host has them all."""
        meta, each = torch.device("meta"), size if host_size is None else host_size
        return cls(rank, size, rank, meta, transport=transport, dry_host_size=each)

    @property
    def transport(self) -> str:
        """What carries the group of all ranks: host, gloo or nccl; "none" for a lone rank."""
        return self.group.link.name if self.group.link is not None else "none"

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        barrier(self.group)

    def any_flag(self, flag: bool) -> bool:
        """True on all ranks when it is true on one. Every rank must call it."""
        return self.any_flags(flag)[0]

    def any_flags(self, *flags: bool) -> tuple[bool, ...]:
        """`any_flag` of each, in one exchange. Every rank must call it, with as many."""
        votes = torch.tensor([float(flag) for flag in flags], device=self.device)
        all_reduce(votes, self.group, "max")
        return tuple(vote > 0 for vote in votes.tolist())

    def tell(self, key: str, text: str) -> None:
        """Lets every rank know, also those that do not ask yet. As the four below, raises CommError when the
        job's store does not answer."""
        self._told.tell(key, text)

    def heard(self, key: str) -> str | None:
        """What a rank has told under the key, if one has."""
        return self._told.heard(key)

    def announce(self, key: str) -> None:
        """Lets the ranks go on that `wait_for` the key."""
        self._told.tell(key, "")

    def wait_for(self, key: str) -> str:
        """What a rank has told under `key`, when it has. No time limit: the launcher ends us if that rank
        dies."""
        return self._told.wait_for(key)

    def claim(self, key: str) -> bool:
        """True for exactly one of the ranks that ask: the first."""
        return self._told.claim(key)

    def is_alive(self) -> bool:
        """Whether the process group that it was made for is still the process's."""
        if self.size == 1:
            return not dist.is_initialized() or dist.get_world_size() == 1
        return dist.is_initialized() and self._handle is dist.group.WORLD

    def group_of(self, ranks: tuple[int, ...], lane: str = "", axes: tuple[str, ...] = ()) -> Group:
        """A group of these ranks, this one among them. All of them must ask for it at the same point of the
        program; see `Mesh.group` for lanes. `axes`: what the ledger calls it."""
        if self.rank not in ranks:
            raise CommError(
                "a rank asks for a group that it is not in",
                given=f"rank {self.rank}, ranks {list(ranks)}",
                hint="only the ranks of a group ask for it",
            )
        link = self._link(ranks, lane) if len(ranks) > 1 else None
        if link is None:
            return Group(ranks, ranks.index(self.rank), None)
        background = CommThread(self.device, self.clock)
        self._links.append(link)
        self._backgrounds.append(background)
        return Group(ranks, ranks.index(self.rank), link, background, axes, lane, self.ledger, self.clock)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor where transports read and write it in place; what is in it is undefined."""
        if self._neighbours is not None:
            return self._neighbours.arena.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _meet(self, transport: str) -> None:
        base = TorchTransport(self._handle, tuple(range(self.size)), self.rank)
        wanted = transport in ("auto", "host")
        self._neighbours, hosts, why_not = meet(self.rank, self.size, base, wanted=wanted)
        base.cut()
        if why_not and transport == "host":
            raise CommError(
                "ranks of one host cannot share memory", given=why_not, hint="transport=auto or gloo"
            )
        if why_not and hosts.index(hosts[self.rank]) == self.rank:  # once per host
            warnings.warn(f"ranks of one host talk through Gloo, which is slower: {why_not}", stacklevel=4)

    def _link(self, ranks: tuple[int, ...], lane: str) -> Transport:
        if self._dry is not None:
            return self._dry_link(ranks, *self._dry)
        if self._neighbours is not None and set(ranks) <= set(self._neighbours.ranks):
            return self._host_link(self._neighbours, ranks, lane)
        handle = self._handle
        if len(ranks) < self.size or lane:
            handle = among(ranks, self.rank, f"plait/{self._name_of(ranks, lane)}", self.timeout)
        assert handle is not None, "a world that was left"
        return TorchTransport(handle, ranks, ranks.index(self.rank))

    @staticmethod
    def _dry_link(ranks: tuple[int, ...], transport: str, host_size: int) -> Transport:
        is_one_host = len({rank // host_size for rank in ranks}) == 1
        return NullTransport("gloo" if transport == "host" and not is_one_host else transport, len(ranks))

    def _host_link(self, neighbours: HostPeers, ranks: tuple[int, ...], lane: str) -> Transport:
        assert self._store is not None, "ranks without a store"
        key = f"plait/{neighbours.key}/{self._name_of(ranks, lane)}"
        place, board = ranks.index(self.rank), Mailbox.of(self._store)
        return open_group(neighbours, ranks, place, board, key, self.timeout)

    def _name_of(self, ranks: tuple[int, ...], lane: str) -> str:
        """Of the next group of these ranks, the same on all of them."""
        self._opened[ranks, lane] += 1
        return f"{','.join(map(str, ranks))}/{lane}/{self._opened[ranks, lane]}"

    def close(self) -> None:
        """Leaves the job; `connect` would join anew. Groups of this world can be used no more."""
        global _world
        if os.getpid() != self._pid:  # a fork that ends: what it has inherited is not its to end
            return
        for background in self._backgrounds:
            background.close()
        for link in self._links:
            link.cut()
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours = self._handle = None
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        self._told.close()
        if _world is self:
            _world = None
            atexit.unregister(self.close)


# torch's default process group is one per process, so the world that owns it is too.
_world: World | None = None


def connect(*, timeout_s: float = 600.0, device: str | None = None, transport: str = "auto") -> World:
    """Joins the ranks that torchrun or our launcher announced in the environment; alone without one.

    Takes one GPU per rank and NCCL where CUDA is available (or `device="cuda"`), else CPU and Gloo.
    A second call returns the same world, whatever its arguments, as long as its process group lives. A
    process group that the program has made already is used, and the GPU that it has chosen.
    `timeout_s`: how long a communication may wait for a rank. `transport` of CPU ranks: `host`, shared memory
    between the ranks of one host and Gloo between hosts; `gloo` everywhere; `auto` is `host` where that is
    possible. GPUs have `nccl`, which is their `auto`. Raises CommError.
    """
    global _world
    device = _device_of(transport, device)
    if _world is not None and _world.is_alive():
        return _world
    rank, size, local_rank = (_env_int(name, value) for name, value in _RANK_VARIABLES)
    timeout = datetime.timedelta(seconds=timeout_s)
    store, found = None, dist.is_initialized()
    if found:
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()  # torch offers no public way to it
        if "LOCAL_RANK" not in os.environ and torch.cuda.is_available():
            local_rank = torch.cuda.current_device()
    chosen = _device(device, local_rank)
    if size > 1 and not found:
        store = _store(rank, size, timeout)
        _join(store, rank, size, chosen, timeout)
    owned = store is not None and not found
    _world = World(
        rank, size, local_rank, chosen, store=store, owned=owned, timeout=timeout, transport=transport
    )
    if chosen.type == "cpu":  # see Link. NCCL needs no such care, and waits for its peers when destroyed
        atexit.register(_world.close)
    return _world


_RANK_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise CommError(f"{name} is not a number", given=f"{name}={text}", hint="start with torchrun")
    return int(text)


def _device_of(transport: str, device: str | None) -> str | None:
    """The device asked for, or the one that the transport is between."""
    if transport not in TRANSPORTS:
        raise CommError(
            "there is no such transport", given=repr(transport), hint=unknown_key_hint(transport, TRANSPORTS)
        )
    between = {"host": "cpu", "gloo": "cpu", "nccl": "cuda"}.get(transport)
    if between is not None and device not in (None, between):
        raise CommError(
            f"{transport} is not for ranks on that device",
            given=f"transport={transport!r} device={device!r}",
            expected=f"device={between!r}",
            hint="transport='auto'",
        )
    return device or between


def _device(asked: str | None, local_rank: int) -> torch.device:
    if asked == "cpu" or (asked is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise CommError(
            "a rank has no GPU",
            given=f"local rank {local_rank}, {torch.cuda.device_count()} GPUs",
            expected="one GPU per rank",
            hint="fewer ranks per host" if torch.cuda.device_count() else "device=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _store(rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    path = os.environ.get(RENDEZVOUS_FILE)
    if path is not None:
        return dist.FileStore(path, size)
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        taken = "EADDRINUSE" in str(error) or "address already in use" in str(error)
        raise CommError(
            "the port where the ranks meet is taken" if taken else "the ranks cannot meet",
            given=f"rank {rank} of {size} at {address}: {str(error).splitlines()[0][:160]}",
            expected="a free port" if taken else "MASTER_ADDR and MASTER_PORT of the host of rank 0",
            hint="another --master-port" if taken else "start with torchrun",
        ) from error
    # torchrun may start the ranks again, on the store of the ones before: what these have said is not for us.
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _join(store: dist.Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta) -> None:
    cuda = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("plait", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CommError(
            "the ranks cannot form a group", given=f"rank {rank} of {size}: {str(error).splitlines()[0]}"
        ) from error
