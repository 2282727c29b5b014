"""Signals during training, recorded and handled between steps: SIGTERM and Ctrl-C stop, SIGUSR1 saves.

Schedulers repeat SIGTERM. After one of these has stopped the run, further ones are ignored until the process
ends: it has saved, and its exit code tells the scheduler so.
"""

import signal
from types import FrameType
from typing import Any

SAVE = signal.SIGUSR1


class SignalHandler:
    """Records signals while entered.

    stop_signal     the first SIGTERM or SIGINT, None before
    save_requested  True after a SIGUSR1, until the caller resets it
    """

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None
        self.save_requested = False
        self._previous: dict[signal.Signals, Any] = {}
        self._blocked: set[signal.Signals | int] = set()

    def __enter__(self) -> "SignalHandler":
        for number in (signal.SIGTERM, signal.SIGINT, SAVE):
            self._previous[number] = signal.signal(number, self._record)
        # ranks start with it blocked, see the note in plait/comm/launch.py
        self._blocked = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE}))
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._previous.items():
            is_repeated = self.stop_signal is not None and number != SAVE
            signal.signal(number, signal.SIG_IGN if is_repeated else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == SAVE:
            self.save_requested = True
        elif self.stop_signal is None:
            self.stop_signal = signal.Signals(number)
