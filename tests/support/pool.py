"""Pool of long-lived worker processes: run a function on n ranks without starting processes or importing
torch.

`pool.run(fn, n, *args)` calls a top-level function on n workers at the same time. Each has the environment of
a rank (RANK, WORLD_SIZE, LOCAL_RANK, PLAIT_RENDEZVOUS_FILE), so `plait.comm.connect()` joins a fresh process
group; the worker leaves it afterwards. The worker side is pool_worker.py.
"""

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

from support import warm

TESTS = Path(__file__).resolve().parents[1]
WORKER = TESTS / "support" / "pool_worker.py"
MAX_RANKS = 16  # of a test
AFTER_FAILURE_S = 5.0  # time for the other ranks to end by themselves after a failure
STACK_S = 8.0  # time for a stuck worker to write its stack; only stopped processes need all of it
OUTPUT_CHARS = 4000  # part of a rank's output in error messages

# Gloo's errors on a rank whose peer is gone: consequences, shown after the causes.
_ECHO = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|wait timeout|timed out|rank \d+ is gone",
    re.I,
)


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank. `text`: its traceback or stack; `exception`: None if it cannot be pickled."""

    rank: int
    fact: str
    text: str
    exception: BaseException | None
    at_s: float
    is_consequence: bool = False  # caused by another rank's failure
    is_late: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.fact}\n{self.text}".rstrip()


class RankError(Exception):
    """At least one rank failed. `failures`: causes before consequences, each in order of time."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        self.failures = sorted(failures, key=lambda it: (it.is_late, it.is_consequence, it.at_s))
        super().__init__("\n\n".join(map(str, self.failures)))


class RankTimeout(RankError):
    """Some ranks did not end within the time limit. The text contains their stacks."""


