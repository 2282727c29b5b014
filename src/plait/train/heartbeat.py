"""Detect hung ranks: every rank dumps its stacks, then the job exits with an error that says which ranks
block the others, and what every rank is doing.

[Note: hang detection]
The training thread records what it begins (`beat`: it stores a tuple, and nothing else). A heartbeat thread
polls the tuple at least once a second, and if it has not changed for too long, raises the alarm: a word in a
file that all ranks poll too. Each rank then dumps the stacks of its threads. One of them waits a moment for
the others, reports which ranks block, and all exit without any communication: a hung rank may hold any lock.
The launcher ends ranks that do not exit: SIGKILL also reaches a stopped process.

[Note: ranks that cannot poll]
The heartbeat thread needs the interpreter. If another thread holds its lock, a faulthandler timer, rearmed by
each poll, expires: it dumps the stacks and ends the process from C. Stopped processes can do neither; they
are the ones without stacks. Time in which the heartbeat thread itself did not run counts as two polls, so
that a suspended job continues when it is resumed, unless it was suspended for as long as the timer, which
cannot tell.

[Note: slow phases]
The first step compiles and a save writes the complete state: they get four times the limit. Evaluation beats
with every batch. Work before the first step and after the last is only limited by the communication timeout.

[Note: lifetimes]
faulthandler keeps the file descriptor of the stacks, not the file: the file stays open until the timer is
off.
"""

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from plait.comm import World
from plait.comm.rendezvous import Member, present_members
from plait.comm.shm.rendezvous import host_identity
from plait.comm.stats import pending_collectives
from plait.errors import CommError
from plait.fileio import writing

SLOW_FACTOR = 4  # see [Note: slow phases]
_EXIT_CODE = 1  # a lost rank
_MIN_POLL_S, _MAX_POLL_S = 0.1, 1.0
_AFTER_ERROR_S = 1.5  # for the others' stacks after a failed communication: the launcher kills after 5 s
_HANG, _STACKS = "hang", "stacks"  # alarms: dump the stacks and exit; dump the stacks

_PROCESS_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has exited",
    "D": "is waiting for a disk",
}
_MAX_SHOWN = 8  # ranks, in an error message


