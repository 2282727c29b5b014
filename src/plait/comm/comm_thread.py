"""Dependent communications, run concurrently with computation.

[Note: order of submitted functions]
A reduction made of several dependent messages cannot be started and left to the transport: something has to
wait for the first message before it can send the second. On the CPU that is a thread (torch releases the GIL
while it computes and while it waits), on CUDA a stream, where waits are queued as well. Functions run one at
a time in submission order: ranks that submit in one order issue a group's collectives in one order. A caller
that submits functions to a group's thread may issue collectives on that group itself only after it has waited
for all of them.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from plait.comm.stats import WaitClock
from plait.comm.transport import Work
from plait.errors import CommError

_JOIN_S = 2.0  # limit for a function that runs when the world closes: its peers may be gone


class _Task:
    """A submitted function and its outcome."""

    def __init__(self, run: Callable[[], None], on_error: Callable[[BaseException], object] | None) -> None:
        self.run: Callable[[], None] | None = run
        self.on_error = on_error
        self.error: BaseException | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class CommThread:
    """Runs functions one after the other. See [Note: order of submitted functions].

    After one raises, no later one runs: its peers' next message would be matched with a different one of
    ours. Waiting for it, or for a later one, raises its exception.
    """

    def __init__(self, device: torch.device, clock: WaitClock | None = None) -> None:
        """`clock`: counts how long callers wait for functions."""
        self._device = device
        self._clock = clock
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # created with the first function
        self._stream: torch.cuda.Stream | None = None
        self._error: BaseException | None = None

    def submit(
        self, run: Callable[[], None], on_error: Callable[[BaseException], object] | None = None
    ) -> Work:
        """Run `run` soon. Its inputs must be ready, or queued, now. `on_error` is called with the exception
        if `run` raises, or is skipped because of an earlier error: for callers that do not `wait`.

        On CUDA `wait` makes the current stream wait; memory that `run` allocates must not outlive it.
        """
        if self._device.type == "cuda":
            return self._submit_on_stream(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_tasks, name="plait-comm", daemon=True)
            self._thread.start()
        task = _Task(run, on_error)
        self._tasks.put(task)
        work = Work(task.wait, is_done=task.done.is_set)
        return work.timed_by(self._clock, "a communication on the comm thread")

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def close(self) -> None:
        """Drop what has not begun. Nothing may be submitted afterwards."""
        self._error = self._error or CommError("the world was closed during a communication")
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():  # it may free the last group
                self._thread.join(_JOIN_S)

    def _run_tasks(self) -> None:
        with torch.no_grad():
            while (task := self._tasks.get()) is not None:
                try:
                    if self._error is not None:
                        raise self._error
                    assert task.run is not None, "this function has already run"
                    task.run()
                except BaseException as error:  # any exception is raised by `wait`
                    self._error = task.error = error
                    if task.on_error is not None:
                        task.on_error(error)
                task.run = task.on_error = None  # and what they reference
                task.done.set()
                del task  # the next one may be long in coming

    def _submit_on_stream(self, run: Callable[[], None]) -> Work:
        if self._error is not None:
            raise self._error
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            run()
            done = self._stream.record_event()
        return Work(lambda: torch.cuda.current_stream(self._device).wait_event(done), is_done=done.query)
