"""How the ranks of a launcher end: signals to them, deaths, restarts, and the job's exit code."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from plait.errors import CommError

_TERM_AFTER_DEATH_S = 2.0  # from a rank's death to SIGTERM: most peers detect it and report it themselves
_KILL_AFTER_DEATH_S = 5.0  # ... to SIGKILL: ranks stuck in a collective ignore anything else
_ORPHANS_S = 1.0  # from a rank's SIGKILL to that of processes it has left: those that clean up end before
_ABANDON_S = 3.0  # from SIGKILL to abandoning an unkillable rank
_SECOND_CTRL_C_S = 1.0  # a second Ctrl-C this long after the first ends the ranks at once

_USER_ERROR = 2  # exit code of the command line for a PlaitError
FORWARDED = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}
SIGNALS = (*FORWARDED, signal.SIGUSR1)


@dataclass(frozen=True)
class RestartPolicy:
    """The deaths that a job survives; by default none.

    optional      ranks without which the others go on, if a signal kills them after the job has begun
                  (`announce_begin`)
    restartable   those of them that are started again instead, `max_restarts` times in all
    drain_s       from the end of rank 0, which is then that of the job, to SIGKILL for others; None: all have
                  to end
    names         of ranks, for the error of a death
    """

    optional: Collection[int] = ()
    restartable: Collection[int] = ()
    max_restarts: int = 0
    drain_s: float | None = None
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass
class RankMonitor:
    """State of the ranks and of signals to them. Detects dead ranks without reaping them: torch does that.
    See `launch_local`."""

    save_s: float  # from a signal to SIGKILL: time to write a checkpoint
    policy: RestartPolicy
    begun: Path  # a file that exists once the job has begun

    def __post_init__(self) -> None:
        self._restarts: list[int] = []  # ranks
        self._num_started = 0  # of these restarts
        self._pids: Mapping[int, int] = {}
        self._codes: dict[int, int] = {}  # in order of death; negative: killed by that signal
        self._received: list[tuple[float, signal.Signals]] = []  # signals to us, not yet forwarded
        self._forwarded: signal.Signals | None = None  # the first forwarded signal
        self._forwarded_s = 0.0
        self._pending: list[tuple[float, signal.Signals]] = []  # times and signals to send
        self._abandon_s = float("inf")
        self._orphans_s: dict[int, float] = {}  # when to kill a killed rank's process group, by its pid

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._received.append((time.monotonic(), signal.Signals(signum)))

    def poll(self, pids: Mapping[int, int]) -> bool:
        """Record ranks that died and send the signals that are due. Return True while a rank lives."""
        self._pids = pids
        now = time.monotonic()
        self._schedule_signals()
        # A second look, if any has died: its cause may be a rank that was killed after the first look at it.
        dead = self._newly_dead({})
        dead |= self._newly_dead(dead) if dead else {}
        self._report_late_ranks(dead)
        for rank in [rank for rank, code in dead.items() if code < 0 and rank in self.policy.optional]:
            self._send(rank, signal.SIGKILL)  # processes that the dead rank left running
            if rank in self.policy.restartable and self._may_restart():
                self._restarts.append(rank)
                del dead[rank]
        dead |= {rank: 0 for rank, code in dead.items() if self._is_excused(rank, code)}
        # Of ranks that died between two polls, one that was killed is the more likely cause.
        for rank, code in sorted(dead.items(), key=lambda item: (item[1] >= 0, item[0])):
            is_first = not any(map(self._is_failure, self._codes.values()))
            self._codes[rank] = code
            if rank == 0 and code == 0 and self.policy.drain_s is not None:
                self._pending.append((now + self.policy.drain_s, signal.SIGKILL))
            if self._is_failure(code):
                self._send(rank, signal.SIGKILL)
                if is_first:
                    self._pending.append((now + _TERM_AFTER_DEATH_S, signal.SIGTERM))
                    self._pending.append((now + _KILL_AFTER_DEATH_S, signal.SIGKILL))
        self._send_due(now)
        self._kill_orphans(now)
        return (len(self._codes) < len(pids) or bool(self._orphans_s)) and now < self._abandon_s

    def _newly_dead(self, known: Mapping[int, int]) -> dict[int, int]:
        """Exit codes of ranks that have ended, of those that are in no record and not `known`."""
        ranks = self._pids.keys() - self._codes.keys() - known.keys()
        codes = {rank: _poll_exit_code(self._pids[rank]) for rank in sorted(ranks)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def start_again(self, start: Callable[[int], None]) -> None:
        """Call `start` for ranks that are to be started again, after `poll`."""
        for rank in self._restarts[self._num_started :]:
            self._num_started += 1
            number = f"{self._num_started} of at most {self.policy.max_restarts}"
            sys.stderr.write(f"plait: rank {rank} was killed and is started again (restart {number})\n")
            start(rank)

    def _may_restart(self) -> bool:
        has_failed = any(map(self._is_failure, self._codes.values()))
        is_left = len(self._restarts) < self.policy.max_restarts
        return is_left and not (has_failed or self.is_stopping or self._is_over)

    @property
    def is_stopping(self) -> bool:
        """True once a signal has asked the ranks to end."""
        return self._forwarded is not None

    def succeeded(self) -> bool:
        return len(self._codes) == len(self._pids) and not any(self._codes.values())

    def exit_code(self) -> int:
        failures = [code for code in self._codes.values() if self._is_failure(code)]
        if _USER_ERROR in failures:
            return _USER_ERROR
        if failures:
            return failures[0] if failures[0] > 0 else 128 - failures[0]
        if len(self._codes) < len(self._pids):
            return 128 + signal.SIGKILL  # abandoned
        killed_by_signal = any(self._codes.values())
        if self._forwarded is not None and (self._forwarded is signal.SIGINT or killed_by_signal):
            return 128 + self._forwarded
        return 0

    def death(self) -> CommError | None:
        """Return the error of the rank whose death by a signal has ended the job, if no rank has ended with a
        code of its own: such a rank has reported what it lost."""
        failures = [(rank, code) for rank, code in self._codes.items() if self._is_failure(code)]
        if not failures or any(code > 0 for code in self._codes.values()):
            return None
        rank, code = failures[0]
        name = self.policy.names.get(rank, f"rank {rank}")
        has_begun = not self.policy.optional or self.begun.exists()
        with_what = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return CommError(
            f"{name} was killed" + ("" if has_begun else " before the job had begun"),
            given=f"process {self._pids[rank]}, rank {rank} of {len(self._pids)}: {with_what}",
            expected="a process that runs until the job ends",
            hint="dmesg, which shows whether memory ran out; a run continues from its newest checkpoint",
        )

    def _is_excused(self, rank: int, code: int) -> bool:
        """Return whether a rank that ended so does not fail the job."""
        if code < 0:
            return (rank in self.policy.optional and self.begun.exists()) or self._is_over
        return rank in self._restarts and self._is_over  # it was too late to join

    @property
    def _is_over(self) -> bool:
        return self.policy.drain_s is not None and self._codes.get(0) == 0

    def _report_late_ranks(self, dead: Mapping[int, int]) -> None:
        for rank, code in dead.items():
            if self._is_over and code == -signal.SIGKILL:
                sys.stderr.write(
                    f"plait: rank {rank} was killed {self.policy.drain_s:g} s after the job had ended\n"
                )

    def _is_failure(self, code: int) -> bool:
        as_requested = () if self._forwarded is None else (-self._forwarded, 128 + self._forwarded)
        return code != 0 and code not in as_requested

    def _schedule_signals(self) -> None:
        while self._received:
            at_s, signum = self._received.pop(0)
            if signum is signal.SIGUSR1:
                self._pending.append((at_s, signum))
            elif self._forwarded is None:
                self._forwarded, self._forwarded_s = FORWARDED[signum], at_s
                self._pending += [(at_s, self._forwarded), (at_s + self.save_s, signal.SIGKILL)]
            elif signum is signal.SIGINT and at_s > self._forwarded_s + _SECOND_CTRL_C_S:
                self._pending.append((at_s, signal.SIGKILL))

    def _send_due(self, now: float) -> None:
        due = [signum for at_s, signum in self._pending if at_s <= now]
        self._pending = [entry for entry in self._pending if entry[0] > now]
        for signum in due:
            for rank in self._pids.keys() - self._codes.keys():
                self._send(rank, signum)
        if signal.SIGKILL in due:
            self._abandon_s = min(self._abandon_s, now + _ABANDON_S)

    def _send(self, rank: int, signum: signal.Signals) -> None:
        pid = self._pids[rank]
        if signum is signal.SIGKILL:
            self._orphans_s.setdefault(pid, time.monotonic() + _ORPHANS_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)

    def _kill_orphans(self, now: float) -> None:
        """Kill what killed ranks have left: every rank leads a process group. Not at once: the process that
        removes a rank's semaphores does so when the rank has ended."""
        for pid in [pid for pid, at_s in self._orphans_s.items() if at_s <= now]:
            del self._orphans_s[pid]
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _poll_exit_code(pid: int) -> int | None:
    """Return the exit code of an unreaped child that has ended, negative for a signal; else None."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
