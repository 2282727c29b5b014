"""A trace of some of a run's steps, once things run as they will."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from plait.engine import Engine, StepResult

_FIRST, _LAST = 3, 5  # of the steps of a run, which is from a start or a resume


class Traced:
    """Takes an engine's steps, and records the third to the fifth of them, or what there is of those."""

    def __init__(
        self,
        engine: Engine,
        take: Callable[[dict[str, Tensor]], StepResult],
        path: Path | None,
        steps: range,
        note: Callable[[str], object],
    ) -> None:
        """`take`: a step of the engine. `path`: None, no trace. `steps`: of the run, what is left of them.
        `note`: told, on every rank."""
        self._engine = engine
        self._take = take
        self._path = path if steps else None
        self._first = min(_FIRST, len(steps))
        self._last = min(_LAST, len(steps))
        self._note = note
        self._done = 0

    def step(self, batch: dict[str, Tensor]) -> StepResult:
        """Takes a step. Raises RunError if the trace cannot be written, after that step."""
        self._done += 1
        if self._path is not None and self._done == self._first:
            self._engine.start_trace()
        result = self._take(batch)
        if self._done == self._last:
            self.end()
        return result

    def end(self) -> None:
        """Writes what there is. Every rank calls it at the same step."""
        path, self._path = self._path, None
        if path is not None and self._done >= self._first:
            self._engine.write_trace(path)
            self._note(f"trace of {self._done - self._first + 1} steps: plait schedule --trace {path}")
