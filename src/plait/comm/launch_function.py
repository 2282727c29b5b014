"""Run a function on local ranks, from a script or a notebook.

[Note: forked functions]
The ranks are forks of this process, so that the function may be defined anywhere, also in a notebook's cell,
and reads the variables around it. Other threads may be running (a notebook's kernel has several), and torch
may have computed: a fork has no OpenMP threads, and its main thread would wait for them. A new thread has a
pool of its own, so each rank runs the function in one. A process that has used CUDA cannot be forked.
Results and exceptions come back pickled, through files without a name: no other process can write to them.
"""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from plait.comm.launch import end_with_parent, launch_local
from plait.errors import CommError
from plait.launchers import adopt_ranks

_T = TypeVar("_T")
_INTERRUPTED = 128 + signal.SIGINT
_STOP_S = 5.0  # from Ctrl-C to SIGKILL


def launch(function: Callable[..., _T], ranks: int, *args: Any) -> _T:
    """Run `function(*args)` on `ranks` local ranks, and return the result of rank 0.

    For notebooks and scripts that torchrun does not start. In the function, `parallelize` and
    `plait.comm.connect` join the ranks. Each rank uses a GPU if there are any, and this process must not have
    used CUDA before; else the ranks share the CPU's cores. Needs Linux: other systems cannot fork safely.

    A rank that exits with code 0, like a parameter server, returns None.

    Raises the exception of the rank that failed first, with the rank's traceback as a note; CommError if a
    rank was killed, or if ranks cannot be started here; KeyboardInterrupt after Ctrl-C, which ends all ranks.
    """
    _check_launch(function)
    deaths: list[CommError] = []
    outcomes = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115  # closed below
    with contextlib.ExitStack() as files:
        for file in outcomes:
            files.enter_context(file)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or each rank prints it again
        with _kept_handlers(), warnings.catch_warnings():
            # See [Note: forked functions]; Python 3.12 and later warn of it.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            rank = _Rank(function, args, outcomes)
            code = launch_local(ranks, [], function=rank, save_s=_STOP_S, on_death=deaths.append)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        ended = [_Outcome.read(file) for file in outcomes]
    failed = [outcome for outcome in ended if outcome is not None and outcome.error is not None]
    if failed:
        first = min(failed, key=lambda outcome: (isinstance(outcome.error, CommError), outcome.at_s))
        assert first.error is not None
        raise first.error
    if deaths:
        raise deaths[0]
    if code or ended[0] is None:
        raise CommError(
            "a rank has ended without a result",
            given=f"exit code {code}",
            expected="ranks that return or raise",
            hint="a function that does not end its process",
        )
    result: _T = ended[0].result
    return result


def _check_launch(function: object) -> None:
    """Raise CommError if this process cannot start ranks."""
    problem, hint = None, None
    if not callable(function):
        problem, hint = f"a {type(function).__name__}", "plait.launch(train, 2), with the function itself"
    elif sys.platform != "linux":
        problem, hint = f"a process on {sys.platform}, which cannot fork safely", "torchrun"
    elif adopt_ranks() or dist.is_initialized():
        problem, hint = "a process that is a rank itself", "call the function, without launch"
    elif torch.cuda.is_initialized():
        problem = "a process that has used CUDA, which no fork of it can use"
        hint = "a new process (a restarted kernel) that calls launch before it uses CUDA"
    if problem is not None:
        raise CommError(
            "launch cannot start ranks",
            given=problem,
            expected="a process that can be forked into ranks",
            hint=hint,
        )


@dataclass(frozen=True)
class _Outcome:
    """The end of a rank's function."""

    result: Any
    error: Exception | None
    at_s: float

    @staticmethod
    def read(file: IO[bytes]) -> "_Outcome | None":
        """Read the outcome that a rank has written; None if it was killed before."""
        file.seek(0)
        content = file.read()
        return pickle.loads(content) if content else None


class _Rank:
    """The function of a rank, and the files for all ranks' outcomes."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], outcomes: Sequence[IO[bytes]]
    ) -> None:
        self._function = function
        self._args = args
        self._outcomes = outcomes
        self._outcome: _Outcome | None = None

    def __call__(self) -> None:
        """Run the function in a thread of its own. See [Note: forked functions]."""
        end_with_parent()
        thread = threading.Thread(target=self._run, name="plait rank", daemon=True)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked at the start of a rank
            thread.start()
            thread.join()
        except KeyboardInterrupt:
            os._exit(_INTERRUPTED)
        assert self._outcome is not None, "the thread has ended"
        file = self._outcomes[int(os.environ["RANK"])]
        file.write(_pickled(self._outcome))
        file.flush()
        if self._outcome.error is not None:
            raise SystemExit(1)

    def _run(self) -> None:
        try:
            torch.set_num_threads(torch.get_num_threads())  # a setting of each thread
            result = self._function(*self._args)
            kept = result if os.environ["RANK"] == "0" else None
            self._outcome = _Outcome(kept, None, time.monotonic())
        except BaseException as error:
            failure: Exception | None = error if isinstance(error, Exception) else RuntimeError(repr(error))
            if isinstance(error, SystemExit) and not error.code:
                failure = None
            self._outcome = _Outcome(None, failure, time.monotonic())


def _pickled(outcome: _Outcome) -> bytes:
    """The outcome, its error with the traceback as a note. If it cannot be pickled, a CommError with the
    error's text."""
    rank = f"rank {os.environ['RANK']}"
    error = outcome.error
    if error is not None:
        text = "".join(traceback.format_exception(error))
        error.add_note(f"(raised on {rank})\n{text}")
    try:
        content = pickle.dumps(outcome)
        pickle.loads(content)
        return content
    except Exception as problem:
        fact, given = f"{rank} returned a value that cannot be pickled", str(problem)
        if error is not None:
            fact, given = f"{rank} raised {type(error).__name__}", "".join(traceback.format_exception(error))
        return pickle.dumps(_Outcome(None, CommError(fact, given=given), outcome.at_s))


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Restore the signal handlers of this process, which goes on after an interrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in handlers.items() if is_main else ():
            signal.signal(signum, handler)
