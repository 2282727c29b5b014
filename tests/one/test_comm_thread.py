"""Functions on a background thread: run in order, errors raised where they are awaited."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from plait.comm import CommThread
from plait.errors import CommError

CPU = torch.device("cpu")


def test_functions_run_one_at_a_time_in_their_order() -> None:
    background, seen, running = CommThread(CPU), [], []

    def run(number: int) -> None:
        running.append(number)
        time.sleep(0.001 * (5 - number))
        assert running.pop() == number, "two at a time"
        seen.append(number)

    pendings = [background.submit(lambda number=number: run(number)) for number in range(5)]
    for pending in reversed(pendings):
        pending.wait()
    assert seen == [0, 1, 2, 3, 4]
    background.close()


def test_submitting_a_function_does_not_block() -> None:
    background, go_on = CommThread(CPU), threading.Event()
    pending = background.submit(lambda: _wait(go_on))
    go_on.set()  # if it ran in `submit`, we would not come here
    pending.wait()
    background.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(10), "the event was not set"


def test_an_error_is_the_waiters_and_nothing_runs_after_it() -> None:
    background, seen = CommThread(CPU), []

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    before = background.submit(lambda: seen.append("before"))
    failing, after = background.submit(fail), background.submit(lambda: seen.append("after"))
    before.wait()
    for pending in (after, failing):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            pending.wait()
    assert seen == ["before"]
    background.close()


def test_functions_not_started_when_the_world_closes_are_dropped() -> None:
    background, go_on, seen = CommThread(CPU), threading.Event(), []
    begun = threading.Event()
    running = background.submit(lambda: begun.set() or _wait(go_on))
    dropped = background.submit(lambda: seen.append("ran"))
    assert begun.wait(30)
    closing = threading.Thread(target=background.close)
    closing.start()
    time.sleep(0.05)  # by now it has notified the thread, and waits for the function that runs
    go_on.set()
    closing.join()
    running.wait()
    with pytest.raises(CommError, match="closed"):
        dropped.wait()
    assert seen == []


def test_callbacks_receive_an_error_and_the_functions_it_stopped() -> None:
    background, notified, error = CommThread(CPU), [], ZeroDivisionError("on purpose")

    def fail() -> None:
        raise error

    def tell(name: str) -> Callable[[BaseException], None]:
        return lambda what: notified.append((name, what))

    background.submit(lambda: None, on_error=tell("before"))
    background.submit(fail, on_error=tell("failing"))
    after = background.submit(lambda: None, on_error=tell("after"))
    with pytest.raises(ZeroDivisionError):
        after.wait()
    assert notified == [("failing", error), ("after", error)]
    background.close()
