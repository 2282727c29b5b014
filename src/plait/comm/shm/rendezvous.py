"""Rendezvous of the ranks of one host, and the mapping of each other's memory.

[Note: liveness by file locks]
A rank that has not yet entered a group holds no lock there, and one that was killed before never will. So
every rank locks its own arena's file before it sends the others its HostInfo, and holds the lock until it
leaves; they keep the file open, and query the kernel (see the note in native/sync.h).
"""

import ctypes
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from plait.comm.shm import native_lib
from plait.comm.shm.arena import Arena, Mapping
from plait.comm.transport import Call, OpType, Transport
from plait.errors import CommError

_INFO_BYTES = 1024
_ADDRESS_SPACE = 1 << 46  # bytes; x86-64 gives a process 2^47
_PAGE = 4096
_NAMESPACES = ("pid", "ipc", "net", "user")


@dataclass(frozen=True)
class HostInfo:
    """A rank's host and arena, as sent to the other ranks."""

    host: str  # equal on two ranks if and only if they can share memory
    pid: int = 0
    fd: int = -1  # of its arena
    key: str = ""  # of this rendezvous: the first rank's, a prefix of store keys
    reason: str = ""  # why it cannot share memory

    def encode(self) -> torch.Tensor:
        data = json.dumps(asdict(self)).encode()
        assert len(data) <= _INFO_BYTES, f"a HostInfo of {len(data)} bytes"
        return torch.tensor(list(data.ljust(_INFO_BYTES)), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: torch.Tensor) -> "HostInfo":
        return cls(**json.loads(bytes(data.tolist())))


def host_identity() -> str:
    """Identity of this host, as far as memory can be shared: its boot, its name, and the namespaces that
    separate containers. Network namespaces count too: a separate address means a separate host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text().strip() if boot.exists() else "", socket.gethostname()]
    for name in _NAMESPACES:
        namespace = Path(f"/proc/self/ns/{name}")
        parts.append(str(namespace.readlink()) if namespace.is_symlink() else "")
    return " ".join([*parts, str(os.getuid())])


class HostPeers:
    """The ranks of this host, and the arenas through which they reach each other."""

    def __init__(
        self,
        clib: ctypes.CDLL,
        rank: int,
        ranks: tuple[int, ...],
        arena: Arena,
        peers: "_PeerArenas",
        key: str,
    ) -> None:
        self.clib = clib
        self.ranks = ranks  # of the world
        self.arena = arena  # this rank's
        self.mappings = {rank: arena.mapping, **peers.mappings}  # of all ranks, by rank
        # Descriptors of the arenas: a live rank that has not left holds the lock of its own.
        self.files = {rank: arena.fd, **peers.fds}
        self.key = key
        self._peers = peers

    def is_alive(self, rank: int) -> bool:
        """Return whether another rank lives and has not left. See [Note: liveness by file locks]."""
        return bool(self.clib.pl_is_locked(self.files[rank]))

    def close(self) -> None:
        """Leave: peers that wait for this rank then raise."""
        self.arena.close()
        self.mappings.clear()
        self._peers.close()


@dataclass
class _PeerArenas:
    """The open files and mappings of the other ranks' arenas."""

    mappings: dict[int, Mapping] = field(default_factory=dict)
    fds: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self.mappings.clear()


def connect_host_peers(
    rank: int, size: int, transport: Transport, *, wanted: bool
) -> tuple[HostPeers | None, list[str], str]:
    """Exchange HostInfos between all ranks of `transport`, and map the arenas of this host. Collective.
    `wanted`: whether this rank agrees to share memory.

    Returns the peers with which this rank shares memory (None if it does not), every rank's host, and the
    reason why memory is not shared, if it is wanted.
    """
    clib = native_lib.load() if wanted else None
    arena = None
    info = HostInfo(
        host_identity(), os.getpid(), reason=native_lib.unavailable_reason() if wanted else "not wanted"
    )
    if clib is not None:
        try:
            arena = Arena(clib, _span_bytes(size))
            if clib.pl_lock(arena.fd) != 0:
                raise OSError("cannot lock the arena file")
            info = HostInfo(info.host, info.pid, arena.fd, secrets.token_hex(8))
        except (CommError, OSError) as error:
            info = HostInfo(info.host, reason=str(error).splitlines()[0])
    infos = _exchange(info, size, transport)
    ranks = tuple(r for r in range(size) if infos[r].host == info.host)
    peers = _PeerArenas()
    reason = next((infos[r].reason for r in ranks if infos[r].reason), "")
    if clib is not None and arena is not None and not reason:
        reason = _map_peers(clib, peers, arena.mapping.num_bytes, rank, {r: infos[r] for r in ranks})
    # Shared memory is used only if every rank of this host could map all arenas.
    results = _exchange(HostInfo(info.host, reason=reason[:400]), size, transport)
    reason = next((results[r].reason for r in ranks if results[r].reason), "")
    hosts = [other.host for other in infos]
    if arena is None or clib is None or reason:
        if arena is not None:
            arena.close()
        peers.close()
        return None, hosts, reason if wanted else ""
    return HostPeers(clib, rank, ranks, arena, peers, infos[ranks[0]].key), hosts, ""


def _span_bytes(num_ranks: int) -> int:
    """Address range of an arena: twice the host's memory, limited for all ranks together to half of a
    process's address space. The same on every rank of a host."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2 * memory, (_ADDRESS_SPACE // num_ranks) & -_PAGE)


def _exchange(info: HostInfo, size: int, transport: Transport) -> list[HostInfo]:
    out = torch.empty(size * _INFO_BYTES, dtype=torch.uint8)
    transport.run(Call(OpType.ALL_GATHER, info.encode(), out, label="host identities"))
    return [HostInfo.decode(data) for data in out.view(size, -1)]


def _map_peers(
    clib: ctypes.CDLL, peers: _PeerArenas, span_bytes: int, rank: int, infos: dict[int, HostInfo]
) -> str:
    """Return the reason for a failure, or an empty string."""
    for peer, info in infos.items():
        if peer == rank:
            continue
        try:
            peers.fds[peer] = open_peer_file(info.pid, info.fd)
            peers.mappings[peer] = Mapping(clib, peers.fds[peer], span_bytes)
        except (CommError, OSError) as error:
            return f"rank {rank} cannot map rank {peer}'s memory: {str(error).splitlines()[0]}"
    return ""


def open_peer_file(pid: int, fd: int) -> int:
    """Return a descriptor of the file that is open in another process of this user."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
