"""How long a rank has been in communications, and in which one it is.

[Note: whose time is counted]
A step of a synchronous job takes the same time on all ranks: who is late makes the others wait. What tells
them apart is the time outside of communications. It is the training thread's that counts: a sum that a
thread of ours ends beside backward delays nobody until the training thread waits for it, and that wait is
counted. A communication within another (a sum whose parts are messages) is part of it. Moving bytes counts
as waiting: a rank with a slow network is not told from those that wait for it.

On a CUDA device the host goes on while the device waits, and the clock counts what the host spends on
starting communications: nothing that could be compared.

The ledger: what a rank has said to others, by axis, lane and verb.
"""

import threading
import time
from types import TracebackType

from plait.plan.comm_log import CommCount, CommKey, Traffic


class CommLog:
    """Counts calls of the verbs. One per world; any thread may write into it."""

    def __init__(self) -> None:
        self._tallies: dict[CommKey, list[int]] = {}
        self._lock = threading.Lock()  # sums are ended by threads of their own

    def note(self, line: CommKey, num_bytes: int) -> None:
        """Adds one call, of a tensor of so many bytes."""
        with self._lock:
            tally = self._tallies.setdefault(line, [0, 0])
            tally[0] += 1
            tally[1] += num_bytes

    def read(self) -> Traffic:
        """All so far; `plan.traffic.between` tells what came between two readings."""
        with self._lock:
            return {line: CommCount(*tally) for line, tally in self._tallies.items()}


class WaitClock:
    """Counts the seconds that the thread which made it is in communications. See the note on top."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.what: object | None = None  # under way: `str` tells what; other threads may look
        self._thread = threading.get_ident()
        self._since_s = 0.0

    def during(self, what: object) -> "_Waiting":
        """`with clock.during(call)`: what happens within is the communication `what`."""
        return _Waiting(self, what)

    def begin(self, what: object) -> bool:
        """Whether it counts, and has to `end`."""
        if self.what is not None or threading.get_ident() != self._thread:
            return False
        self.what = what
        self._since_s = time.perf_counter()
        return True

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._since_s
        self.what = None


class _Waiting:
    __slots__ = ("_clock", "_counts", "_what")

    def __init__(self, clock: WaitClock, what: object) -> None:
        self._clock = clock
        self._what = what

    def __enter__(self) -> None:
        self._counts = self._clock.begin(self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._counts:
            self._clock.end()
