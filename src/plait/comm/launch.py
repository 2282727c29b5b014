"""Local launcher: start a command on several ranks of this host, and end them together.

[Note: extension of torch's agent]
The ranks are started and reaped by torch's elastic agent, the one under `torchrun`. By itself it does three
things that a training run cannot have: it sends signals to a rank's entire process group, which kills the
DataLoader's workers under a rank that is about to save; once signalled it forgets how the ranks ended; and
after a rank's death it waits 30 s, a constant, for peers stuck in a collective. Its documented extension
point is `_monitor_workers`, called in its loop. Ours polls and ends the ranks, and lets torch's poll and reap
them when all have ended: until then every pid is still the rank's own.

[Note: no listening sockets]
Agent and ranks rendezvous through files in a private directory (mode 0700, removed at the end), because
torch's TCPStore listens on every interface, without a password, whatever address it is given. Gloo and NCCL
open sockets of their own, on the interface named in their environment, which we set to loopback.

[Note: forked ranks]
A rank that trains a Hugging Face model imports torch and transformers: four seconds of one core, more than a
short run itself, and all ranks of a host import the same. The command line has imported them too, to check
the recipe, so its ranks are forked from it (torch's agent with a function as its entrypoint): they start at
once and share the pages of the libraries. A fork is safe only if no other thread can hold a lock that the
child needs, and if no library has state that a fork breaks:
- An accelerator's driver cannot be used in a child of a process that has used it: where torch finds one, the
  ranks are started as fresh processes.
- OpenMP's pool of threads does not exist in the child, which would wait for it: `fork_ranks` keeps the
  launcher to one thread, so that there is no pool.
- OpenBLAS and tokenizers handle a fork themselves; the rendezvous of torch's agent has a thread that sleeps.
  With any other thread of Python's, and on other systems than Linux, the ranks are fresh processes.
A fresh process reads its environment when it loads its libraries. A forked one applies the two settings that
are read then: the number of threads and malloc's thresholds. It runs none of the launcher's exit handlers.
What the launcher has imported is excluded from a rank's garbage collections: one that visits these 440,000
objects takes each rank 0.3 s, and as it writes to them, 120 MB that are no longer shared.

[Note: signals that are blocked at start]
SIGUSR1 requests a save, and would kill a rank without a handler, e.g. one still importing torch. SIGINT
would print the traceback of a rank that does not handle it yet; only plait's own ranks unblock it. A signal
mask survives exec, unlike a handler: while blocked, a signal is pending until the rank unblocks it.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from plait.comm.device import allowed_processors
from plait.comm.rank_monitor import FORWARDED, SIGNALS, RankMonitor, RestartPolicy
from plait.errors import CommError
from plait.fileio import temporary_folder
from plait.launchers import BEGUN, LAUNCHER_PID, RENDEZVOUS_FILE, loopback_sockets, missing_semaphores

_MONITOR_S = 0.05
_LIMITS = {"OMP_NUM_THREADS": 1024, "MALLOC_MMAP_THRESHOLD_": 2**31 - 1}  # of variables
_NUM_SEMAPHORES = 2  # for each forked rank
_RENDEZVOUS = "ranks"  # file of the launcher's private directory
_BLOCKED_AT_START = {signal.SIGUSR1, signal.SIGINT}


_entry: Callable[[], object] | None = None  # see `fork_ranks`


def _print_error(error: CommError) -> None:
    sys.stderr.write(f"{error.message()}\n")


def launch_local(
    num_ranks: int,
    argv: list[str],
    *,
    command: Sequence[str] | None = None,
    function: Callable[[], object] | None = None,
    save_s: float = 60.0,
    policy: RestartPolicy | None = None,
    on_death: Callable[[CommError], object] = _print_error,
) -> int:
    """Run `command *argv` (by default `python -m plait *argv`) on `num_ranks` ranks of this host; or
    `function()`, on ranks that are always forked, see [Note: forked ranks].

    Each rank gets RANK, WORLD_SIZE, LOCAL_RANK as under `torchrun`, and in PLAIT_RENDEZVOUS_FILE the file for
    the rendezvous. Sockets listen on loopback only. When a rank ends with another code than 0, the others are
    ended within seconds, even if they are stuck, except after the deaths that `policy` names. `on_death` gets
    the error of a killed rank, if none reports it.

    SIGTERM, SIGINT (Ctrl-C) and SIGHUP (as SIGTERM) are forwarded once to every rank, which then has `save_s`
    seconds to save and exit; a second Ctrl-C ends it at once. SIGUSR1 is forwarded each time, and stays
    pending for ranks that have not unblocked it yet. Signals are handled only in the main thread. After one
    that asked the ranks to end, all such signals stay ignored: this process is about to end.

    Returns the exit code: 0 when all ranks ended with 0; else 2 when any ended with 2 (a user error); else
    that of the rank that failed first, 128 + n for one killed by signal n. After a SIGINT that all ranks
    obeyed: 130. TORCH_DISTRIBUTED_DEBUG=INFO shows the log of torch's agent.

    Raises CommError for arguments or variables that cannot be, and OSError if the command cannot be started.
    """
    if num_ranks < 1:
        raise CommError(
            "a job needs at least one rank",
            given=f"{num_ranks} ranks",
            expected="1 or more",
            hint="--ranks 1",
        )
    is_own = command is None
    words = [*(command or (sys.executable, "-u", "-m", "plait")), *argv]
    program = function or (_entry if is_own and _entry is not None and _can_fork(num_ranks) else None)
    forked = None if program is None else _ForkedRank(argv, program)
    with temporary_folder(Path(tempfile.gettempdir()) / "plait", 0o700) as rendezvous_dir:
        begun = rendezvous_dir / (_RENDEZVOUS + BEGUN)
        monitor = RankMonitor(save_s, policy or RestartPolicy(), begun)
        with (
            _patched_environment(_rank_environment(num_ranks, rendezvous_dir)),
            _silence_torch(),
            _forward_signals(monitor),
        ):
            _run_agent(num_ranks, words, forked, rendezvous_dir, monitor, is_own=is_own)
    if (death := monitor.death()) is not None:
        on_death(death)
    return monitor.exit_code()


def fork_ranks(entry: Callable[[], object]) -> None:
    """Let `launch_local` fork the ranks of `python -m plait` from this process, where that is safe: they run
    `entry`, with the command's arguments in `sys.argv`.

    Must be called before torch computes: it keeps torch to one thread in this process. See
    [Note: forked ranks].
    """
    global _entry
    _entry = entry
    torch.set_num_threads(1)


def end_with_parent() -> None:
    """Kill this rank (SIGKILL) when its launcher dies, however it dies. Call it first.

    Does nothing in a process that `launch_local` did not start.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(int(launcher),), daemon=True).start()
    if os.getppid() != int(launcher):  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


