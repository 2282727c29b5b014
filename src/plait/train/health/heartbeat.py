"""Detect hung ranks: every rank dumps its stacks, then the job exits.

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
import os
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plait.comm import World
from plait.comm.flight_recorder import pending_collectives
from plait.comm.rendezvous import present_members
from plait.errors import CommError, RunError
from plait.fileio import WRITABLE, disk_hint
from plait.train.health.hang_report import (
    RankStatus,
    describe_stacks,
    hang_error,
    has_stacks,
    read_statuses,
    stacks_file,
    statuses_of_processes,
)

SLOW_FACTOR = 4  # see [Note: slow phases]
_EXIT_CODE = 1  # a lost rank
_MIN_POLL_S, _MAX_POLL_S = 0.1, 1.0
_AFTER_ERROR_S = 1.5  # for the others' stacks after a failed communication: the launcher kills after 5 s
_HANG, _STACKS = "hang", "stacks"  # alarms: dump the stacks and exit; dump the stacks


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
        try:
            if self._world.rank == 0:
                _set_aside(self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._alarm.touch()
            self._world.barrier()
            self._folder.mkdir(exist_ok=True)
            self._file = self._stacks.open("w")
            self._write_status(0.0)
        except OSError as error:
            raise RunError(
                "cannot write the run's stacks",
                given=f"{self._folder}: {error}",
                expected=WRITABLE,
                hint=disk_hint(self._folder),
            ) from error
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

    def _gather(self, timeout_s: float) -> list[RankStatus]:
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
