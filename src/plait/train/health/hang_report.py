"""What ranks say of themselves while they train, and which of them is late: who makes the others wait."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.errors import CommError

_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is held by a debugger",
    "Z": "has ended",
    "D": "waits for a disk",
}
_MOST_SHOWN = 8  # ranks, in a letter


@dataclass(frozen=True)
class RankStatus:
    """Of one rank, as it wrote it last.

    since_s   how long ago it began what it does, when it wrote this
    within    the communication that its training thread is in; "" for none
    dumped    whether it has written its stacks, by itself
    """

    rank: int
    host: str
    pid: int
    step: int = 0
    phase: str = "the start"
    since_s: float = 0.0
    within: str = ""
    dumped: bool = False

    def write(self, path: Path) -> None:
        """As the first line, over what stands there: a file that is cut first is synced by some file systems,
        which takes milliseconds. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{json.dumps(asdict(self))}\n".encode())
        finally:
            os.close(descriptor)


def read_statuses(paths: Sequence[Path]) -> list[RankStatus]:
    """What there is of them."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):  # it may be just being written
            found.append(RankStatus(**json.loads(path.read_text().partition("\n")[0])))
    return found


def blocking_ranks(beats: Sequence[RankStatus]) -> list[RankStatus]:
    """Who keeps the others waiting, of ranks that all have had the time to write their stacks.

    First those that could not: their process is stopped, or one of its threads holds the interpreter. Else
    those that are in no communication. Else all wait for one another, and it is those of the earliest step.
    """
    silent = [beat for beat in beats if not beat.dumped]
    busy = [beat for beat in beats if not beat.within]
    first = min((beat.step for beat in beats), default=0)
    return silent or busy or [beat for beat in beats if beat.step == first]


def hang_error(beats: Sequence[RankStatus], num_ranks: int, folder: Path, limit_s: float, host: str) -> CommError:
    """`folder`: where the stacks are. `host`: where this is written, whose processes can be looked at."""
    gone = sorted({*range(num_ranks)} - {beat.rank for beat in beats})
    late = [] if gone else blocking_ranks(beats)
    names = gone or [beat.rank for beat in late]
    step = max((beat.step for beat in beats), default=0) + 1  # who is stopped may have written an earlier
    how = "hangs" if len(names) == 1 else "hang"
    if gone:
        how = "has left" if len(gone) == 1 else "have left"
    waiting = ", and the other ranks wait" if len(names) < num_ranks else ""
    return CommError(
        f"{numbers(names)} {how} in step {step}{waiting}",
        given="\n            ".join(_described(beats, late, folder, host)),
        expected=f"a step in less than run.hang_s = {limit_s:g} s",
        hint=f"the stacks of all threads: {where_stacks(folder, range(num_ranks))}",
    )


def _described(beats: Sequence[RankStatus], late: Sequence[RankStatus], folder: Path, host: str) -> list[str]:
    """A line for each late rank, and one for what the others do."""
    lines = []
    for beat in late[:_MOST_SHOWN]:
        when = f"for {beat.since_s:.0f} s" if beat.dumped else "when last seen"
        why = "" if beat.dumped else f"; {_why_silent(beat, folder, host)}"
        lines.append(f"rank {beat.rank} (process {beat.pid} on {beat.host}): {_at(beat)} {when}{why}")
    others: dict[str, list[int]] = {}
    for beat in beats:
        if beat not in late:
            others.setdefault(_at(beat), []).append(beat.rank)
    return lines + [f"{numbers(ranks)}: {what}" for what, ranks in [*others.items()][:_MOST_SHOWN]]


def describe_stacks(folder: Path, ranks: Sequence[int]) -> str:
    """With those who have left none."""
    missing = [rank for rank in ranks if not has_stacks(folder, rank)]
    return f"{folder}" + (f"; none of {numbers(missing)}" if missing else "")


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.txt"


def has_stacks(folder: Path, rank: int) -> bool:
    try:
        with stacks_file(folder, rank).open("rb") as file:  # opened, a network's file system asks its server
            return bool(file.read(1))
    except OSError:
        return False


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 2"."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN])) + (", ..." if len(ranks) > _MOST_SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _at(beat: RankStatus) -> str:
    within = f", in {beat.within}" if beat.within else ""
    return f"in {beat.phase}{within}"


def _why_silent(beat: RankStatus, folder: Path, host: str) -> str:
    if has_stacks(folder, beat.rank):
        return "a thread of it held the interpreter's lock"
    if beat.host == host:
        with contextlib.suppress(OSError, IndexError):
            letter = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if letter in _STATES:
                return f"the process {_STATES[letter]}"
    return "it does not answer: the process is stopped, or gone"
