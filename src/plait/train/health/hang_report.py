"""The error message of a hang: which ranks block the others, and what every rank is doing."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from plait.comm.rendezvous import Member
from plait.comm.shm import host_identity
from plait.errors import CommError

_PROCESS_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has exited",
    "D": "is waiting for a disk",
}
_MAX_SHOWN = 8  # ranks, in an error message


@dataclass(frozen=True)
class RankStatus:
    """The last status that a rank has written.

    since_s   how long it had been in `phase` when it wrote this
    within    the communication that its training thread is in; "" for none
    dumped    whether it has written its own stacks
    """

    rank: int
    host: str
    pid: int
    step: int = 0
    phase: str = "startup"
    since_s: float = 0.0
    within: str = ""
    dumped: bool = False

    @property
    def activity(self) -> str:
        return f"in {self.phase}" + (f", in {self.within}" if self.within else "")

    def write(self, path: Path) -> None:
        """Write the first line of the file in place. Raises OSError.

        Without truncating: some file systems sync a file that is truncated first, which takes milliseconds.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{json.dumps(asdict(self))}\n".encode())
        finally:
            os.close(descriptor)


def read_statuses(paths: Sequence[Path]) -> list[RankStatus]:
    """Read the statuses that exist and are complete."""
    statuses = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):  # the file may be half written
            statuses.append(RankStatus(**json.loads(path.read_text().partition("\n")[0])))
    return statuses


def statuses_of_processes(members: Mapping[int, Member], first: RankStatus) -> list[RankStatus]:
    """Return statuses of a job's servers and other workers, which write none, by the states of those on this
    host. `first`: worker 0's."""
    here = host_identity()
    return [
        replace(
            first,
            rank=rank,
            pid=member.pid,
            phase="a worker or server",
            within="a wait for requests or replies",
            dumped=member.host != here or _state(member.pid) not in "TtZ",
        )
        for rank, member in members.items()
        if rank
    ]


def _state(pid: int) -> str:
    """Return the kernel's code; that of an exited process if it cannot be seen."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def blocking_ranks(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that block the others, once all have had time to write their stacks.

    First those that could not write them: the process is stopped, or a thread of it holds the interpreter
    lock. Otherwise those that are not communicating. Otherwise, as all wait for one another, those at the
    earliest step.
    """
    silent = [status for status in statuses if not status.dumped]
    computing = [status for status in statuses if not status.within]
    first = min((status.step for status in statuses), default=0)
    return silent or computing or [status for status in statuses if status.step == first]


def hang_error(
    statuses: Sequence[RankStatus], num_ranks: int, folder: Path, limit_s: float, host: str
) -> CommError:
    """Build the error. `folder`: of the stacks; `host`: this host, whose processes can be inspected."""
    exited = sorted({*range(num_ranks)} - {status.rank for status in statuses})
    blocking = [] if exited else blocking_ranks(statuses)
    ranks = exited or [status.rank for status in blocking]
    step = max((status.step for status in statuses), default=0) + 1  # a stopped rank's status may be older
    verb = "hangs" if len(ranks) == 1 else "hang"
    if exited:
        verb = "has exited" if len(exited) == 1 else "have exited"
    waiting = ", and the other ranks wait" if len(ranks) < num_ranks else ""
    return CommError(
        f"{name_ranks(ranks)} {verb} in step {step}{waiting}",
        given="\n".join(_describe(statuses, blocking, folder, host)),
        expected=f"a step in less than run.hang_s = {limit_s:g} s",
        hint=f"look at the stacks of all threads: {describe_stacks(folder, range(num_ranks))}",
    )


def _describe(
    statuses: Sequence[RankStatus], blocking: Sequence[RankStatus], folder: Path, host: str
) -> list[str]:
    """Return a line for each blocking rank, and one per activity of the others."""
    lines = []
    for status in blocking[:_MAX_SHOWN]:
        when = f"for {status.since_s:.0f} s" if status.dumped else "at its last status"
        why = "" if status.dumped else f"; {_why_silent(status, folder, host)}"
        process = f"(process {status.pid} on {status.host})"
        lines.append(f"rank {status.rank} {process}: {status.activity} {when}{why}")
    others: dict[str, list[int]] = {}
    for status in statuses:
        if status not in blocking:
            others.setdefault(status.activity, []).append(status.rank)
    return lines + [f"{name_ranks(ranks)}: {what}" for what, ranks in [*others.items()][:_MAX_SHOWN]]


def describe_stacks(folder: Path, ranks: Sequence[int]) -> str:
    """Return the folder of the stacks, and the ranks that have written none."""
    missing = [rank for rank in ranks if not has_stacks(folder, rank)]
    return f"{folder}" + (f"; none from {name_ranks(missing)}" if missing else "")


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.txt"


def any_stacks(folder: Path) -> bool:
    """Return whether a rank of the run has written its stacks."""
    return any(path.stat().st_size for path in folder.glob("*.txt"))


def has_stacks(folder: Path, rank: int) -> bool:
    try:
        # opening makes a network file system ask its server
        with stacks_file(folder, rank).open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def name_ranks(ranks: Sequence[int]) -> str:
    """Format as "rank 3" or "ranks 0, 1, 2"."""
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) + (", ..." if len(ranks) > _MAX_SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _why_silent(status: RankStatus, folder: Path, host: str) -> str:
    if has_stacks(folder, status.rank):
        return "one of its threads held the interpreter lock"
    if status.host == host:
        state = _state(status.pid)
        if state in _PROCESS_STATES:
            return f"the process {_PROCESS_STATES[state]}"
    return "it does not respond: the process is stopped, or has exited"
