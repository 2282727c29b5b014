"""Combine a step's totals and update the weights, by the engine's ranks or by parameter servers."""

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

from plait.engine.build import EngineParts
from plait.optim.clip import clip_values
from plait.parallel.local_steps import ExchangeResult
from plait.parallel.zero.flat_param import FlatParam
from plait.plan import MemoryUse


class Updater(Protocol):
    """Updates weights from the gradients in the units' `grad_shard`. Implemented by `LocalUpdater`,
    `ServerUpdater` in `server/worker.py`, and `IslandUpdater` in `server/island.py`.

    data_rank, data_ranks   which share of a step's batch this engine computes
    saves                   whether this engine saves the training: of several workers, the first
    """

    data_rank: int
    data_ranks: int
    saves: bool

    def reduce_totals(self, totals: tuple[float, float, float]) -> tuple[float, float, float]:
        """From (summed loss, targets, squared norm of the gradient) of this engine's ranks, return those of
        the step."""

    def apply(self, factor: float, number: int, on_write: Callable[[bool], object]) -> None:
        """Update the weights with gradients multiplied by `factor`. `number`: of the step. Calls
        `on_write(True)` before weights are inconsistent, and `on_write(False)` when they are not any more."""

    def end_step(
        self, num_steps: int, on_write: Callable[[bool], object]
    ) -> tuple[int, ExchangeResult | None]:
        """End step number `num_steps` (from 0), also one without an update, and exchange weights with other
        islands if it is time; return the next step's number. `on_write`: as of `apply`."""

    def pull_state(self) -> None:
        """Make the engine's own weights and optimizer states those of the training."""

    def push_state(self, num_steps: int) -> int:
        """Make the engine's own weights and states, which were loaded or initialized, those of the
        training; return the number of its steps."""

    def memory(self, use: MemoryUse) -> MemoryUse:
        """From the bytes of an engine that updates its own weights, return those of this one."""

    def counts(self) -> dict[str, Any]:
        """Numbers of events on the servers, if there are any."""


class LocalUpdater:
    """Every rank updates its shards, and the ranks gather them."""

    def __init__(
        self, parts: EngineParts, clip_value: float | None, kept_zeros: Set[str] = frozenset()
    ) -> None:
        """`kept_zeros`: names of parameters whose elements that are zero stay zero."""
        self.saves = True
        self.data_rank = parts.context.groups.batch_shares.rank
        self.data_ranks = parts.context.groups.batch_shares.size
        self._parts = parts
        self._clip_value = clip_value
        self._kept_zeros = kept_zeros

    def reduce_totals(self, totals: tuple[float, float, float]) -> tuple[float, float, float]:
        return totals

    def apply(self, factor: float, number: int, on_write: Callable[[bool], object]) -> None:
        optimizer, sharded = self._parts.optimizer, self._parts.sharded
        if self._clip_value is not None:
            clip_values((unit.grad_shard for unit in sharded.trained), factor, self._clip_value)
            factor = 1.0

        zeros = {unit: unit.zeros(self._kept_zeros) for unit in sharded.trained} if self._kept_zeros else {}

        def step(units: Sequence[FlatParam]) -> None:
            if optimizer.is_on_disk:  # a disk may fail between two slices of a unit
                on_write(True)
            optimizer.step(units, factor, number)
            on_write(True)  # until all units are updated
            for unit in units:
                for place, mask in zeros.pop(unit, ()):
                    unit.master[place].masked_fill_(mask, 0)

        for stage in sharded.stages.values():
            stage.begin_update()
        if not optimizer.full.is_empty:
            on_write(True)
            optimizer.step_full(factor, number)
        for stage in sharded.stages.values():
            stage.update(step)
        optimizer.finish()
        optimizer.has_states = True
        on_write(False)

    def end_step(
        self, num_steps: int, on_write: Callable[[bool], object]
    ) -> tuple[int, ExchangeResult | None]:
        num_steps += 1
        outer = self._parts.islands.outer
        if not outer.is_due(num_steps):
            return num_steps, None
        on_write(True)
        result = outer.exchange(num_steps)
        on_write(False)
        return num_steps, result

    def pull_state(self) -> None:
        for stage in self._parts.sharded.stages.values():
            stage.adopt_writes()

    def push_state(self, num_steps: int) -> int:
        return num_steps

    def memory(self, use: MemoryUse) -> MemoryUse:
        return use

    def counts(self) -> dict[str, Any]:
        return {}
