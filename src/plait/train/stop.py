"""SIGTERM and Ctrl-C during training: remembered, and read between steps."""

import signal
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """While entered, `asked` is the first of the two signals that came, None before."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.asked is None:
            self.asked = signal.Signals(number)
