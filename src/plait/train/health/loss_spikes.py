"""Loss spikes: the run goes back to a checkpoint from before, and on without the batches that led there.

What PaLM's authors did by hand (arXiv 2204.02311, section 5.1): about 100 steps back, 200 to 500 batches
skipped. They found that it is these batches together with that state of the weights that spikes, not the
batches alone: after it, the loss did not spike again.

[Note: what a spike is]
A finite loss that lies above the median of the last `spike_window` by more than `spike_factor` times their
usual spread: 1.4826 times the median distance from the median, which is the standard deviation where losses
are normal and is not moved by outliers, and at least a hundredth of the median, below which nobody would go
back. No step is judged before the window is full. The loss is the same bits on every rank, and so is the
judgement.

[Note: which batch is whose]
A step takes the next batch that is not skipped. Batches are skipped where the run goes back to, so that
they all lie before what comes next: batch = step + number of batches skipped so far. Ranges skipped after
that checkpoint lie within the new range, which begins there and ends beyond the spike. Checkpoints keep
ranges and window, and the one that the run goes back to is saved again with them: a run that is killed at
any time and resumed takes the steps that it would have taken.
"""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from plait import checkpoint
from plait.checkpoint import step_of
from plait.comm import World, broadcast
from plait.errors import RunError
from plait.train.config import RunConfig

_NORMAL = 1.4826
_LEAST = 0.01


class LossSpikeGuard:
    """Judges losses, and knows which batches are skipped. Every rank calls it alike."""

    def __init__(self, how: RunConfig) -> None:
        self._how = how
        self._recent: deque[float] = deque(maxlen=how.spike_window)
        self._skipped: list[tuple[int, int]] = []  # ranges of batches, the last one excluded
        self._times = 0  # that the run went back
        self._spike = (0, 0)  # with the last one, the times; the end of the batches to skip
        self.back_to: Path | None = None  # the checkpoint to go back to, once there is a spike

    @property
    def num_skipped(self) -> int:
        """Batches: what the next one's number is ahead of its step's."""
        return sum(end - begin for begin, end in self._skipped)

    def see(
        self, step: int, loss: float, *, skipped: bool, folder: Path, world: World, settle: Callable[[], None]
    ) -> str | None:
        """Of the step with which `step` are done; what is to be told of it. `folder`: of the checkpoints;
        `settle` waits for a save under way, which may remove one.

        Sets `back_to` when there is a spike, and a checkpoint. Raises RunError for one too many.
        """
        if not self._how.spike_factor or skipped:
            return None
        usual = self._usual()
        if usual is None or loss <= usual[0] + self._how.spike_factor * usual[1]:
            self._recent.append(loss)
            return None
        fact = f"the loss has spiked: {loss:.4g} in step {step}, where {usual[0]:.4g} is usual"
        if self._times >= self._how.max_spikes:
            raise RunError(
                fact,
                given=f"the run has gone back {self._times} times already",
                expected=f"at most run.max_spikes = {self._how.max_spikes} times",
                hint="a smaller optimizer.lr, a larger run.spike_factor; --resume goes on from the last save",
            )
        self._spike = (self._times + 1, step + self.num_skipped + self._how.spike_skip)
        settle()
        self.back_to = self._earlier(folder, step - 1 - self._how.spike_window, world)
        if self.back_to is None:
            self._recent.append(loss)
            return f"{fact}; there is no checkpoint to go back to"
        return f"{fact}; back to {self.back_to.name}"

    def skip(self, step: int) -> str:
        """After `load`: the run is back at `back_to`, after `step` steps. What is to be told."""
        assert self.back_to is not None, "there was no spike"
        self._times, end = self._spike
        begin = step + self.num_skipped
        self._skipped.append((begin, end))
        self.back_to = None
        return f"back at step {step}, and on without batches {begin} to {end - 1}"

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"times": self._times, "skipped_batches": [*self._skipped], "recent": [*self._recent]}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Of a checkpoint; one of before there were any has none."""
        found = facts.get("spikes", {})
        self._times = int(found.get("times", 0))
        self._skipped = [(int(begin), int(end)) for begin, end in found.get("skipped_batches", [])]
        self._recent = deque(map(float, found.get("recent", [])), maxlen=self._how.spike_window)

    def _usual(self) -> tuple[float, float] | None:
        """Median and spread of the window, once it is full."""
        if len(self._recent) < self._how.spike_window:
            return None
        middle = median(self._recent)
        spread = _NORMAL * median(abs(loss - middle) for loss in self._recent)
        return middle, max(spread, _LEAST * abs(middle))

    def _earlier(self, folder: Path, step: int, world: World) -> Path | None:
        """The newest checkpoint of at most `step`, else the oldest; as the first rank sees it."""
        found = checkpoint.steps(folder) if world.rank == 0 else []
        good = [path for path in found if (step_of(path) or 0) <= step][-1:] or found[:1]
        chosen = torch.tensor([step_of(good[0]) if good else -1], device=world.device)
        broadcast(chosen, world.group)
        number = int(chosen.item())
        return None if number < 0 else checkpoint.step_path(folder, number)