class Worker:
    """Process of the pool, with the pool's end of its connection and its output files."""

    def __init__(self, folder: Path, first_import: str = "") -> None:
        self.folder = folder
        folder.mkdir()
        self.stacks = folder / "stacks"
        self.output = folder / "output"
        ours, theirs = socket.socketpair()
        with theirs, self.output.open("wb") as output:
            self.process = warm.Popen(
                [str(theirs.fileno()), str(self.stacks)],
                script=WORKER,
                first_import=first_import,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # pytest handles Ctrl-C, and ends the workers
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(_import_path()),
                    "PLAIT_LAUNCHER_PID": str(os.getpid()),
                },
            )
        self.connection = connection.Connection(ours.detach())
        self._output_seen = 0

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # a dead worker is detected when its answer is read
            self.connection.send(message)

    def begin(self, job: dict[str, Any]) -> None:
        self._output_seen = self.output.stat().st_size
        self.send(job)

    def printed(self) -> str:
        """Tail of its stdout and stderr since `begin`."""
        with self.output.open("rb") as file:
            file.seek(self._output_seen)
            text = file.read().decode(errors="replace").strip()
        return f"it had printed:\n{text[-OUTPUT_CHARS:]}" if text else ""

    def start_stack(self) -> None:
        self.stacks.write_bytes(b"")
        self.process.send_signal(signal.SIGUSR1)

    def stack(self, until_s: float) -> str:
        """Python stacks of all threads, or a reason for none. Waits until monotonic time `until_s`."""
        text = ""
        while time.monotonic() < until_s:
            before, text = text, self.stacks.read_text(errors="replace")
            if text and text == before:
                return text
            time.sleep(0.05)
        return text or "(no stack: the process does not answer signals)"

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pool:
    """Runs functions on worker processes. `close` ends them."""

    def __init__(
        self,
        warning_filters: Sequence[tuple[Any, ...]] = (("error", "", Warning, "", 0),),
        first_import: str = "",
        max_ranks: int = MAX_RANKS,
    ) -> None:
        """`first_import`: a module that workers import before torch."""
        self._folder = tempfile.TemporaryDirectory(prefix="plait-pool-", ignore_cleanup_errors=True)
        self._workers: list[Worker] = []
        self._num_started = 0
        self._num_runs = 0
        self._filters = [*warning_filters]
        self._first_import = first_import
        self._max_ranks = max_ranks
        self.transport = "auto"  # for the next run

    def run(
        self, fn: Callable[..., Any], n: int, /, *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on n ranks at the same time. Return their results by rank.

        `fn` is a top-level function of an importable module; arguments and results are pickled. Raises
        RankError when a rank raises or dies, RankTimeout (with stacks) after `timeout_s` seconds.
        """
        if not 1 <= n <= self._max_ranks:
            raise ValueError(f"{n} ranks requested; the pool has 1 to {self._max_ranks}")
        job = {
            "function": _address(fn),
            "arguments": pickle.dumps((args, kwargs)),
            "sys_path": _import_path(),
            "warning_filters": self._filters,
            "environment": self._environment(n),
            "transport": self.transport,
        }
        workers = self._take(n)
        try:
            results, failures = self._supervise(workers, job, timeout_s)
        except BaseException:  # Ctrl-C, or an unreadable result: the ranks' state is unknown
            self._replace(workers)
            raise
        if failures:
            late = all(failure.is_late for failure in failures)
            error = RankTimeout(failures) if late else RankError(failures)
            raise error from error.failures[0].exception
        return [results[rank] for rank in range(n)]

    def over(self, transport: str) -> "PoolOver":
        """The same pool with another transport than plait's default."""
        return PoolOver(self, transport)

    def close(self) -> None:
        self._replace(self._workers)
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def _environment(self, n: int) -> dict[str, str]:
        self._num_runs += 1
        return {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "PLAIT_RENDEZVOUS_FILE": str(Path(self._folder.name) / f"run-{self._num_runs}"),
        }

    def _take(self, n: int) -> list[Worker]:
        self._replace([worker for worker in self._workers if worker.process.poll() is not None])
        while len(self._workers) < n:
            self._num_started += 1
            self._workers.append(self._new_worker())
        return self._workers[:n]

    def _new_worker(self) -> Worker:
        return Worker(Path(self._folder.name) / f"worker-{self._num_started}", self._first_import)

    def _replace(self, workers: Sequence[Worker]) -> None:
        """End workers. The next run that needs more starts new ones."""
        for worker in [*workers]:
            worker.end()
            self._workers.remove(worker)

    def _supervise(
        self, workers: list[Worker], job: dict[str, Any], timeout_s: float
    ) -> tuple[dict[int, Any], list[RankFailure]]:
        begin_s = time.monotonic()
        until_s = begin_s + timeout_s
        for rank, worker in enumerate(workers):
            worker.begin(job | {"rank": rank})
        waiting = dict(enumerate(workers))
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        while waiting and time.monotonic() < until_s:
            for rank, outcome in _answers(waiting):
                del waiting[rank]
                if isinstance(outcome, RankFailure):
                    if not failures:
                        until_s = min(until_s, time.monotonic() + AFTER_FAILURE_S)
                    failures.append(outcome)
                else:
                    results[rank] = outcome
        failures += self._end_stuck(waiting, time.monotonic() - begin_s)
        for worker in workers:
            worker.send("leave")  # no rank closes a connection that a peer still reads
        return results, failures

    def _end_stuck(self, stuck: dict[int, Worker], after_s: float) -> list[RankFailure]:
        for worker in stuck.values():
            worker.start_stack()
        until_s = time.monotonic() + STACK_S
        fact = f"was still running after {after_s:.1f} s and was killed"
        failures = []
        for rank, worker in stuck.items():
            text = f"{worker.stack(until_s)}\n{worker.printed()}"
            failures.append(RankFailure(rank, fact, text, None, time.monotonic(), is_late=True))
        self._replace([*stuck.values()])
        return failures


class PoolOver:
    """A pool with a given transport."""

    def __init__(self, pool: Pool, transport: str) -> None:
        self.pool = pool
        self.transport = transport

    def run(
        self, fn: Callable[..., Any], n: int, /, *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Like `Pool.run`."""
        self.pool.transport = self.transport
        try:
            return self.pool.run(fn, n, *args, timeout_s=timeout_s, **kwargs)
        finally:
            self.pool.transport = "auto"

    def over(self, transport: str) -> "PoolOver":
        return PoolOver(self.pool, transport)


Ranks = Pool | PoolOver


def _answers(waiting: dict[int, Worker]) -> list[tuple[int, Any]]:
    """Answers of ranks within 50 ms: (rank, result or RankFailure)."""
    by_connection = {worker.connection: rank for rank, worker in waiting.items()}
    ready = {by_connection[ready] for ready in connection.wait([*by_connection], timeout=0.05)}
    # A child of a dead worker may keep its connection open.
    ready |= {rank for rank, worker in waiting.items() if worker.process.poll() is not None}
    return [(rank, _answer(rank, waiting[rank])) for rank in sorted(ready)]


def _answer(rank: int, worker: Worker) -> Any:
    at_s = time.monotonic()
    try:
        answer = worker.connection.recv() if worker.connection.poll() else None
    except (EOFError, ConnectionResetError):
        answer = None
    if answer is None:
        return RankFailure(rank, _how_died(worker.process), worker.printed(), None, at_s)
    if "result" in answer:
        return pickle.loads(answer["result"])
    exception = None
    with contextlib.suppress(Exception):  # its class may be importable only on the rank
        exception = pickle.loads(answer["exception"]) if answer["exception"] else None
    is_echo = bool(_ECHO.search(answer["message"]))
    text = f"{answer['traceback']}\n{worker.printed()}"
    return RankFailure(rank, f"raised {answer['message']}", text, exception, answer["at_s"], is_echo)


def _how_died(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=STACK_S)
    except subprocess.TimeoutExpired:
        return "closed its connection to the pool"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _address(fn: Callable[..., Any]) -> tuple[str, str | None, str]:
    """Module, its file if under tests/, and qualified name. pytest may import it under another name."""
    module: ModuleType = sys.modules[fn.__module__]
    found: Any = module
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not fn:
        raise TypeError(
            f"{fn.__qualname__} is not a top-level function of {fn.__module__}: ranks cannot import it"
        )
    file = Path(module.__file__ or "").resolve()
    return fn.__module__, str(file) if TESTS in file.parents else None, fn.__qualname__


def _import_path() -> list[str]:
    ours = [str(Path(entry).resolve()) for entry in sys.path]
    return [*ours, *(folder for folder in (str(TESTS), str(TESTS.parent)) if folder not in ours)]
