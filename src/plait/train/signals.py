"""Signals during training, remembered and read between steps: SIGTERM and Ctrl-C end it, SIGUSR1 saves."""

import signal
from types import FrameType, TracebackType
from typing import Any

SAVE = signal.SIGUSR1


class SignalHandler:
    """While entered, `asked` is the first signal to end that came, None before; `save_requested` is True from a
    SIGUSR1 until it is answered, by setting it to False."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.save_requested = False
        self._before: dict[signal.Signals, Any] = {}
        self._blocked: set[signal.Signals | int] = set()

    def __enter__(self) -> "SignalHandler":
        for number in (signal.SIGTERM, signal.SIGINT, SAVE):
            self._before[number] = signal.signal(number, self._remember)
        # ranks begin with it blocked, see the note in plait/comm/launch.py
        self._blocked = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == SAVE:
            self.save_requested = True
        elif self.asked is None:
            self.asked = signal.Signals(number)