class _Agent(LocalElasticAgent):
    """torch's agent, which polls our monitor before its own. See [Note: extension of torch's agent]."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        monitor: RankMonitor,
        forked: "_ForkedRank | None",
        blocked: set[signal.Signals],
    ) -> None:
        """`blocked`: signals with which fresh processes start blocked."""
        super().__init__(spec, logs, start_method="fork")  # of a function; programs are always fresh
        self._monitor = monitor
        self._forked = forked
        self._blocked = blocked
        self._restarted: dict[int, int] = {}  # pids by rank; torch knows of the first processes only

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._blocked_signals():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        if self._forked is not None:
            self._forked.open_gate()
        return pids

    @contextlib.contextmanager
    def _blocked_signals(self) -> Iterator[None]:
        # A forked rank has the launcher's handlers until it unblocks all but those that are blocked at start.
        to_block = self._blocked if self._forked is None else SIGNALS
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, to_block)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start_again(self, rank: int) -> None:
        """Start one rank once more, as torch started it."""
        assert self._pcontext is not None, "the ranks have been started"
        environment = self._pcontext.envs[rank]
        with self._blocked_signals():
            if self._forked is None:
                command = [self._pcontext.entrypoint, *self._pcontext.args[rank]]
                variables = {**os.environ, **environment}
                pid = os.posix_spawnp(command[0], command, variables, setpgroup=0)
            else:
                pid = self._forked.start_again(environment)
        self._restarted[rank] = pid

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.global_rank: worker.id for worker in worker_group.workers} | self._restarted
        if self._monitor.poll(pids):
            self._monitor.start_again(self._start_again)
            return RunResult(state=WorkerState.HEALTHY)
        for pid in self._restarted.values():  # torch reaps the others
            os.waitpid(pid, os.WNOHANG)
        if self._monitor.succeeded():  # torch waits for results, which forked ranks do not return
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(pids))
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def _can_fork(num_ranks: int) -> bool:
    is_alone = sys.platform == "linux" and threading.active_count() == 1
    has_queues = is_alone and not missing_semaphores(_NUM_SEMAPHORES * num_ranks)  # of torch's agent
    return has_queues and not torch.accelerator.is_available()


class _ForkedRank:
    """A rank that torch's agent forks from the launcher. See [Note: forked ranks]."""

    def __init__(self, argv: Sequence[str], function: Callable[[], object]) -> None:
        self._argv = argv
        self._function = function
        self._gate: tuple[int, ...] = os.pipe()

    def open_gate(self) -> None:
        """Let the ranks begin. Starting one more process reaps those that have ended, so none may before."""
        for end in self._gate:
            os.close(end)
        self._gate = ()

    def start_again(self, environment: Mapping[str, str]) -> int:
        """Fork one rank, not by multiprocessing, which would reap those that have ended; return its pid."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the rank prints it again
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            self.run()
        return pid

    def run(self) -> NoReturn:
        def program() -> None:
            self._become_rank()
            self._function()

        run_and_exit(program)

    def _become_rank(self) -> None:
        """Set up what a fresh process has: its session, signals, output, threads, malloc, arguments."""
        atexit._clear()
        gc.freeze()
        os.setsid()
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                is_int = signum is signal.SIGINT
                signal.signal(signum, signal.default_int_handler if is_int else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS} - _BLOCKED_AT_START)
        if self._gate:
            read, write = self._gate
            os.close(write)
            os.read(read, 1)
        torch.set_num_threads(_number_in_environment("OMP_NUM_THREADS"))
        _set_malloc_thresholds()
        if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is not
            sys.stdout.reconfigure(line_buffering=True)
        Path("/proc/self/comm").write_text(f"plait rank {os.environ['RANK']}")  # for `top` and `pgrep`
        sys.argv = ["plait", *self._argv]


def run_and_exit(program: Callable[[], object]) -> NoReturn:
    """Run the program of a forked process, and end the process as the interpreter does."""
    code: object = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before `main` handles it
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _set_malloc_thresholds() -> None:
    """Apply what a process that starts reads from its environment, where that is glibc's malloc."""
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD; to trim at -1 is never to trim
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap, _number_in_environment("MALLOC_MMAP_THRESHOLD_"))
        mallopt(trim, -1)


