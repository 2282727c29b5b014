"""What ranks tell each other beside their work, through the job's store: under a key, a text.

[Note: a store that does not answer]
The store lives in one process, of another host maybe. A call to it is a message and a reply, without a time
limit: where the network is gone, or that process stopped, the caller would stay for ever, deaf to signals. So
a thread of its own makes the calls, one after the other, and whoever wants to know waits for the thread as
long as ranks wait for each other. Waiting for a key is asking again and again: that somebody has nothing to
say yet has no limit. The thread dies with the process.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from plait.errors import CommError

_Answer = TypeVar("_Answer")
_LOOK_S = 0.005  # from one look to the next at first
_LONGEST_LOOK_S = 0.1


class JobStore:
    """One rank's access. Without a store, of a rank that is alone, it talks to itself."""

    def __init__(self, store: dist.Store | None, rank: int, limit_s: float) -> None:
        self._store = store
        self._rank = rank
        self._limit_s = limit_s
        self._known: dict[str, str] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def tell(self, key: str, text: str) -> None:
        """Lets every rank know, also those that do not ask yet."""
        self._known[key] = text
        if self._store is not None:
            store = self._store
            self._ask(lambda: store.set(key, text))

    def heard(self, key: str) -> str | None:
        """What a rank has told under the key, if one has."""
        if self._store is not None and key not in self._known:
            store = self._store
            text = self._ask(lambda: store.get(key) if store.check([key]) else None)
            if text is not None:
                self._known[key] = text.decode()
        return self._known.get(key)

    def wait_for(self, key: str) -> str:
        """Waits until a rank has told it, without a limit: the launcher ends us if that rank dies."""
        look_s = _LOOK_S
        while (text := self.heard(key)) is None:
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        return text

    def claim(self, key: str) -> bool:
        """True for exactly one of the ranks that ask: the first."""
        if self._store is None:
            return True
        store, mine = self._store, str(self._rank)
        return bool(self._ask(lambda: store.compare_set(key, "", mine)) == mine.encode())

    def close(self) -> None:
        """Lets go of the store."""
        self._store = None
        self._calls.put(None)

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """See [Note: a store that does not answer]. Raises CommError when it does not."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="plait-told", daemon=True)
                self._thread.start()
        answer: Future[_Answer] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(self._limit_s)
        except TimeoutError as error:
            raise CommError(
                "the job's store does not answer",
                given=f"no reply within {self._limit_s:g} s",
                hint="it is with rank 0, or with the first host's torchrun: can that be reached?",
            ) from error
        except dist.DistError as error:
            raise CommError("the job's store is gone", given=str(error).splitlines()[0]) from error

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            del asked, call, answer  # they hold the store
