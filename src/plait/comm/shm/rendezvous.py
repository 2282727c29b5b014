"""Rendezvous of the ranks of one host, and the mapping of each other's memory, also without a group.

[Note: liveness by file locks]
A rank that has not yet entered a group holds no lock there, and one that was killed before never will. So
every rank locks its own arena's file before it sends the others its HostInfo, and holds the lock until it
leaves; they keep the file open, and query the kernel (see the note in native/sync.h).
"""

import ctypes
import hashlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from plait.comm.collectives import Group, all_gather
from plait.comm.objects import gather_texts
from plait.comm.shm import native_lib
from plait.comm.shm.arena import Arena, Mapping, as_tensor
from plait.comm.transport import Transport
from plait.errors import CommError

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

    def __init__(self, clib: ctypes.CDLL, rank: int, arena: Arena, infos: dict[int, HostInfo]) -> None:
        """`arena`: this rank's. `infos`: of the ranks of this host, by rank in the world."""
        self.clib = clib
        self.ranks = tuple(infos)
        self.arena = arena
        self.key = infos[self.ranks[0]].key
        self.mappings = {rank: arena.mapping}  # of all ranks' arenas, by rank
        # Descriptors of the arenas: a live rank that has not left holds the lock of its own.
        self.files = {rank: arena.fd}
        self._rank = rank

    def map_arenas(self, infos: dict[int, HostInfo]) -> str:
        """Map the peers' arenas. Return the reason for a failure, or an empty string."""
        for peer, info in infos.items():
            if peer == self._rank:
                continue
            try:
                self.files[peer] = open_peer_file(info.pid, info.fd)
                self.mappings[peer] = Mapping(self.clib, self.files[peer], self.arena.mapping.num_bytes)
            except (CommError, OSError) as error:
                return f"rank {self._rank} cannot map rank {peer}'s memory: {str(error).splitlines()[0]}"
        return ""

    def is_alive(self, rank: int) -> bool:
        """Return whether another rank lives and has not left. See [Note: liveness by file locks]."""
        return bool(self.clib.pl_is_locked(self.files[rank]))

    def close(self) -> None:
        """Leave: peers that wait for this rank then raise."""
        self.arena.close()
        self.mappings.clear()
        for fd in self.files.values():
            if fd != self.arena.fd:
                os.close(fd)


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
            arena = Arena(clib, span_bytes(size))
            if clib.pl_lock(arena.fd) != 0:
                raise OSError("cannot lock the arena file")
            info = HostInfo(info.host, info.pid, arena.fd, secrets.token_hex(8))
        except (CommError, OSError) as error:
            info = HostInfo(info.host, reason=str(error).splitlines()[0])
    group = Group(tuple(range(size)), rank, transport)
    infos = [HostInfo(**json.loads(text)) for text in _exchange(json.dumps(asdict(info)), group)]
    own_host = {r: other for r, other in enumerate(infos) if other.host == info.host}
    reason = next((other.reason for other in own_host.values() if other.reason), "")
    peers = None
    if clib is not None and arena is not None:
        peers = HostPeers(clib, rank, arena, own_host)
        reason = reason or peers.map_arenas(own_host)
    # Shared memory is used only if every rank of this host could map all arenas.
    reasons = _exchange(reason, group)
    reason = next((reasons[r] for r in own_host if reasons[r]), "")
    if peers is not None and reason:
        peers.close()
        peers = None
    return peers, [other.host for other in infos], reason if wanted else ""


def ranks_by_host(group: Group, device: torch.device | None = None) -> tuple[tuple[int, ...], ...]:
    """Return, for each host, the group ranks on it, in order. Collective. `device`: of the ranks, by default
    the CPU. LOCAL_WORLD_SIZE does not show which ranks share a host.

    Containers of one machine with separate network namespaces count as hosts.
    """
    digest = hashlib.sha256(host_identity().encode()).digest()
    fingerprint = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=device)
    fingerprints = torch.empty(group.size, dtype=torch.int64, device=device)
    all_gather(fingerprints, fingerprint, group, label="host names")
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(fingerprints.tolist()):
        by_host.setdefault(host, []).append(rank)
    return tuple(map(tuple, by_host.values()))


def span_bytes(num_ranks: int) -> int:
    """Address range of an arena: twice the host's memory, limited for all ranks together to half of a
    process's address space. The same on every rank of a host."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2 * memory, (_ADDRESS_SPACE // num_ranks) & -_PAGE)


def _exchange(text: str, group: Group) -> list[str]:
    return gather_texts(text, group, torch.device("cpu"), label="host identities")


def open_peer_file(pid: int, fd: int) -> int:
    """Return a descriptor of the file that is open in another process of this user."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


# --- memory of a process that others of its host read and write, without a group between them


def new_arena(num_processes: int) -> Arena | None:
    """Return an arena for tensors that up to `num_processes` processes map, or None without shared memory."""
    library = native_lib.load()
    if library is None:
        return None
    try:
        return Arena(library, span_bytes(num_processes))
    except (CommError, OSError):
        return None


def describe(arena: Arena | None) -> HostInfo:
    """Return the host and file by which another process maps it."""
    return HostInfo(host_identity(), os.getpid(), -1 if arena is None else arena.fd)


class RemoteMemory:
    """Another process's arena, mapped; it stays readable after that process has ended."""

    def __init__(self, info: HostInfo, num_processes: int) -> None:
        """Raises CommError or OSError if it cannot be mapped."""
        library = native_lib.load()
        if library is None or info.fd < 0 or info.host != host_identity():
            raise CommError("the processes share no memory", given=native_lib.unavailable_reason() or None)
        fd = open_peer_file(info.pid, info.fd)
        try:
            self._mapping = Mapping(library, fd, span_bytes(num_processes))
            self._num_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)

    def tensor(self, offset: int, numel: int, kind: torch.dtype) -> torch.Tensor:
        """The flat tensor at an offset of the arena. Raises CommError for one outside of it."""
        if offset < 0 or numel < 0 or offset + numel * kind.itemsize > self._num_bytes:
            raise CommError(
                "a tensor is outside of the memory that was shared",
                given=f"{numel} elements at byte {offset} of {self._num_bytes}",
            )
        return as_tensor(self._mapping.address + offset, numel, kind, self._mapping)
