"""Starts a command on several local ranks, and ends them all together.

Note: why torch's agent is extended and not called through `launch_agent`
    The ranks are started and reaped by torch's elastic agent, the one under `torchrun`. Alone it does three
    things that a training run cannot have: it sends a signal to a rank's whole process group, which kills
    the DataLoader's workers under the rank that is about to save; once signalled it forgets how the ranks
    ended; and after a rank's death it waits 30 s, a constant, for peers stuck in a collective. Its documented
    place for other wishes is `_monitor_workers`, called in its loop. Ours watches and ends the ranks, and
    lets torch's look, and reap, when all have ended: until then every pid is still the rank's own.

Note: why nothing listens
    Agent and ranks meet in files in a private directory (mode 0700, removed at the end), because torch's
    TCPStore listens on every interface, without a password, whatever address it is given. Gloo and NCCL
    open sockets of their own: on the interface named in their environment, which we set to loopback.

Note: why ranks begin with SIGUSR1 blocked
    It asks for a save, and kills whoever has no handler for it: a rank, while it still imports torch. A mask
    outlives exec as no handler does. Blocked, the signal waits for the rank that unblocks it.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from plait.comm.world import RENDEZVOUS_FILE
from plait.errors import CommError

_LAUNCHER_PID = "PLAIT_LAUNCHER_PID"

_MONITOR_S = 0.05
_ASK_AFTER_DEATH_S = 2.0  # from a rank's death to SIGTERM: peers mostly see it themselves, and say so
_KILL_AFTER_DEATH_S = 5.0  # ... to SIGKILL: stuck in a collective they answer to nothing else
_ABANDON_S = 3.0  # from SIGKILL to giving up on a rank that the kernel does not let go
_IMPATIENT_S = 1.0  # a second Ctrl-C this long after the first means now

_USER_MISTAKE = 2  # the command line's exit code for a PlaitError
_PASSED_ON = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}


def launch_local(
    num_ranks: int, argv: list[str], *, command: Sequence[str] | None = None, save_s: float = 60.0
) -> int:
    """Runs `command *argv` (by default `python -m plait *argv`) on `num_ranks` ranks of this host.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK as under `torchrun`, and in PLAIT_RENDEZVOUS_FILE the file
    to meet in. Nothing listens but on loopback. The first rank that ends with another code than 0 takes
    the others down: within seconds, also when they are stuck.

    SIGTERM, SIGINT (Ctrl-C) and SIGHUP (as SIGTERM) are passed on once to every rank, which then has
    `save_s` seconds to save and end by itself; a second Ctrl-C ends it at once. SIGUSR1 is passed on each
    time it comes, and waits for ranks that have not unblocked it yet. This needs the main thread: called in
    another one, signals are left as they are.

    Returns the exit code: 0 when all ranks ended with 0; else 2 when any ended with 2 (a user's mistake);
    else that of the rank that failed first, 128 + n for one killed by signal n. After a SIGINT that all
    ranks obeyed: 130. TORCH_DISTRIBUTED_DEBUG=INFO shows the log of torch's agent.

    Raises CommError for less than one rank, and OSError when the command cannot be started.
    """
    if num_ranks < 1:
        raise CommError("a job needs ranks", given=f"{num_ranks} ranks", expected="1 or more")
    entry = [*(command or (sys.executable, "-u", "-m", "plait")), *argv]
    with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as meeting:
        watch = _Watch(save_s)
        with (
            _environment(_environment_of_ranks(num_ranks, Path(meeting))),
            _torch_quiet(),
            _signals_to(watch.on_signal),
        ):
            _run_agent(num_ranks, entry, Path(meeting), watch)
    return watch.exit_code()


def end_with_parent() -> None:
    """Makes this rank end (SIGKILL) when its launcher dies, however it dies. Call it first thing.

    Does nothing in a process that `launch_local` did not start.
    """
    launcher = os.environ.get(_LAUNCHER_PID)
    if launcher is None:
        return
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(int(launcher),), daemon=True).start()
    if os.getppid() != int(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


class _Watch:
    """How the ranks live and end. It looks at the dead without reaping them: torch does that."""

    def __init__(self, save_s: float) -> None:
        self._save_s = save_s  # from a signal to SIGKILL: time to write a checkpoint
        self._pids: Mapping[int, int] = {}
        self._codes: dict[int, int] = {}  # in the order of death; negative: killed by that signal
        self._arrived: list[tuple[float, signal.Signals]] = []  # signals to us, not yet passed on
        self._asked: signal.Signals | None = None  # the first that was
        self._asked_s = 0.0
        self._due: list[tuple[float, signal.Signals]] = []  # when the ranks get which signal
        self._abandon_s = float("inf")

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._arrived.append((time.monotonic(), signal.Signals(signum)))

    def look(self, pids: Mapping[int, int]) -> bool:
        """Notes who died and sends the signals that are due. True while a rank lives."""
        self._pids = pids
        now = time.monotonic()
        self._note_arrived_signals()
        dead = {
            rank: code
            for rank in pids
            if rank not in self._codes and (code := _ended(pids[rank])) is not None
        }
        # Of ranks that died between two looks, one that was killed is the likelier cause.
        for rank, code in sorted(dead.items(), key=lambda item: (item[1] >= 0, item[0])):
            first = not any(map(self._is_failure, self._codes.values()))
            self._codes[rank] = code
            if self._is_failure(code):
                self._send(rank, signal.SIGKILL)  # what the dead rank left running
                if first:
                    self._due.append((now + _ASK_AFTER_DEATH_S, signal.SIGTERM))
                    self._due.append((now + _KILL_AFTER_DEATH_S, signal.SIGKILL))
        self._send_due(now)
        return len(self._codes) < len(pids) and now < self._abandon_s

    def exit_code(self) -> int:
        failures = [code for code in self._codes.values() if self._is_failure(code)]
        if _USER_MISTAKE in failures:
            return _USER_MISTAKE
        if failures:
            return failures[0] if failures[0] > 0 else 128 - failures[0]
        if len(self._codes) < len(self._pids):
            return 128 + signal.SIGKILL  # abandoned
        obeyed_by_dying = any(self._codes.values())
        if self._asked is not None and (self._asked is signal.SIGINT or obeyed_by_dying):
            return 128 + self._asked
        return 0

    def _is_failure(self, code: int) -> bool:
        as_asked = () if self._asked is None else (-self._asked, 128 + self._asked)
        return code != 0 and code not in as_asked

    def _note_arrived_signals(self) -> None:
        while self._arrived:
            at_s, signum = self._arrived.pop(0)
            if signum is signal.SIGUSR1:
                self._due.append((at_s, signum))
            elif self._asked is None:
                self._asked, self._asked_s = _PASSED_ON[signum], at_s
                self._due += [(at_s, self._asked), (at_s + self._save_s, signal.SIGKILL)]
            elif signum is signal.SIGINT and at_s > self._asked_s + _IMPATIENT_S:
                self._due.append((at_s, signal.SIGKILL))

    def _send_due(self, now: float) -> None:
        due = [signum for at_s, signum in self._due if at_s <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for signum in due:
            for rank in self._pids.keys() - self._codes.keys():
                self._send(rank, signum)
        if signal.SIGKILL in due:
            self._abandon_s = min(self._abandon_s, now + _ABANDON_S)

    def _send(self, rank: int, signum: signal.Signals) -> None:
        # SIGKILL goes to the whole group that every rank leads: to what it started too.
        send = os.killpg if signum is signal.SIGKILL else os.kill
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(self._pids[rank], signum)


def _ended(pid: int) -> int | None:
    """The exit code of a child that has ended and is not reaped yet, negative for a signal; else None."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


class _Agent(LocalElasticAgent):
    """torch's agent, which asks our watch before it looks at the ranks itself. See the note on top."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, watch: _Watch) -> None:
        super().__init__(spec, logs)
        self._watch = watch

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._watch.look({worker.global_rank: worker.id for worker in worker_group.workers}):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def _run_agent(num_ranks: int, entry: Sequence[str], meeting: Path, watch: _Watch) -> None:
    rendezvous = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=str(meeting / "agent"),
            run_id=meeting.name,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            store_type="file",
            keep_alive_interval=3600,  # a sign of life for other hosts' agents; each makes the file grow
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=entry[0],
        args=tuple(argument.replace("$", "$$") for argument in entry[1:]),  # torch expands ${local_rank}
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        local_addr="127.0.0.1",
    )
    try:
        _Agent(spec, DefaultLogsSpecs(log_dir=str(meeting / "logs")), watch).run()
    finally:
        rendezvous.shutdown()


def _environment_of_ranks(num_ranks: int, meeting: Path) -> dict[str, str]:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    unless_set = {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(max(1, _num_cpus() // num_ranks)),
        # glibc gives blocks of some MB back to the kernel after each use; a training step uses the same
        # ones again, and pays for every page. Kept, a step on CPU takes a tenth less time.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    }
    return {
        **{name: value for name, value in unless_set.items() if name not in os.environ},
        RENDEZVOUS_FILE: str(meeting / "ranks"),
        _LAUNCHER_PID: str(os.getpid()),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else the agent opens a TCPStore beside the file
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # they are ours
    }


def _num_cpus() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the children started meanwhile: torch's agent passes on all of ours."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _torch_quiet() -> Iterator[None]:
    """Keeps the log of torch's agent off the terminal, unless TORCH_DISTRIBUTED_DEBUG asks: ranks speak."""
    log = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()  # without any handler, logging prints warnings to stderr
    propagate = log.propagate
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
        log.propagate = False
        log.addHandler(silence)
    try:
        yield
    finally:
        log.propagate = propagate
        log.removeHandler(silence)


@contextlib.contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Hands the signals that are for the ranks to `handler`, but for those that the caller's shell has turned
    off."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (*_PASSED_ON, signal.SIGUSR1):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)
