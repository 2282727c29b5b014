"""Counts of communications, and the time a rank spends in them.

[Note: wait time]
A step of a synchronous job takes the same time on all ranks: a late one makes the others wait. The time
outside of communications tells them apart. Only the training thread's time counts: a reduction that another
thread finishes during backward delays nothing until the training thread waits for it, and that wait is
counted. A communication nested in another (a sum made of messages) is part of the outer one. Moving bytes
counts as waiting: a rank with a slow network looks like the ranks that wait for it.

On a CUDA device the host runs ahead of the device, and the clock counts the host time spent on starting
communications, which is not comparable between ranks.
"""

import threading
import time
from types import TracebackType

from plait.plan.comm_log import CommCount, CommKey, Traffic


class CommLog:
    """Counts of calls and bytes, by axes, channel and collective. One per world; thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[CommKey, list[int]] = {}
        self._lock = threading.Lock()  # reductions complete on other threads

    def record(self, key: CommKey, num_bytes: int) -> None:
        """Add one call, on a tensor of `num_bytes`."""
        with self._lock:
            count = self._counts.setdefault(key, [0, 0])
            count[0] += 1
            count[1] += num_bytes

    def read(self) -> Traffic:
        """Return all counts so far; `plan.comm_log.between` subtracts two of them."""
        with self._lock:
            return {key: CommCount(*count) for key, count in self._counts.items()}


class WaitClock:
    """Seconds that the thread which created it spends in communications. See [Note: wait time]."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.current: object | None = None  # in progress; `str` names it; other threads may read it
        self.thread = threading.get_ident()
        self.since_s = 0.0

    def during(self, operation: object) -> "_TimedWait":
        """Return a context manager that times its body as the communication `operation`."""
        return _TimedWait(self, operation)


class _TimedWait:
    __slots__ = ("_clock", "_counts", "_operation")

    def __init__(self, clock: WaitClock, operation: object) -> None:
        self._clock = clock
        self._operation = operation

    def __enter__(self) -> None:
        clock = self._clock
        # Not if nested in another, or on another thread.
        self._counts = clock.current is None and threading.get_ident() == clock.thread
        if self._counts:
            clock.current, clock.since_s = self._operation, time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._counts:
            self._clock.seconds += time.perf_counter() - self._clock.since_s
            self._clock.current = None
