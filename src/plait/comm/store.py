"""A key-value store between the ranks of a job, apart from their collectives.

[Note: unresponsive store]
The store lives in one process, maybe on another host. A call to it is a request and a reply, without a time
limit: if the network or that process is gone, the caller would block forever, deaf to signals. So a daemon
thread makes the calls, one after the other, and callers wait for the thread for at most the timeout of
communications. Waiting for a key is polling: it has no time limit of its own.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from plait.errors import CommError

T = TypeVar("T")
_POLL_S = 0.005  # initial interval
_MAX_POLL_S = 0.1


class JobStore:
    """One rank's access to the store. Without a store (a single rank) it is local. Methods raise CommError
    when the store does not reply."""

    def __init__(self, store: dist.Store | None, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._cache: dict[str, str] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def set(self, key: str, text: str = "") -> None:
        """Set a key for all ranks to read; release those that `wait_for` it."""
        self._cache[key] = text
        if (store := self._store) is not None:
            self._call(lambda: store.set(key, text))

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None if no rank has set it."""
        if (store := self._store) is not None and key not in self._cache:
            text = self._call(lambda: store.get(key) if store.check([key]) else None)
            if text is not None:
                self._cache[key] = text.decode()
        return self._cache.get(key)

    def wait_for(self, key: str) -> str:
        """Block until a rank sets the key, without a time limit: the launcher ends us if that rank dies."""
        poll_s = _POLL_S
        while (text := self.get(key)) is None:
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
        return text

    def claim(self, key: str) -> bool:
        """Return True on exactly one of the calling ranks: the first."""
        if (store := self._store) is None:
            return True
        rank = str(self._rank)
        return bool(self._call(lambda: store.compare_set(key, "", rank)) == rank.encode())

    def close(self) -> None:
        """Drop the store and end the thread."""
        self._store = None
        self._calls.put(None)

    def _call(self, call: Callable[[], T]) -> T:
        """See [Note: unresponsive store]."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="plait-store", daemon=True)
                self._thread.start()
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
            raise CommError("the job's store is gone", given=str(error).splitlines()[0]) from error

    def _serve(self) -> None:
        while (request := self._calls.get()) is not None:
            call, reply = request
            try:
                reply.set_result(call())
            except BaseException as error:
                reply.set_exception(error)
            del request, call, reply  # they reference the store
