"""A run's saves: when, and what becomes of those that fail.

[Note: saves that fail]
A save that fails leaves the earlier checkpoints as they were and takes nothing from training, so it is a
warning, and the next one that is due tries again: a disk may have room by then. After run.max_failed_saves of
them in a row the run ends with the last one's letter; with 1 at the first. The last save of a run, at its end
or when it is told to stop, is waited for, and if it fails that is an error whatever came before.

[Note: who knows that a save has ended]
In the background nobody learns by waiting. The first rank, which makes the checkpoint of what all have
written, looks whether its thread has ended; the exchange of flags after a step tells the others; then all of
them ask the Saver together, which tells all the same, failed or not.
"""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.checkpoint import Keep, Saver, staged_bytes
from plait.comm import World
from plait.errors import CheckpointError, CommError, PlaitError
from plait.parallel import StateShard
from plait.train.config import RunConfig
from plait.train.metrics import Metrics


class Checkpointing:
    """Save checkpoints on every rank alike: `with Checkpointing(...) as saving`.

    If the block is left by an error that is not a lost rank, the save in progress is finished first.
    """

    def __init__(self, how: RunConfig, folder: Path, world: World, metrics: Metrics) -> None:
        keep = Keep(how.keep_last, how.keep_every, how.keep_best)
        self._saver = Saver(folder, world, keep=keep, background=how.save_in_background)
        self._how = how
        self._metrics = metrics
        self._by_clock = world.rank == 0 and how.checkpoint_minutes > 0
        self._last_s = time.monotonic()  # when the last save was
        self._under_way: tuple[int, float] | None = None  # its step, and how long that waited
        self._failed = 0  # in a row

    def __enter__(self) -> "Checkpointing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PlaitError) and not isinstance(error, CommError):
            with contextlib.suppress(PlaitError):  # the letter on its way says more
                self._saver.finish()

    def expect(self, kept: Sequence[StateShard]) -> None:
        """Takes the memory for saves of as much in the background, so that the first one waits no longer."""
        if self._how.save_in_background:
            self._saver.preallocate(staged_bytes(kept))

    @property
    def is_late(self) -> bool:
        """Whether it is time to save by rank 0's clock; on the other ranks False."""
        return self._by_clock and time.monotonic() - self._last_s >= 60 * self._how.checkpoint_minutes

    @property
    def has_ended(self) -> bool:
        """Whether the save under way has, as far as this rank knows."""
        return self._saver.has_ended

    def save(
        self,
        step: int,
        kept: Sequence[StateShard],
        facts: Mapping[str, Any],
        *,
        score: float | None,
        last: bool,
    ) -> None:
        """Saves the state after `step` steps. `score`: its validation loss, where there is one. `last`: no
        other save follows. Raises CheckpointError on all ranks, see [Note: saves that fail]."""
        began_s = time.perf_counter()
        self.settle(may_raise=not last)
        try:
            finite = score if score is not None and math.isfinite(score) else None
            self._saver.save(step, kept, facts, score=finite)
            if last:
                self._saver.finish()
        except CheckpointError as error:
            if last:
                raise
            self._note_failure(step, error)
        else:
            self._under_way = (step, time.perf_counter() - began_s)
        self._last_s = time.monotonic()
        if last or not self._how.save_in_background:
            self.settle()

    def settle(self, *, may_raise: bool = True) -> None:
        """Waits for the save under way, if there is one, and says what came of it."""
        if self._under_way is None:
            return
        (step, pause_s), self._under_way = self._under_way, None
        try:
            self._saver.finish()
        except CheckpointError as error:
            self._note_failure(step, error, may_raise=may_raise)
            return
        self._failed = 0
        how = "behind the steps, which waited" if self._how.save_in_background else "in"
        self._metrics.saved(step, pause_s, f"saved step {step} {how} {pause_s:.2f} s")

    def _note_failure(self, step: int, error: CheckpointError, *, may_raise: bool = True) -> None:
        self._failed += 1
        if may_raise and self._failed >= self._how.max_failed_saves:
            raise error
        of = f"{self._failed} of {self._how.max_failed_saves} in a row that may"
        self._metrics.warn(step, f"step {step} is not saved: {error.fact}: {error.given} ({of})")
