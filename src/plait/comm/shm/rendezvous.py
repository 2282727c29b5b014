"""Which ranks share a host, and how they come to share its memory.

[Note: who is here]
A rank that has not come to a group yet holds no lock there, and one that was killed on its way never will. So
every rank locks its own arena's file, from before the others hear of it until it leaves; they keep the file
open, and ask the kernel (native/sync.h has the note on that).
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

_CARD_BYTES = 1024
_ADDRESSES = 1 << 46  # bytes; x86-64 gives a process 2^47
_PAGE = 4096
_NAMESPACES = ("pid", "ipc", "net", "user")


@dataclass(frozen=True)
class HostInfo:
    """What a rank tells the others of itself."""

    host: str  # equal on two ranks if and only if they can share memory
    pid: int = 0
    fd: int = -1  # of its arena
    key: str = ""  # of this meeting: the first rank's names things that ranks leave for each other
    why_not: str = ""  # why it cannot share memory

    def encode(self) -> torch.Tensor:
        data = json.dumps(asdict(self)).encode()
        assert len(data) <= _CARD_BYTES, f"a card of {len(data)} bytes"
        return torch.tensor(list(data.ljust(_CARD_BYTES)), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: torch.Tensor) -> "HostInfo":
        return cls(**json.loads(bytes(data.tolist())))


def identity() -> str:
    """Of this host, as far as memory can be shared: its boot, its name, and the namespaces that separate
    containers. Network namespaces count too: what has an address of its own is a host of its own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    found = [boot.read_text().strip() if boot.exists() else "", socket.gethostname()]
    for name in _NAMESPACES:
        link = Path(f"/proc/self/ns/{name}")
        found.append(str(link.readlink()) if link.is_symlink() else "")
    return " ".join([*found, str(os.getuid())])


class HostPeers:
    """The ranks of this host, and the arenas through which they reach each other."""

    def __init__(
        self, clib: ctypes.CDLL, rank: int, ranks: tuple[int, ...], arena: Arena, peers: "_Peers", key: str
    ) -> None:
        self.clib = clib
        self.ranks = ranks  # of the world
        self.arena = arena  # this rank's
        self.mappings = {rank: arena.mapping, **peers.mappings}  # everybody's, by rank
        # Descriptors of the arenas: a rank that lives, and has not left, has locked its own.
        self.files = {rank: arena.fd, **peers.fds}
        self.key = key
        self._peers = peers

    def is_here(self, rank: int) -> bool:
        """Whether another rank lives and has not left. See [Note: who is here]."""
        return bool(self.clib.pl_is_locked(self.files[rank]))

    def close(self) -> None:
        """Leaves: peers that wait for this rank learn that it is gone."""
        self.arena.close()
        self.mappings.clear()
        self._peers.close()


@dataclass
class _Peers:
    """What a rank has opened of the others' arenas."""

    mappings: dict[int, Mapping] = field(default_factory=dict)
    fds: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self.mappings.clear()


def meet(rank: int, size: int, link: Transport, *, wanted: bool) -> tuple[HostPeers | None, list[str], str]:
    """All ranks of `link` tell each other where they are. `wanted`: whether this rank would share memory.

    Returns the neighbours with whom this rank shares memory (None when it does not), every rank's host, and
    why memory is not shared, if it is for another reason than that nobody asked for it.
    """
    clib = native_lib.load() if wanted else None
    arena = None
    card = HostInfo(identity(), os.getpid(), why_not=native_lib.why_not() if wanted else "not wanted")
    if clib is not None:
        try:
            arena = Arena(clib, _span_bytes(size))
            if clib.pl_lock(arena.fd) != 0:
                raise OSError("a rank cannot lock its own file")
            card = HostInfo(card.host, card.pid, arena.fd, secrets.token_hex(8))
        except (CommError, OSError) as error:
            card = HostInfo(card.host, why_not=str(error).splitlines()[0])
    cards = _exchange(card, size, link)
    ranks = tuple(r for r in range(size) if cards[r].host == card.host)
    peers = _Peers()
    why_not = next((cards[r].why_not for r in ranks if cards[r].why_not), "")
    if clib is not None and arena is not None and not why_not:
        why_not = _open(clib, peers, arena.mapping.num_bytes, rank, {r: cards[r] for r in ranks})
    # Everybody has opened what he needs, or none of this host uses it.
    verdicts = _exchange(HostInfo(card.host, why_not=why_not[:400]), size, link)
    why_not = next((verdicts[r].why_not for r in ranks if verdicts[r].why_not), "")
    hosts = [c.host for c in cards]
    if arena is None or clib is None or why_not:
        if arena is not None:
            arena.close()
        peers.close()
        return None, hosts, why_not if wanted else ""
    return HostPeers(clib, rank, ranks, arena, peers, cards[ranks[0]].key), hosts, ""


def _span_bytes(num_ranks: int) -> int:
    """Addresses for an arena: twice the host's memory, but for all ranks no more than half of what a process
    has. The same on every rank of a host."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2 * memory, (_ADDRESSES // num_ranks) & -_PAGE)


def _exchange(card: HostInfo, size: int, link: Transport) -> list[HostInfo]:
    out = torch.empty(size * _CARD_BYTES, dtype=torch.uint8)
    link.run(Call(OpType.ALL_GATHER, card.encode(), out, label="where the ranks are"))
    return [HostInfo.decode(data) for data in out.view(size, -1)]


def _open(clib: ctypes.CDLL, peers: _Peers, span_bytes: int, rank: int, cards: dict[int, HostInfo]) -> str:
    """Why it cannot, or nothing."""
    for peer, card in cards.items():
        if peer == rank:
            continue
        try:
            peers.fds[peer] = open_peers(card.pid, card.fd)
            peers.mappings[peer] = Mapping(clib, peers.fds[peer], span_bytes)
        except (CommError, OSError) as error:
            return f"rank {rank} cannot map rank {peer}'s memory: {str(error).splitlines()[0]}"
    return ""


def open_peers(pid: int, fd: int) -> int:
    """A descriptor of the file that is open in another process of this user."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
