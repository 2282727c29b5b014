"""Loss spikes: roll back to an earlier checkpoint, and skip the batches that led to the spike.

PaLM's authors did this by hand (arXiv 2204.02311, section 5.1): restart about 100 steps earlier and skip 200
to 500 batches. They found that spikes come from these batches combined with that state of the weights, not
from the batches alone: after the restart the loss did not spike again.

[Note: definition of a spike]
A finite loss that exceeds the median of the last `spike_window` losses by more than `spike_factor` typical
deviations. The deviation is 1.4826 times the median distance from the median, which equals the standard
deviation for normally distributed losses and is not affected by outliers, but at least a hundredth of the
median, as smaller spikes are not worth a rollback. No step is judged before the window is full. The loss is
bit-identical on all ranks, and so is the decision.

[Note: batch numbering]
A step takes the next batch that is not skipped. Batches are skipped at the step that the run rolls back to,
so that all skipped batches precede the following ones: batch = step + number of batches skipped so far.
Ranges skipped after that checkpoint are contained in the new range, which begins there and ends after the
spike. Checkpoints contain the ranges and the window, and the checkpoint that the run rolls back to is saved
again with them: a run that is killed at any time and resumed takes the same steps as without the kill.
"""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from plait import checkpoint
from plait.checkpoint import step_of
from plait.comm import World, broadcast_text
from plait.engine.engine import StepResult
from plait.errors import RunError
from plait.train.sections import RunConfig

_MAD_TO_STD = 1.4826
_MIN_DEVIATION = 0.01  # of the median


class LossSpikeGuard:
    """Detects loss spikes and tracks skipped batches. Every rank makes the same calls."""

    def __init__(self, config: RunConfig, folder: Path, world: World) -> None:
        """`folder`: of the checkpoints."""
        self._config = config
        self._folder = folder
        self._world = world
        self._recent: deque[float] = deque(maxlen=config.spike_window)
        self._skipped: list[tuple[int, int]] = []  # ranges of batches, end excluded
        self._rollbacks = 0
        self._spike = (0, 0)  # the latest: its number, and the end of the batches to skip
        self.rollback_to: Path | None = None  # the checkpoint to load after a spike

    @property
    def num_skipped(self) -> int:
        """Batches skipped so far: the next batch's number minus its step's."""
        return sum(end - begin for begin, end in self._skipped)

    def observe(self, step: int, result: StepResult, wait: Callable[[], None]) -> str | None:
        """Judge the loss of step number `step`, and return a message to log, if any.

        Sets `rollback_to` if there is a spike and a checkpoint. `wait` waits for a save in progress, which
        may remove one. Raises RunError for one spike too many.
        """
        if not self._config.spike_factor or result.skipped:
            return None
        loss = result.loss
        typical = self._typical()
        if typical is None or loss <= typical[0] + self._config.spike_factor * typical[1]:
            self._recent.append(loss)
            return None
        fact = f"loss spike: {loss:.4g} in step {step}, {typical[0]:.4g} is typical"
        if self._rollbacks >= self._config.max_spikes:
            raise RunError(
                fact,
                given=f"the run has been rolled back {self._rollbacks} times already",
                expected=f"at most run.max_spikes = {self._config.max_spikes} rollbacks",
                hint="a smaller optimizer.lr, a larger run.spike_factor; --resume uses the last save",
            )
        self._spike = (self._rollbacks + 1, step + self.num_skipped + self._config.spike_skip)
        wait()
        self.rollback_to = self._earlier(step - 1 - self._config.spike_window)
        if self.rollback_to is None:
            self._recent.append(loss)
            return f"{fact}; there is no checkpoint to roll back to"
        return f"{fact}; rolling back to {self.rollback_to.name}"

    def skip_batches(self, step: int) -> str:
        """Skip the spike's batches, after `load` of `rollback_to` at `step`. Returns a message to log."""
        assert self.rollback_to is not None, "there was no spike"
        self._rollbacks, end = self._spike
        begin = step + self.num_skipped
        self._skipped.append((begin, end))
        self.rollback_to = None
        return f"rolled back to step {step}, skipping batches {begin} to {end - 1}"

    def facts(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"times": self._rollbacks, "skipped_batches": [*self._skipped], "recent": [*self._recent]}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint's facts; old checkpoints have none."""
        saved = facts.get("spikes", {})
        self._rollbacks = int(saved.get("times", 0))
        self._skipped = [(int(begin), int(end)) for begin, end in saved.get("skipped_batches", [])]
        self._recent = deque(map(float, saved.get("recent", [])), maxlen=self._config.spike_window)

    def _typical(self) -> tuple[float, float] | None:
        """Return median and deviation of the window, once it is full."""
        if len(self._recent) < self._config.spike_window:
            return None
        middle = median(self._recent)
        deviation = _MAD_TO_STD * median(abs(loss - middle) for loss in self._recent)
        return middle, max(deviation, _MIN_DEVIATION * abs(middle))

    def _earlier(self, step: int) -> Path | None:
        """Return the newest checkpoint up to `step`, else the oldest one, as seen by rank 0. Collective."""
        world = self._world
        paths = checkpoint.steps(self._folder) if world.rank == 0 else []
        candidates = [path for path in paths if (step_of(path) or 0) <= step][-1:] or paths[:1]
        chosen = candidates[0].name if candidates else ""
        name = broadcast_text(0, chosen, world.group, world.device)
        return self._folder / name if name else None
