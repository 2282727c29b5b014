"""How ranks of one host come to form a group."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from plait.comm.host.arena import Mapping
from plait.comm.host.link import HostLink, Waits
from plait.comm.host.meet import Neighbours, open_peers
from plait.comm.transport import Call, Verb
from plait.errors import CommError

_LOOK_S = 0.001  # how often the board is read at first; a rank that waits long looks less often
_LOOK_SELDOM_S = 0.02


@dataclass(frozen=True)
class Board:
    """Where ranks leave words for each other: a store."""

    leave: Callable[[str, str], object]
    has: Callable[[str], bool]
    read: Callable[[str], str]

    @classmethod
    def of(cls, store: dist.Store) -> "Board":
        return cls(store.set, lambda key: store.check([key]), lambda key: bytes(store.get(key)).decode())


def open_group(
    neighbours: Neighbours,
    ranks: tuple[int, ...],
    place: int,
    board: Board,
    key: str,
    timeout: timedelta,
    *,
    is_own: bool = False,
) -> HostLink:
    """The group of these ranks, who all call it with the same `key`, which nobody has used before. The first
    makes the control segment and leaves word of it. `is_own`: the link closes `neighbours` when it is cut.

    Raises CommError when a rank does not come.
    """
    size = neighbours.clib.pl_control_bytes(len(ranks))
    if place == 0:
        fd = os.memfd_create("plait-group", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        board.leave(key, f"{os.getpid()} {fd}")
    else:
        word = _find(board, key, neighbours, ranks, 0, timeout.total_seconds())
        try:
            fd = open_peers(*map(int, word.split()))
        except OSError as error:
            raise _missing(ranks, f"rank {ranks[0]} is gone") from error
    try:
        waits = Waits.of(len(neighbours.ranks), timeout.total_seconds())
        link = HostLink(neighbours, ranks, place, Mapping(neighbours.clib, fd, size), waits, is_own=is_own)
        try:
            link.run(Call(Verb.BARRIER, label="a new group"))  # all have opened what the first one holds
        except CommError as error:
            link.cut()
            raise _missing(ranks, error.fact.partition("failed: ")[2]) from error
    finally:
        os.close(fd)
    return link


def _find(
    board: Board, key: str, neighbours: Neighbours, ranks: tuple[int, ...], peer: int, timeout_s: float
) -> str:
    """The word that a rank leaves. Raises CommError when it is gone, or does not come."""
    until_s, pause_s = time.monotonic() + timeout_s, _LOOK_S
    while True:
        is_here = neighbours.is_here(ranks[peer])  # asked first: it may have left word and gone since
        if board.has(key):
            return board.read(key)
        if not is_here:
            raise _missing(ranks, f"rank {ranks[peer]} is gone")
        if time.monotonic() > until_s:
            raise _missing(ranks, f"rank {ranks[peer]} did not come within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_SELDOM_S)


def _missing(ranks: tuple[int, ...], what: str) -> CommError:
    return CommError(
        f"the group of ranks {list(ranks)} cannot form: {what}",
        hint="all ranks of a group ask for it at the same point of the program",
    )
