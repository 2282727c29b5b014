"""A key-value store between the ranks of a job, apart from their collectives.

[Note: unresponsive store]
The store lives in one process, maybe on another host. A call to it is a request and a reply, without a time
limit: if the network or that process is gone, the caller would block forever, and could not handle signals.
So a daemon thread makes the calls, one after the other, and callers wait for the thread for at most the
timeout of communications.

[Note: lost ranks]
A rank that waits for another rank's key cannot tell whether that rank is slow, dead or stopped, and work such
as a save or an export may take longer than any timeout. So the thread of every rank writes a growing count to
the store, several times within the timeout, whatever the rank itself does. A rank is lost if its count does
not change for the timeout, or, on one host, as soon as its file lock is free (`is_gone`). Time in which the
waiting process did not run is not included: a job that was suspended continues.

[Note: end of the store]
Without torchrun or our launcher the store is a server in rank 0's process. If that process ended first, the
others would lose values that they still wait for, such as the result of the last save. So every rank records
that it leaves, and the server's rank waits for the others, for a limited time: a rank that has crashed
records nothing.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from plait.errors import CommError

T = TypeVar("T")
_POLL_S = 0.005  # initial interval
_MAX_POLL_S = 0.1
_COUNTS = 8  # written within the timeout
_MAX_COUNT_S = 60.0  # between two counts
_LEAVE_S = 10.0  # limit of the server's wait for the others to leave
_END_S = 1.0  # limit of the wait for the thread at the end; only a call without a reply needs all of it


class JobStore:
    """One rank's access to the store. Without a store (a single rank) it is local. Methods raise CommError
    when the store does not reply.

    is_gone  whether a rank is known to have ended or left; set by the world that can tell
    """

    def __init__(
        self, store: dist.Store | None, rank: int, timeout_s: float, clients: Collection[int] = ()
    ) -> None:
        """`clients`: other ranks whose store is a server in this process."""
        self.is_gone: Callable[[int], bool] = lambda _: False
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._clients = clients
        self._count_s = min(timeout_s / _COUNTS, _MAX_COUNT_S)
        self._cache: dict[str, str] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(
                target=self._serve, args=(store,), name="plait-store", daemon=True
            )
            self._thread.start()

    def set(self, key: str, text: str = "") -> None:
        """Set a key for all ranks to read; release those that `wait_for` it."""
        self._cache[key] = text
        if (store := self._store) is not None:
            self._call(lambda: store.set(key, text))

    def get(self, key: str) -> str | None:
        """Return the value of a key that is set once, or None if no rank has set it."""
        if key not in self._cache and (text := self.read(key)) is not None:
            self._cache[key] = text
        return self._cache.get(key)

    def wait_for(self, key: str, rank: int = 0) -> str:
        """Block until `rank` sets the key. Raises CommError if that rank is lost; there is no other limit."""
        return self.wait_until(lambda: self.get(key), rank)

    def wait_until(self, read: Callable[[], T | None], rank: int) -> T:
        """Block until `read` returns a value, which `rank` provides. Raises CommError if that rank is lost:
        see [Note: lost ranks]."""
        watch, poll_s = _Watch(self, rank), _POLL_S
        while True:
            loss = watch.loss()  # before `read`: the rank may end after it has done its work
            if (found := read()) is not None:
                return found
            if loss is not None:
                raise loss
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)

    def claim(self, key: str, value: str | None = None) -> bool:
        """Return True on the first rank that calls it, else False. The key's value is that rank, or what it
        has given."""
        if (store := self._store) is None:
            return True
        text = str(self._rank) if value is None else value
        return bool(self._call(lambda: store.compare_set(key, "", text)) == text.encode())

    def count(self, key: str) -> int:
        """Return how often ranks have called it before, with this key."""
        store = self._store
        assert store is not None, "a count needs a store"
        return int(self._call(lambda: store.add(key, 1))) - 1

    def close(self) -> None:
        """Drop the store and end the thread. See [Note: end of the store]."""
        if self._store is not None:
            self._leave()
        self._store = None
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _leave(self) -> None:
        until_s = time.monotonic() + _LEAVE_S
        with contextlib.suppress(CommError):  # the store is gone already
            self.set(_left_key(self._rank))
            for rank in self._clients:
                while self.get(_left_key(rank)) is None and not self.is_gone(rank):
                    if time.monotonic() > until_s:
                        return
                    time.sleep(_POLL_S)

    def read(self, key: str) -> str | None:
        """Return the present value of a key that is set more than once."""
        if (store := self._store) is None:
            return None
        text = self._call(lambda: store.get(key) if store.check([key]) else None)
        return None if text is None else text.decode()

    def _call(self, call: Callable[[], T]) -> T:
        """See [Note: unresponsive store]."""
        reply: Future[T] = Future()
        self._calls.put((call, reply))
        try:
            return reply.result(self._timeout_s)
        except TimeoutError as error:
            raise CommError(
                "the job's store does not answer",
                given=f"no reply within {self._timeout_s:g} s",
                hint="the store runs on rank 0, or in the first host's torchrun: check that it is reachable",
            ) from error
        except dist.DistError as error:
            raise CommError(
                "the job's store is gone",
                given=str(error).splitlines()[0],
                expected="a rank 0 that runs until all have left",
                hint="look for the first rank that ended: its error is the cause",
            ) from error

    def _serve(self, store: dist.Store) -> None:
        """Make the calls, and count: see [Note: lost ranks]."""
        count, count_at_s = 0, time.monotonic()
        while True:
            if time.monotonic() >= count_at_s:
                with contextlib.suppress(dist.DistError, RuntimeError):  # the next call raises it
                    store.set(_count_key(self._rank), str(count))
                count, count_at_s = count + 1, time.monotonic() + self._count_s
            with contextlib.suppress(queue.Empty):
                request = self._calls.get(timeout=max(0.0, count_at_s - time.monotonic()))
                if request is None:
                    return
                call, reply = request
                try:
                    reply.set_result(call())
                except BaseException as error:
                    reply.set_exception(error)
                del request, call, reply  # they reference the store


class _Watch:
    """Observes whether a rank is lost. See [Note: lost ranks]."""

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count: str | None = None
        self._silent_s = 0.0
        self._read_s = time.monotonic()

    def loss(self) -> CommError | None:
        """Return the error if the rank is lost."""
        store = self._store
        if store.is_gone(self._rank):
            return CommError(
                f"rank {self._rank} is gone",
                given=f"rank {store._rank} waits for it",
                hint="look for the first rank that ended: its error is the cause",
            )
        since_s = time.monotonic() - self._read_s
        if since_s < store._count_s:
            return None
        self._read_s += since_s
        count = store.read(_count_key(self._rank))
        self._silent_s = self._silent_s + min(since_s, 2 * store._count_s) if count == self._count else 0.0
        self._count = count
        if self._silent_s < store._timeout_s:
            return None
        return CommError(
            f"rank {self._rank} does not respond",
            given=f"no new count from it for {store._timeout_s:g} s, and rank {store._rank} waits for it",
            expected="a running process",
            hint="check whether it was stopped or killed, and whether its host is reachable",
        )


def _left_key(rank: int) -> str:
    return f"rank {rank} has left"


def _count_key(rank: int) -> str:
    return f"rank {rank} counts"
