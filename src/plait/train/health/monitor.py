"""Run the training steps under supervision: hangs, stragglers and loss spikes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from torch import Tensor

from plait.engine.engine import Engine, StepResult
from plait.train.config import RunConfig
from plait.train.health.heartbeat import Heartbeat
from plait.train.health.loss_spikes import LossSpikeGuard
from plait.train.health.stragglers import Stragglers
from plait.train.run_dir import RunDir


class HealthMonitor:
    """Supervises the steps from a start, resume or rollback to the next one. Every rank enters it."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        engine: Engine,
        spikes: LossSpikeGuard,
        log: Callable[[str], object],
    ) -> None:
        """`log`: called on every rank."""
        self._heartbeat = Heartbeat(run.stacks, engine.world, config.hang_s)
        self._stragglers = Stragglers(
            engine.world, engine.plan, config.check_stragglers_every, config.straggler_factor, log
        )
        self._spikes = spikes
        self._checkpoints: Path = run.checkpoints
        self._world = engine.world
        self._log = log
        self._is_first = True

    def __enter__(self) -> "HealthMonitor":
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.__exit__(kind, error, trace)

    def enter(self, phase: str, step: int, *, slow: bool = False) -> None:
        """Record that this rank begins `phase`, after `step` steps. `slow`: may take longer than a step."""
        self._heartbeat.beat(step, phase, slow=slow)

    def step(
        self,
        step: int,
        batches: Iterator[dict[str, Tensor]],
        run_step: Callable[[dict[str, Tensor]], StepResult],
    ) -> StepResult:
        """Run a step on the next batch, after `step` steps."""
        self._stragglers.begin()
        self.enter("reading data", step, slow=self._is_first)
        batch = next(batches)
        self.enter("a step", step, slow=self._is_first)
        result = run_step(batch)
        self._is_first = False
        self._stragglers.end(step + 1)
        return result

    def check_spike(self, step: int, result: StepResult, wait_for_save: Callable[[], None]) -> bool:
        """Return whether the run has to roll back, to `spikes.rollback_to`.

        Raises RunError after too many rollbacks.
        """

        def wait() -> None:
            self.enter("saving", step, slow=True)
            wait_for_save()

        message = self._spikes.observe(
            step,
            result.loss,
            skipped=result.skipped,
            folder=self._checkpoints,
            world=self._world,
            wait=wait,
        )
        if message is not None:
            self._log(message)
        return self._spikes.rollback_to is not None
