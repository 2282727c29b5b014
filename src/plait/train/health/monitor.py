"""What looks at a run's steps while it takes them: for hangs, stragglers and loss spikes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from torch import Tensor

from plait.engine.engine import Engine, StepResult
from plait.train.config import RunConfig
from plait.train.health.heartbeat import Heartbeat
from plait.train.health.loss_spikes import LossSpikeGuard
from plait.train.health.stragglers import Stragglers
from plait.train.run import RunDir


class HealthMonitor:
    """Entered by every rank for the steps from one start, resume or return to the next."""

    def __init__(
        self,
        run: RunDir,
        how: RunConfig,
        engine: Engine,
        spikes: LossSpikeGuard,
        note: Callable[[str], object],
    ) -> None:
        """`note`: told, on every rank."""
        self._heart = Heartbeat(run.stacks, engine.world, how.hang_s)
        self._stragglers = Stragglers(
            engine.world, engine.plan, how.check_stragglers_every, how.straggler_factor, note
        )
        self._spikes = spikes
        self._checkpoints: Path = run.checkpoints
        self._world = engine.world
        self._note = note
        self._is_first = True

    def __enter__(self) -> "HealthMonitor":
        self._heart.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heart.__exit__(kind, error, trace)

    def begins(self, phase: str, step: int, *, slow: bool = False) -> None:
        """What this rank does next, after `step` steps. `slow`: it may take longer than a step."""
        self._heart.beat(step, phase, slow=slow)

    def step(
        self,
        step: int,
        batches: Iterator[dict[str, Tensor]],
        take: Callable[[dict[str, Tensor]], StepResult],
    ) -> StepResult:
        """Takes the next batch's step, after `step` others."""
        self._stragglers.begin()
        self.begins("reading data", step, slow=self._is_first)
        batch = next(batches)
        self.begins("a step", step, slow=self._is_first)
        result = take(batch)
        self._is_first = False
        self._stragglers.end(step + 1)
        return result

    def check_spike(self, step: int, result: StepResult, settle: Callable[[], None]) -> bool:
        """Whether the run has to go back, to `spikes.back_to`. `settle` waits for a save under way. Raises
        RunError when it has too often."""

        def wait() -> None:
            self.begins("saving", step, slow=True)
            settle()

        told = self._spikes.see(
            step,
            result.loss,
            skipped=result.skipped,
            folder=self._checkpoints,
            world=self._world,
            settle=wait,
        )
        if told is not None:
            self._note(told)
        return self._spikes.back_to is not None