class Heartbeat:
    """Ends the job if this rank or another hangs while entered. Every rank enters it.

    See the notes at the top. `beat` takes less than a microsecond.
    """

    def __init__(self, folder: Path, world: World, limit_s: float) -> None:
        """`folder`: for stacks, the same on all hosts. `limit_s`: between beats; 0 means no limit."""
        self._folder = folder
        self._alarm = folder / "alarm"  # from the start, empty: on shared file systems new files appear late
        self._stacks = stacks_file(folder, world.rank)
        self._world = world
        self._limit_s = limit_s
        self._poll_s = min(_MAX_POLL_S, max(_MIN_POLL_S, limit_s / 20))
        self._grace_s = 2 * self._poll_s + 0.5  # of the timer: a thread that can poll acts first
        # how long to wait for the other ranks' stacks, including those that the timer dumps
        self._gather_s = self._grace_s + 2 * self._poll_s + 1.0
        self._current = (0, "startup", SLOW_FACTOR)  # step, phase, factor of the limit
        self._status = RankStatus(world.rank, socket.gethostname(), os.getpid())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_dumped = False

    def beat(self, step: int, phase: str, *, slow: bool = False) -> None:
        """Record that this rank begins `phase`, after `step` steps."""
        was_slow = self._current[2] != 1
        self._current = (step, phase, SLOW_FACTOR if slow else 1)
        if was_slow and not slow and self._thread is not None:
            self._arm_timer(1)  # the interpreter may be blocked before the thread polls again

    def __enter__(self) -> "Heartbeat":
        if not self._limit_s:
            return self
        with writing("cannot write the run's stacks", self._folder):
            if self._world.rank == 0:
                _set_aside(self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._alarm.touch()
            self._world.barrier()
            self._folder.mkdir(exist_ok=True)
            self._file = self._stacks.open("w")
            self._write_status(0.0)
        self._arm_timer(SLOW_FACTOR)
        self._thread = threading.Thread(target=self._poll, name="plait-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        if isinstance(error, CommError):
            with contextlib.suppress(OSError):
                traceback.print_exception(error, file=self._file)
                self._file.flush()
            self._raise_alarm(_STACKS)
            self._gather(_AFTER_ERROR_S)
        self._stop.set()
        self._thread.join()  # never returns if the thread ends the process
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if isinstance(error, CommError):
            stacks = describe_stacks(self._folder, range(self._world.size))
            hints = (error.hint, f"look at the stacks of all threads: {stacks}")
            error.hint = "\n".join(str(hint) for hint in hints if hint is not None)
        if not self._has_dumped:
            self._remove_files()

    # --- the heartbeat thread

    def _poll(self) -> None:
        seen, age_s, polled_s = self._current, 0.0, time.monotonic()
        while not self._stop.wait(self._poll_s):
            now_s, current = time.monotonic(), self._current
            age_s = age_s + min(now_s - polled_s, 2 * self._poll_s) if current is seen else 0.0
            seen, polled_s = current, now_s
            limit_s = self._limit_s * current[2]
            self._arm_timer(current[2])
            alarm = self._read_alarm()
            if alarm == _STACKS and not self._has_dumped:
                self._dump()
            self._write_status(age_s)
            if alarm == _HANG or age_s > limit_s:
                self._end(age_s)

    def _arm_timer(self, factor: int) -> None:
        """Start the C timer again, which ends a process whose interpreter is blocked."""
        limit_s = self._limit_s * factor
        faulthandler.dump_traceback_later(limit_s + self._grace_s, file=self._file, exit=True)

    def _end(self, age_s: float) -> None:
        """End this process, whatever the training thread does. The first rank here writes the report."""
        self._raise_alarm(_HANG)
        self._dump()
        self._write_status(age_s)
        report = self._folder / "report.txt"
        try:
            descriptor = os.open(report, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:  # another rank writes it
            self._wait_for(lambda: report.exists() and report.stat().st_size > 0, 2 * self._gather_s)
            os._exit(_EXIT_CODE)
        statuses, size = self._gather(self._gather_s), self._world.size
        if self._world.num_processes > 1:  # of which only worker 0 has a heartbeat
            size = self._world.num_processes
            with contextlib.suppress(CommError, IndexError):
                statuses += statuses_of_processes(present_members(self._world.store, size), statuses[0])
        error = hang_error(statuses, size, self._folder, self._limit_s, self._status.host)
        text = f"\n{error.message()}\n".encode()
        os.write(2, text)  # sys.stderr has a lock
        os.write(descriptor, text)
        os._exit(_EXIT_CODE)

    def _gather(self, timeout_s: float) -> "list[RankStatus]":
        """Wait for the stacks of all ranks, and return their statuses."""
        ranks = range(self._world.size)
        self._wait_for(lambda: all(has_stacks(self._folder, rank) for rank in ranks), timeout_s)
        time.sleep(self._poll_s)  # the last one may be half written
        return read_statuses([stacks_file(self._folder, rank).with_suffix(".json") for rank in ranks])

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while not condition() and time.monotonic() < until_s:
                time.sleep(0.05)

    # --- files

    def _raise_alarm(self, what: str) -> None:
        with contextlib.suppress(OSError):
            if not self._read_alarm():
                self._alarm.write_text(what)

    def _read_alarm(self) -> str:
        with contextlib.suppress(OSError):
            return self._alarm.read_text()
        return ""

    def _dump(self) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(self._file, all_threads=True)
            for line in pending_collectives():
                self._file.write(f"NCCL: {line}\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # for other hosts
        self._has_dumped = True

    def _write_status(self, age_s: float) -> None:
        """Write this rank's status; the file is closed each time, which makes it visible to other hosts."""
        (step, phase, _), what = self._current, self._world.clock.current
        if what is None and self._has_dumped:  # on CUDA the host waits elsewhere: for the step's results
            what = next(iter(pending_collectives()), None)
        status = replace(self._status, step=step, phase=phase, since_s=age_s, dumped=self._has_dumped)
        with contextlib.suppress(OSError):
            replace(status, within="" if what is None else str(what)).write(self._stacks.with_suffix(".json"))

    def _remove_files(self) -> None:
        """Remove this rank's files after training without a hang."""
        with contextlib.suppress(OSError):
            self._stacks.unlink()
            self._stacks.with_suffix(".json").unlink()
            if self._world.rank == 0:
                self._alarm.unlink()
            self._folder.rmdir()  # succeeds on the last rank


def _set_aside(folder: Path) -> None:
    """Remove the files of an earlier part of the run; if there are stacks, rename the folder instead."""
    if not folder.exists():
        return
    if not any(path.stat().st_size for path in folder.glob("rank-*.txt")):
        shutil.rmtree(folder, ignore_errors=True)
        return
    number = 1
    while (kept := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(kept)


# --- the report


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
