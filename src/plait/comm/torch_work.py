"""Communications under way, as torch wants them: a Work with a future that completes by itself.

[Note: who waits for a communication]
A Pending ends when somebody waits for it, while torch's own C++ waits for futures: DDP's reducer would wait
forever. So whoever comes first waits: the caller, in `wait`, or a background thread of the group, which
takes collectives in the order in which they were started. One of both at a time has the turn.

Completing a future runs its callbacks, which may start another communication and wait for its future
(PowerSGD's hook does). A thread therefore gives up the turn before it completes a future, and there is
always one thread that is not busy with callbacks while there are communications to wait for.

Messages have no such order: which of two arrives first is the peers' business. They are waited for by who
asks, and by a thread of their own only where a future or a time limit is asked for.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.transport import Work
from plait.errors import CommError

CLOSE_S = 5.0  # what a communication under way gets to end when its group is destroyed


class GroupWork(dist.Work):
    """A communication: over already, or waited for by `queue` (collectives) or by who asks (messages)."""

    def __init__(
        self,
        label: str,
        results: Sequence[Tensor],
        pending: Work | None = None,
        queue: "Queue | None" = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._label = label
        self._results = list(results)
        self._pending = pending
        self._queue = queue
        self._source = source
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._ending = threading.Lock()  # held by who waits for the pending
        self._lock = threading.Lock()  # held for moments: the future is made and completed once
        self._future: Any = None
        self._completion: Any = None  # what completes the future
        self._asked = False
        if pending is None:
            self._over.set()

    # --- what torch calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until over, for at most `timeout` if one is given. Raises CommError."""
        limit_s = 0.0 if timeout is None else timeout.total_seconds()
        if not self._over.is_set():
            if limit_s > 0:
                self._wait_within(limit_s)
            elif self._queue is not None:
                self._queue.advance(self)
            else:
                self.end()
                self.complete()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """Completes with the list of results by itself; with the error's text if there is one."""
        with self._lock:
            if self._future is None:
                self._completion = torch.futures.Future()
                # An exception set on a future is, for C++, a value like any other. One that a callback raises
                # is an error for C++ too.
                self._future = self._completion.then(self._outcome)
        if self._over.is_set():
            self.complete()
        else:
            self._ask()
        return self._future

    def is_completed(self) -> bool:
        self._ask()
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    # --- what ends it

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def has_callbacks(self) -> bool:
        return self._completion is not None

    def end(self) -> None:
        """Waits for the communication, unless somebody has. Errors are kept for those who ask."""
        with self._ending:
            if self._over.is_set():
                return
            assert self._pending is not None
            try:
                with torch.inference_mode():  # the tensors may be of that mode, a thread never is
                    self._pending.wait()
            except Exception as error:
                self._error = error
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._pending = None
                self._over.set()

    def drop(self) -> None:
        """Its group is gone before anybody waited for it."""
        with self._ending:
            if not self._over.is_set():
                self._pending = None
                self._error = CommError(
                    f"the process group was destroyed before {self._label} was over",
                    hint="wait for what was started with async_op=True first",
                )
                self._over.set()

    def complete(self) -> None:
        """Completes the future if there is one. Runs its callbacks."""
        with self._lock:
            completion, self._completion = self._completion, None
        if completion is not None:
            completion.set_result(None)

    def _outcome(self, _: Any) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def _wait_within(self, limit_s: float) -> None:
        self._ask()
        if not self._over.wait(limit_s):
            raise CommError(
                f"{self._label} is not over in time",
                given=f"a time limit of {limit_s:g} s",
                hint="look for the rank that is late, or a longer timeout",
            )

    def _ask(self) -> None:
        """A message is nobody's task until its future or state is asked for."""
        if self._queue is not None or self._asked or self._over.is_set():
            return
        self._asked = True
        threading.Thread(target=self._end_and_complete, name="plait-message", daemon=True).start()

    def _end_and_complete(self) -> None:
        self.end()
        self.complete()


class Queue:
    """A group's collectives under way, and the threads that end them.

    See [Note: who waits for a communication].
    """

    def __init__(self, cut: Callable[[], None]) -> None:
        """`cut`: what lets go of the transport once nothing is under way any more."""
        self._cut: Callable[[], None] | None = cut
        self._works: deque[GroupWork] = deque()
        self._turn = threading.Lock()  # held while one is waited for
        self._added = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._num_free = 0  # threads that are not at callbacks
        self._closed = False

    def add(self, work: GroupWork) -> None:
        self._works.append(work)
        self._have_a_thread()
        self._added.release()

    def advance(self, until: GroupWork) -> None:
        """Ends communications in their order, up to this one."""
        while not until.is_over:
            work = self._end_next(until)
            if work is not None:
                work.complete()

    def close(self) -> None:
        """Drops what is under way. One that is just being waited for keeps the transport until it ends."""
        self._closed = True
        self._added.release()  # one thread ends, and wakes the next
        if self._turn.acquire(timeout=CLOSE_S):
            try:
                self._let_go()
            finally:
                self._turn.release()

    def _end_next(self, until: GroupWork | None = None) -> GroupWork | None:
        """The one that it has ended, to be completed without the turn."""
        with self._turn:
            if self._works and (until is None or not until.is_over):
                work = self._works.popleft()
                work.end()
            else:
                work = None
            if self._closed:
                self._let_go()
        return work

    def _let_go(self) -> None:
        while self._works:
            work = self._works.popleft()
            work.drop()
            work.complete()
        cut, self._cut = self._cut, None
        if cut is not None:
            cut()

    def _have_a_thread(self) -> None:
        with self._lock:
            if self._num_free == 0:
                self._num_free = 1
                threading.Thread(target=self._serve, name="plait-backend", daemon=True).start()

    def _serve(self) -> None:
        is_free = True
        while is_free and not self._closed:
            self._added.acquire()
            work = self._end_next()
            if work is not None and work.has_callbacks:
                is_free = self._complete(work)
        if is_free:
            with self._lock:
                self._num_free -= 1
            self._added.release()

    def _complete(self, work: GroupWork) -> bool:
        """Whether the thread is still needed afterwards: not where another has taken over."""
        with self._lock:
            self._num_free -= 1
        if self._works:
            self._have_a_thread()
        work.complete()
        with self._lock:
            is_needed = self._num_free == 0
            self._num_free += is_needed
        return is_needed
