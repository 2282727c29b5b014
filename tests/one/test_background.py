"""What runs beside the computation: in order, and its errors where it is waited for."""

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


def test_a_function_does_not_hold_up_the_one_who_gives_it() -> None:
    background, go_on = CommThread(CPU), threading.Event()
    pending = background.submit(lambda: _wait(go_on))
    go_on.set()  # if it ran in `submit`, we would not come here
    pending.wait()
    background.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(10), "nobody let us go on"


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


def test_what_has_not_begun_when_the_world_closes_is_dropped() -> None:
    background, go_on, seen = CommThread(CPU), threading.Event(), []
    begun = threading.Event()
    running = background.submit(lambda: begun.set() or _wait(go_on))
    dropped = background.submit(lambda: seen.append("ran"))
    assert begun.wait(30)
    closing = threading.Thread(target=background.close)
    closing.start()
    time.sleep(0.05)  # it has told the thread by now, and waits for what is running
    go_on.set()
    closing.join()
    running.wait()
    with pytest.raises(CommError, match="closed"):
        dropped.wait()
    assert seen == []


def test_those_who_do_not_wait_are_told_of_an_error_and_of_what_it_stopped() -> None:
    background, told, error = CommThread(CPU), [], ZeroDivisionError("on purpose")

    def fail() -> None:
        raise error

    def tell(name: str) -> Callable[[BaseException], None]:
        return lambda what: told.append((name, what))

    background.submit(lambda: None, on_error=tell("before"))
    background.submit(fail, on_error=tell("failing"))
    after = background.submit(lambda: None, on_error=tell("after"))
    with pytest.raises(ZeroDivisionError):
        after.wait()
    assert told == [("failing", error), ("after", error)]
    background.close()
