"""Communications that depend on one another, run beside the computation.

[Note: whose turn it is]
A sum that takes several dependent messages cannot be started and left to the transport: somebody has to wait
for the first before he can make the second. On the CPU that is a thread (torch lets go of the interpreter
while it computes and while it waits), on CUDA a stream, where waiting is queued as well. Functions run in the
order in which they were given, one at a time: ranks that give them in one order call the verbs of a group in
one order. Whoever gives functions to a group's background calls the group's verbs himself only when all of
them have been waited for.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from plait.comm.stats import WaitClock
from plait.comm.transport import Work
from plait.errors import CommError

_END_S = 2.0  # what a function that is running when the world closes gets to end: its peers may be gone


class _Task:
    """A function that was given, and what came of it."""

    def __init__(self, run: Callable[[], None], failed: Callable[[BaseException], object] | None) -> None:
        self.run: Callable[[], None] | None = run
        self.failed = failed
        self.error: BaseException | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class CommThread:
    """Runs functions one after the other. See [Note: whose turn it is].

    One that raises is the last to run: its peers' next message would meet another one of ours. Whoever waits
    for it, or for a later one, gets its exception.
    """

    def __init__(self, device: torch.device, clock: WaitClock | None = None) -> None:
        """`clock`: counts how long its functions are waited for."""
        self._device = device
        self._clock = clock
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # from the first function on
        self._stream: torch.cuda.Stream | None = None
        self._error: BaseException | None = None

    def submit(
        self, run: Callable[[], None], failed: Callable[[BaseException], object] | None = None
    ) -> Work:
        """Has `run` called soon. What it reads is ready by then if it is, or is queued, now. `failed`: called
        with the exception, for those who do not wait here, if `run` raises it or is not run because of it.

        On CUDA `wait` makes the current stream wait; memory that `run` takes must not outlive it.
        """
        if self._device.type == "cuda":
            return self._queue(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="plait-background", daemon=True)
            self._thread.start()
        task = _Task(run, failed)
        self._tasks.put(task)
        pending = Work(task.wait, is_done=task.done.is_set)
        return pending.by(self._clock, "a communication in the background")

    def close(self) -> None:
        """Drops what has not begun. Nothing may be given afterwards."""
        self._error = self._error or CommError("the world was closed under a communication")
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():  # which may have held the last of a group
                self._thread.join(_END_S)

    def _work(self) -> None:
        with torch.no_grad():
            while (task := self._tasks.get()) is not None:
                try:
                    if self._error is not None:
                        raise self._error
                    assert task.run is not None, "a function that has run already"
                    task.run()
                except BaseException as error:  # whatever it is, it is for the one who waits
                    self._error = task.error = error
                    if task.failed is not None:
                        task.failed(error)
                task.run = task.failed = None  # and what they hold
                task.done.set()
                del task  # it may be long until the next

    def _queue(self, run: Callable[[], None]) -> Work:
        if self._error is not None:
            raise self._error
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            run()
            done = self._stream.record_event()
        return Work(lambda: torch.cuda.current_stream(self._device).wait_event(done), is_done=done.query)
