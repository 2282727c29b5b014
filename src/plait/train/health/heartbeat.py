"""A rank that hangs is missed: every rank writes its stacks, and the job ends.

[Note: how a hang is found]
The training thread says what it begins (`beat`: it keeps a tuple, and nothing else). A thread beside it
looks at that once a second or more often, and when it has not changed for too long it raises the alarm: a
word in a file that all ranks read as often. Each then writes the stacks of its threads. The first one waits
a moment for the others, tells who is late, and all end, without another word to anybody: whoever hangs may
hold any lock. Their launcher ends who does not: SIGKILL also reaches a process that is stopped.

[Note: who cannot look]
The thread needs the interpreter. Where another thread holds its lock, a timer of faulthandler runs out,
which is wound up by each look: it writes the stacks and ends the process from C. Stopped processes can do
neither; they are the ones that have left no stacks. Time in which the thread itself did not run counts as
two looks, so that a job that was suspended goes on afterwards: unless it was for as long as the timer,
which cannot know.

[Note: what may be slow]
A first step compiles, a save writes all there is: they get four times as long. Evaluation beats with each
batch. What comes before the first step and after the last has only the limit that communications have.

[Note: lifetimes]
faulthandler keeps the number of the stacks' file, not the file: it stays open until the timer is off.
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
from pathlib import Path
from types import TracebackType

from plait.comm import World
from plait.errors import CommError, RunError
from plait.train.health.hang_report import (
    RankStatus,
    hang_error,
    has_stacks,
    read_statuses,
    stacks_file,
    describe_stacks,
)

SLOW = 4  # see [Note: what may be slow]
_LOST_RANK = 1  # the exit code
_LEAST_LOOK_S, _MOST_LOOK_S = 0.1, 1.0
_AFTER_ERROR_S = 1.5  # for the others' stacks, once a communication has failed: a launcher kills after 5
_HANG, _STACKS = "hang", "stacks"  # the alarms: write the stacks and end; write them


class Heartbeat:
    """While entered, a hang of this rank or another ends the job. Every rank enters it.

    See the notes on top. `beat` takes less than a microsecond.
    """

    def __init__(self, folder: Path, world: World, limit_s: float) -> None:
        """`folder`: of the stacks, the same one on all hosts. `limit_s`: from one beat to the next; 0 is
        for ever."""
        self._folder = folder
        self._world = world
        self._limit_s = limit_s
        self._look_s = min(_MOST_LOOK_S, max(_LEAST_LOOK_S, limit_s / 20))
        self._now = (0, "the start", SLOW)  # step, phase, times the limit
        self._me = RankStatus(world.rank, socket.gethostname(), os.getpid())
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_dumped = False

    def beat(self, step: int, phase: str, *, slow: bool = False) -> None:
        """This rank begins `phase`, after `step` steps."""
        was_slow = self._now[2] != 1
        self._now = (step, phase, SLOW if slow else 1)
        if was_slow and not slow and self._thread is not None:
            self._wind(1)  # the interpreter may be held before the thread looks again

    def __enter__(self) -> "Heartbeat":
        if not self._limit_s:
            return self
        try:
            if self._world.rank == 0:
                _clear(self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._alarm.touch()
            self._world.barrier()
            self._folder.mkdir(exist_ok=True)
            self._file = stacks_file(self._folder, self._world.rank).open("w")
            self._write_beat(0.0)
        except OSError as error:
            raise RunError("the run's stacks cannot be written", given=f"{self._folder}: {error}") from error
        self._wind(SLOW)
        self._thread = threading.Thread(target=self._watch, name="plait-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if isinstance(error, CommError):
            with contextlib.suppress(OSError):
                traceback.print_exception(error, file=self._file)
                self._file.flush()
            self._raise_alarm(_STACKS)
            self._gather(_AFTER_ERROR_S)
        self._over.set()
        self._thread.join()  # for ever where it ends the process
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if isinstance(error, CommError):
            raise self._with_stacks(error) from error
        if not self._has_dumped:
            self._leave()

    # --- the thread beside

    def _watch(self) -> None:
        seen, age_s, looked_s = self._now, 0.0, time.monotonic()
        while not self._over.wait(self._look_s):
            now_s, now = time.monotonic(), self._now
            age_s = age_s + min(now_s - looked_s, 2 * self._look_s) if now is seen else 0.0
            seen, looked_s = now, now_s
            limit_s = self._limit_s * now[2]
            self._wind(now[2])
            alarm = self._heard_alarm()
            if alarm == _STACKS and not self._has_dumped:
                self._dump()
            self._write_beat(age_s)
            if alarm == _HANG or age_s > limit_s:
                self._end(age_s)

    def _wind(self, times: int) -> None:
        """Sets the timer in C, which ends a process whose interpreter is held."""
        limit_s = self._limit_s * times
        faulthandler.dump_traceback_later(limit_s + self._grace_s, file=self._file, exit=True)

    @property
    def _grace_s(self) -> float:
        """The timer's, beyond the limit: who can look is first."""
        return 2 * self._look_s + 0.5

    def _end(self, age_s: float) -> None:
        """Of this process, whatever the training thread does."""
        self._raise_alarm(_HANG)
        self._dump()
        self._write_beat(age_s)
        told = self._folder / "letter.txt"
        try:
            descriptor = os.open(told, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:  # another rank tells
            self._wait_for(lambda: told.exists() and told.stat().st_size > 0, 2 * self._wait_s)
            os._exit(_LOST_RANK)
        beats = self._gather(self._wait_s)
        error = hang_error(beats, self._world.size, self._folder, self._limit_s, self._me.host)
        text = f"\n{error.message()}\n".encode()
        os.write(2, text)  # sys.stderr has a lock
        os.write(descriptor, text)
        os._exit(_LOST_RANK)

    @property
    def _wait_s(self) -> float:
        """For the others' stacks, those that the timer writes too."""
        return self._grace_s + 2 * self._look_s + 1.0

    def _gather(self, most_s: float) -> list[RankStatus]:
        """What all ranks say, once they have written their stacks."""
        ranks = range(self._world.size)
        self._wait_for(lambda: all(has_stacks(self._folder, rank) for rank in ranks), most_s)
        time.sleep(self._look_s)  # the last of them is just being written
        return read_statuses([stacks_file(self._folder, rank).with_suffix(".json") for rank in ranks])

    def _wait_for(self, condition: Callable[[], bool], most_s: float) -> None:
        until_s = time.monotonic() + most_s
        with contextlib.suppress(OSError):
            while not condition() and time.monotonic() < until_s:
                time.sleep(0.05)

    def _with_stacks(self, error: CommError) -> CommError:
        hint = f"stacks of all threads: {where_stacks(self._folder, range(self._world.size))}"
        return CommError(
            error.fact,
            given=error.given,
            expected=error.expected,
            hint=hint if error.hint is None else f"{error.hint}\n            {hint}",
        )

    # --- files

    @property
    def _alarm(self) -> Path:
        """There from the beginning, empty: hosts that share files find out late that there is a new one."""
        return self._folder / "alarm"

    def _raise_alarm(self, what: str) -> None:
        with contextlib.suppress(OSError):
            if not self._heard_alarm():
                self._alarm.write_text(what)

    def _heard_alarm(self) -> str:
        with contextlib.suppress(OSError):
            return self._alarm.read_text()
        return ""

    def _dump(self) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(self._file, all_threads=True)
            os.fsync(self._file.fileno())  # for other hosts
        self._has_dumped = True

    def _write_beat(self, age_s: float) -> None:
        """Closed each time, which is what makes other hosts see it."""
        (step, phase, _), what = self._now, self._world.clock.what
        within = "" if what is None else str(what)
        with contextlib.suppress(OSError):
            path = stacks_file(self._folder, self._world.rank).with_suffix(".json")
            me = self._me
            RankStatus(me.rank, me.host, me.pid, step, phase, age_s, within, self._has_dumped).write(path)

    def _leave(self) -> None:
        """All is well: nothing stays."""
        mine = stacks_file(self._folder, self._world.rank)
        with contextlib.suppress(OSError):
            mine.unlink()
            mine.with_suffix(".json").unlink()
            if self._world.rank == 0:
                self._alarm.unlink()
            self._folder.rmdir()  # by the last one


def _clear(folder: Path) -> None:
    """Of what an earlier part of the run left; stacks are kept beside."""
    if not folder.exists():
        return
    if not any(path.stat().st_size for path in folder.glob("rank-*.txt")):
        shutil.rmtree(folder, ignore_errors=True)
        return
    number = 1
    while (kept := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(kept)
