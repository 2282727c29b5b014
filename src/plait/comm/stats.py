"""Counts of communications, the time a rank spends in them, and those in progress on the device.

[Note: wait time]
A step of a synchronous job takes the same time on all ranks: a late one makes the others wait. The time
outside of communications tells them apart. Only the training thread's time counts: a reduction that another
thread finishes during backward delays nothing until the training thread waits for it, and that wait is
counted. A communication nested in another (a sum made of messages) is part of the outer one. Moving bytes
counts as waiting: a rank with a slow network looks like the ranks that wait for it.

On a CUDA device the host runs ahead of the device, and the clock counts the host time spent on starting
communications, which is not comparable between ranks. There, `DeviceWaits` measures how long a stream waits:
by an event before and one after each wait, which are read when the device has passed them. Other streams'
communications delay nothing until that stream waits for them. Backward waits in a thread of autograd, while
the training thread is in `backward`: the two never measure at the same time.
"""

import json
import threading
import time
from types import TracebackType
from typing import Any

import torch

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


class DeviceWaits:
    """A part of a stream's work, and its waits for communications. See [Note: wait time]."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_waiting = False
        self._first = self._recorded()

    def begin_wait(self) -> torch.cuda.Event | None:
        """Return the event to pass to `end_wait`; None within another wait, or on another stream."""
        if self._is_waiting or torch.cuda.current_stream() != self._stream:
            return None
        self._is_waiting = True
        return self._recorded()

    def end_wait(self, begin: torch.cuda.Event) -> None:
        self._waits.append((begin, self._recorded()))
        self._is_waiting = False

    def end(self) -> None:
        self._last = self._recorded()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of own work, and those with waits. The device must have passed the end."""
        full_ms = self._first.elapsed_time(self._last)
        waits_ms = sum(begin.elapsed_time(end) for begin, end in self._waits)
        return (full_ms - waits_ms) / 1000, full_ms / 1000

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class WaitClock:
    """Seconds that the thread which created it spends in communications. See [Note: wait time]."""

    def __init__(self) -> None:
        self.device_waits: DeviceWaits | None = None  # being measured
        self.seconds = 0.0
        self.current: object | None = None  # in progress; `str` names it; other threads may read it
        self.thread = threading.get_ident()
        self.since_s = 0.0

    def during(self, operation: object) -> "_TimedWait":
        """Return a context manager that times its body as the communication `operation`."""
        return _TimedWait(self, operation)


class _TimedWait:
    __slots__ = ("_begin", "_clock", "_counts", "_operation", "_waits")

    def __init__(self, clock: WaitClock, operation: object) -> None:
        self._clock = clock
        self._operation = operation

    def __enter__(self) -> None:
        clock = self._clock
        # Not if nested in another, or on another thread.
        self._counts = clock.current is None and threading.get_ident() == clock.thread
        if self._counts:
            clock.current, clock.since_s = self._operation, time.perf_counter()
        self._waits = clock.device_waits
        self._begin = None if self._waits is None else self._waits.begin_wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waits is not None and self._begin is not None:
            self._waits.end_wait(self._begin)
        if self._counts:
            self._clock.seconds += time.perf_counter() - self._clock.since_s
            self._clock.current = None


def pending_collectives() -> list[str]:
    """Describe the collectives that this rank has started and that are not complete, oldest first, from
    torch's flight recorder. Does not wait for the device. Empty if NCCL is not used."""
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # a build without NCCL
        return []
    return describe_trace(dump(includeCollectives=True, onlyActive=True))


def describe_trace(trace: bytes) -> list[str]:
    """Describe the incomplete entries of a trace. Unknown formats have none."""
    try:
        entries = json.loads(trace).get("entries", [])
        return [_describe(entry) for entry in entries if entry.get("state") != "completed"]
    except (AttributeError, TypeError, ValueError):
        return []


def _describe(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "a collective")).removeprefix("nccl:")
    group = entry.get("process_group") or ["", ""]
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    return f"{name} number {number} of group {group[0]}, {entry.get('state')}"
