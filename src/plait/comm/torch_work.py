"""Communications in progress as torch needs them: a Work with a future that completes by itself.

[Note: completion of futures]
A plait Work completes when something waits for it, while torch's own C++ waits for futures: DDP's reducer
would wait forever. So the first of two waits: the caller, in `wait`, or a background thread of the group,
which completes collectives in the order in which they were started. Only the holder of the wait lock waits.

Completing a future runs its callbacks, which may start another communication and wait for its future
(PowerSGD's hook does). A thread therefore releases the wait lock before it completes a future, and while
communications are in progress there is always one thread that is not running callbacks.

Messages have no such order: which of two arrives first depends on the peers. The caller waits for them, and a
separate thread does so only if a future or a time limit is requested.

[Note: threads at the end of Python]
A program that waits for a future continues once it has its value, while the future's thread still runs
callbacks in torch's code and frees the communication. If Python exits then, it ends that thread when it asks
for the interpreter lock, and unwinding torch's C++ frames aborts the process. So exit closes groups first.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.transport import Work
from plait.errors import CommError

CLOSE_S = 5.0  # limit for communications in progress when their group is destroyed, or Python ends
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_queues: "weakref.WeakSet[WorkQueue]" = weakref.WeakSet()


def _start_thread(run: Callable[[], None], name: str) -> None:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)


@atexit.register
def _end_threads() -> None:
    until_s = time.monotonic() + CLOSE_S
    for queue in list(_queues):
        queue.close(max(0.0, until_s - time.monotonic()))
    for thread in list(_threads):
        thread.join(max(0.0, until_s - time.monotonic()))


class GroupWork(dist.Work):
    """A communication: complete, or waited for by `queue` (collectives) or by the caller (messages)."""

    def __init__(
        self,
        label: str,
        results: Sequence[Tensor],
        pending: Work | None = None,
        queue: "WorkQueue | None" = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._label = label
        self._results = list(results)
        self._pending = pending
        self._queue = queue
        self._source = source
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._end_lock = threading.Lock()  # held while waiting for the pending work
        self._lock = threading.Lock()  # held briefly: the future is created and completed once
        self._future: Any = None
        self._completion: Any = None  # what completes the future
        self._has_thread = False
        if pending is None:
            self._done.set()

    # --- called by torch

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done, for at most `timeout` if given. Raises CommError."""
        limit_s = 0.0 if timeout is None else timeout.total_seconds()
        if not self._done.is_set():
            if limit_s > 0:
                self._wait_within(limit_s)
            elif self._queue is not None:
                self._queue.advance(self)
            else:
                self._end_and_complete()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """Return a future that completes by itself, with the list of results or the error's text."""
        with self._lock:
            if self._future is None:
                self._completion = torch.futures.Future()
                # For C++, an exception set on a future is a value like any other; one raised by a callback is
                # an error.
                self._future = self._completion.then(self._outcome)
        if self._done.is_set():
            self.complete()
        else:
            self._ensure_thread()
        return self._future

    def is_completed(self) -> bool:
        self._ensure_thread()
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

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

    # --- completion

    @property
    def has_ended(self) -> bool:
        return self._done.is_set()

    @property
    def has_callbacks(self) -> bool:
        return self._completion is not None

    def end(self) -> None:
        """Wait for the communication, unless that has been done. Errors are kept for `wait`."""
        with self._end_lock:
            if self._done.is_set():
                return
            assert self._pending is not None
            try:
                with torch.inference_mode():  # the tensors may be inference tensors; the mode is per thread
                    self._pending.wait()
            except Exception as error:
                self._error = error
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._pending = None
                self._done.set()

    def drop(self) -> None:
        """Fail it: its group was destroyed before anything waited for it."""
        with self._end_lock:
            if not self._done.is_set():
                self._pending = None
                self._error = CommError(
                    f"the process group was destroyed before {self._label} completed",
                    given="destroy_process_group() before wait()",
                    expected="the reverse",
                    hint="wait for communications started with async_op=True first",
                )
                self._done.set()

    def complete(self) -> None:
        """Complete the future if there is one. Runs its callbacks."""
        with self._lock:
            completion, self._completion = self._completion, None
        if completion is not None:
            completion.set_result(None)

    def _outcome(self, _: Any) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def _wait_within(self, limit_s: float) -> None:
        self._ensure_thread()
        if not self._done.wait(limit_s):
            raise CommError(
                f"{self._label} timed out",
                given=f"a time limit of {limit_s:g} s",
                expected="the same call on all ranks within the limit",
                hint="look for the late rank, or raise the timeout",
            )

    def _ensure_thread(self) -> None:
        """Start a thread for a message when its future or state is requested."""
        if self._queue is not None or self._has_thread or self._done.is_set():
            return
        self._has_thread = True
        _start_thread(self._end_and_complete, "plait-message")

    def _end_and_complete(self) -> None:
        self.end()
        self.complete()


class WorkQueue:
    """A group's collectives in progress, and the threads that complete them.

    See [Note: completion of futures].
    """

    def __init__(self, close_transport: Callable[[], None]) -> None:
        """`close_transport`: called once nothing is in progress any more."""
        self._close_transport: Callable[[], None] | None = close_transport
        self._works: deque[GroupWork] = deque()
        self._wait_lock = threading.Lock()  # held while waiting for one
        self._added = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._num_free = 0  # threads that are not running callbacks
        self._closed = False
        _queues.add(self)

    def add(self, work: GroupWork) -> None:
        self._works.append(work)
        self._ensure_thread()
        self._added.release()

    def advance(self, until: GroupWork) -> None:
        """Complete communications in order, up to and including this one."""
        while not until.has_ended:
            work = self._end_next(until)
            if work is not None:
                work.complete()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Drop what is in progress. A communication being waited for keeps the transport until it ends."""
        self._closed = True
        self._added.release()  # ends one thread, which wakes the next
        if self._wait_lock.acquire(timeout=limit_s):
            try:
                self._drop_all()
            finally:
                self._wait_lock.release()

    def _end_next(self, until: GroupWork | None = None) -> GroupWork | None:
        """Return the communication that it has ended, to be completed without the wait lock."""
        with self._wait_lock:
            if self._works and (until is None or not until.has_ended):
                work = self._works.popleft()
                work.end()
            else:
                work = None
            if self._closed:
                self._drop_all()
        return work

    def _drop_all(self) -> None:
        while self._works:
            work = self._works.popleft()
            work.drop()
            work.complete()
        close_transport, self._close_transport = self._close_transport, None
        if close_transport is not None:
            close_transport()

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._num_free == 0:
                self._num_free = 1
                _start_thread(self._serve, "plait-backend")

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
        """Return whether the thread is still needed afterwards: False if another has taken over."""
        with self._lock:
            self._num_free -= 1
        if self._works:
            self._ensure_thread()
        work.complete()
        with self._lock:
            is_needed = self._num_free == 0
            self._num_free += is_needed
        return is_needed