def _run_agent(
    num_ranks: int,
    command: Sequence[str],
    forked: _ForkedRank | None,
    rendezvous_dir: Path,
    monitor: RankMonitor,
    *,
    is_own: bool,
) -> None:
    rendezvous = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=str(rendezvous_dir / "agent"),
            run_id=rendezvous_dir.name,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            store_type="file",
            keep_alive_interval=3600,  # keep-alives are for other hosts' agents, and each makes the file grow
        )
    )
    program, *arguments = command
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=program if forked is None else forked.run,
        # torch expands ${local_rank}
        args=tuple(argument.replace("$", "$$") for argument in arguments if forked is None),
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        local_addr="127.0.0.1",
    )
    try:
        logs = DefaultLogsSpecs(log_dir=str(rendezvous_dir / "logs"))
        _Agent(spec, logs, monitor, forked, _BLOCKED_AT_START if is_own else {signal.SIGUSR1}).run()
    finally:
        rendezvous.shutdown()


def _rank_environment(num_ranks: int, rendezvous_dir: Path) -> dict[str, str]:
    defaults = {
        **loopback_sockets(os.environ),
        "OMP_NUM_THREADS": str(max(1, num_cpus() // num_ranks)),
        # glibc returns blocks of some MB to the kernel after each use; a training step needs the same
        # ones again, and pays for every page. Keeping them makes a step on CPU a tenth faster.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    }
    # Units' storages are freed and allocated all the time: without this, GPU memory fragments. Unlike
    # `is_available`, `device_count` does not start CUDA's driver, which forked ranks could not use then.
    if torch.accelerator.device_count() and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name in _LIMITS.keys() & {name for name, value in os.environ.items() if value}:
        _number_in_environment(name)
    return {
        **{name: value for name, value in defaults.items() if not os.environ.get(name)},
        RENDEZVOUS_FILE: str(rendezvous_dir / _RENDEZVOUS),
        LAUNCHER_PID: str(os.getpid()),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else the agent opens a TCPStore too
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # handled here
    }


def _number_in_environment(name: str) -> int:
    """Return a number that libraries read when a process starts: the first of a list. Raises CommError."""
    text = os.environ[name].partition(",")[0].strip()
    limit = _LIMITS[name]
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= limit:
        raise CommError(
            f"{name} is not a number that libraries can use",
            given=f"{name}={os.environ[name]}",
            expected=f"a number from 1 to {limit}",
            hint=f"unset {name}",
        )
    return int(text)


def num_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(allowed_processors())


@contextlib.contextmanager
def _patched_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the children started meanwhile: torch's agent passes on all of ours."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silence_torch() -> Iterator[None]:
    """Keep the log of torch's agent off the terminal, unless TORCH_DISTRIBUTED_DEBUG is set."""
    logger = logging.getLogger("torch.distributed.elastic")
    null_handler = logging.NullHandler()  # without any handler, logging prints warnings to stderr
    propagate = logger.propagate
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
        logger.propagate = False
        logger.addHandler(null_handler)
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(null_handler)


@contextlib.contextmanager
def _forward_signals(monitor: RankMonitor) -> Iterator[None]:
    """Route the signals for the ranks to the monitor, except those that the caller's shell ignores."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, monitor.on_signal)
    try:
        yield
    finally:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, previous)  # and the handlers of earlier ones run
        for signum, old in previous.items():
            is_repeated = monitor.is_stopping and signum in FORWARDED
            signal.signal(signum, signal.SIG_IGN if is_repeated else old)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
