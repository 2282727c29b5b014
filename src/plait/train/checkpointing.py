"""The checkpoints of a run: when they are saved, and how failed saves are handled.

[Note: failed saves]
A failed save leaves earlier checkpoints and the training state intact, so it is logged as a warning, and the
next save tries again: the disk may have space by then. After run.max_failed_saves failures in a row the run
ends with the last one's error; with 1, after the first. The last save of a run, at its end or after a signal
to stop, is waited for, and its failure is always an error.

[Note: end of a background save]
Rank 0 assembles the checkpoint from what all ranks have written, and polls whether its thread has finished.
The exchange of flags after a step shares this with the other ranks. Then all ranks call the Saver together,
which returns or raises the same on all of them.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint import Keep, Saver, staged_bytes
from plait.comm import World
from plait.errors import CheckpointError, CommError, PlaitError
from plait.parallel.zero.state_io import StateShard
from plait.train.metrics import Metrics
from plait.train.sections import RunConfig


class Checkpointing:
    """Save checkpoints, with the same calls on every rank: `with Checkpointing(...) as saving`.

    If an error ends the block, the save in progress is finished first, unless a rank was lost.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        world: World,
        metrics: Metrics,
        on_save: Callable[[int], object] = lambda _: None,
    ) -> None:
        """`on_save`: called with the step of each checkpoint that is complete, on every rank."""
        keep = Keep(config.keep_last, config.keep_every, config.keep_best)
        self._saver = Saver(folder, world, keep=keep, background=config.save_in_background)
        self._config = config
        self._metrics, self._on_save = metrics, on_save
        self._by_clock = world.rank == 0 and config.checkpoint_minutes > 0
        self._last_save_s = time.monotonic()
        self._in_progress: tuple[int, float] | None = None  # the save's step, and how long the step waited
        self._failed = 0  # in a row

    def __enter__(self) -> "Checkpointing":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PlaitError) and not isinstance(error, CommError):
            with contextlib.suppress(PlaitError):  # the error that ended the block is more useful
                self._saver.finish()

    def reserve(self, kept: Sequence[StateShard]) -> None:
        """Allocate the memory of background saves, so that the first one takes no longer than the others."""
        if self._config.save_in_background:
            self._saver.preallocate(staged_bytes(kept))

    @property
    def is_due(self) -> bool:
        """True if a save is due by rank 0's clock (run.checkpoint_minutes); False on other ranks."""
        return self._by_clock and time.monotonic() - self._last_save_s >= 60 * self._config.checkpoint_minutes

    @property
    def has_ended(self) -> bool:
        """True if the save in progress has finished, as far as this rank can see."""
        return self._saver.has_ended

    def save(
        self,
        step: int,
        kept: Sequence[StateShard],
        facts: Mapping[str, Any],
        *,
        score: float | None,
        last: bool,
        update_after: Callable[[torch.cuda.Event], object] | None = None,
    ) -> None:
        """Save the state after `step` steps.

        `score` is its validation loss, if evaluated; `last` means that no other save follows; `update_after`
        as of `Saver.save`. Raises CheckpointError on all ranks, see [Note: failed saves].
        """
        start_s = time.perf_counter()
        self.wait(may_raise=not last)
        try:
            finite = score if score is not None and math.isfinite(score) else None
            self._saver.save(step, kept, facts, score=finite, update_after=update_after)
            if last:
                self._saver.finish()
        except CheckpointError as error:
            if last:
                raise
            self._record_failure(step, error)
        else:
            self._in_progress = (step, time.perf_counter() - start_s)
        self._last_save_s = time.monotonic()
        if last or not self._config.save_in_background:
            self.wait()

    def wait(self, *, may_raise: bool = True) -> None:
        """Wait for the save in progress, if any, and log its result."""
        if self._in_progress is None:
            return
        (step, pause_s), self._in_progress = self._in_progress, None
        try:
            self._saver.finish()
        except CheckpointError as error:
            self._record_failure(step, error, may_raise=may_raise)
            return
        self._failed = 0
        how = "in the background, training paused for" if self._config.save_in_background else "in"
        self._metrics.saved(step, pause_s, f"saved step {step} {how} {pause_s:.2f} s")
        self._on_save(step)

    def _record_failure(self, step: int, error: CheckpointError, *, may_raise: bool = True) -> None:
        self._failed += 1
        if may_raise and self._failed >= self._config.max_failed_saves:
            raise error
        count = f"failure {self._failed} in a row, {self._config.max_failed_saves} end the run"
        self._metrics.warn(step, f"step {step} is not saved: {error.fact}: {error.given} ({count})")
