"""How ranks of one host come to form a group."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from plait.comm.host.arena import reserve
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


def open_group(
    neighbours: Neighbours, ranks: tuple[int, ...], place: int, board: Board, key: str, waits: Waits
) -> HostLink:
    """The group of these ranks, who all call it with the same `key`. The first makes the control segment and
    leaves word of it. Raises CommError when a rank does not come."""

    def wait_for(peer: int, has_come: Callable[[], bool]) -> None:
        _wait(neighbours, ranks, peer, has_come, waits.timeout_s)

    if place == 0:
        fd = os.memfd_create("plait-group", os.MFD_CLOEXEC)
        reserve(fd, 0, 4096)
        os.ftruncate(fd, neighbours.clib.pl_control_bytes(len(ranks)))
    else:
        wait_for(0, lambda: board.has(key))
        try:
            fd = open_peers(*map(int, board.read(key).split()))
        except OSError as error:
            raise _missing(ranks, 0, "is gone") from error
    link = HostLink(neighbours, ranks, place, fd, waits)
    try:
        if place == 0:
            board.leave(key, f"{os.getpid()} {fd}")
        for peer in range(len(ranks)):  # all hold their places, and have opened the segment, from here on
            if peer != place:
                wait_for(peer, partial(neighbours.clib.pl_is_alive, fd, peer))
        link.run(Call(Verb.BARRIER, label="the group"))  # nobody leaves before all have seen him
    except BaseException:
        link.cut()
        raise
    return link


def _wait(
    neighbours: Neighbours,
    ranks: tuple[int, ...],
    peer: int,
    has_come: Callable[[], bool],
    timeout_s: float,
) -> None:
    """Returns when the rank at a place has come. Raises CommError when it is gone, or does not come."""
    until_s, pause_s = time.monotonic() + timeout_s, _LOOK_S
    while True:
        is_here = neighbours.is_here(ranks[peer])  # asked first: it may have come and gone since
        if has_come():
            return
        if not is_here:
            raise _missing(ranks, peer, "is gone")
        if time.monotonic() > until_s:
            raise _missing(ranks, peer, f"did not come within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_SELDOM_S)


def _missing(ranks: tuple[int, ...], peer: int, what: str) -> CommError:
    return CommError(
        f"the group of ranks {list(ranks)} cannot form: rank {ranks[peer]} {what}",
        hint="all ranks of a group ask for it at the same point of the program",
    )
