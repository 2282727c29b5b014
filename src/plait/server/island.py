"""A worker that is an island of one rank: it trains alone for some steps, then pushes its change.

[Note: islands on servers]
Each island steps its own inner optimizer. After every H-th step it pushes the negative change of its weights
since its last pull: the gradient of the outer optimizer, SGD, which the servers run (DiLoCo, Douillard et al.
2311.08105). Then it continues from the weights that it pulls. To the servers this is a step of a worker: one
clock is H steps of an island. So islands die, join and are replaced by clocks, decisions and updates that are
applied once. See [Note: clocks and steps] in `clocks.py`.

[Note: weight of a change]
Under `all` and `backup`, one outer step takes the mean change of the workers that were taken: of the living.
Under `async` and `stale`, each change is an outer step by itself, with weight 1 / w if w workers are present.
All of a round together then move the weights as far as one step along their mean does: with weight 1 the
outer learning rate would be w times as high. Liu et al. (2401.09135, section 5) weight changes alike. They
find that momentum makes stale changes worse, and apply it once for w changes; here it is the user's choice.

[Note: weights between a pull and a push]
`OuterShard.weights` is what was pulled last, from which the change is measured. When other workers have moved
the servers' weights since (`async`, `stale`, `backup`), a copy for a checkpoint is newer. The island then
takes over their part as well: its change stays what it was, and the checkpoint is of one state.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.comm.shm.arena import Arena
from plait.engine.build import EngineParts
from plait.engine.spec import TrainingSpec
from plait.engine.update import LocalUpdater
from plait.errors import RunError
from plait.optim.clip import squared_norm
from plait.parallel.local_steps import ExchangeResult
from plait.parallel.zero.flat_param import FlatParam
from plait.plan import MemoryUse
from plait.server.protocol import Chunk
from plait.server.worker import Servers, ServerUpdater


class IslandUpdater:
    """Updates weights by the inner optimizer, and exchanges them with the servers. See [Note: islands on
    servers]."""

    def __init__(self, parts: EngineParts, spec: TrainingSpec, servers: Servers, arena: Arena | None) -> None:
        """Join the job. Raises ModelError if the servers have another model."""
        self.data_rank, self.data_ranks = servers.worker, spec.job.dp
        self.saves = servers.worker == 0
        parts.islands.island = servers.worker
        self._steps = spec.job.local_steps
        self._stages = parts.sharded.stages.values()
        self._shards = parts.islands.outer.shards
        self._inner = LocalUpdater(parts, spec.given.clip_value)
        self._servers = ServerUpdater(parts, spec.job, servers, arena, ServedOuter(parts))
        self.counts = self._servers.counts

    def reduce_totals(self, totals: tuple[float, float, float]) -> tuple[float, float, float]:
        self._servers.begin_training()
        return totals

    def apply(self, factor: float, number: int, on_write: Callable[[bool], object]) -> None:
        self._inner.apply(factor, number, on_write)

    def end_step(
        self, num_steps: int, on_write: Callable[[bool], object]
    ) -> tuple[int, ExchangeResult | None]:
        num_steps += 1
        if num_steps % self._steps:
            return num_steps, None
        on_write(True)
        squares = self._push()
        distances, num_islands, square_sum = self._servers.reduce_totals((squares, 1.0, squares))
        self._servers.apply(self._servers.share, num_steps, on_write)
        on_write(True)
        clock, _ = self._servers.end_step(num_steps, on_write)
        self._continue()
        on_write(False)
        if not self._servers.has_mean:
            return clock * self._steps, None
        change = square_sum / num_islands  # w times the squared mean
        drift = (max(distances - change, 0.0) / change) ** 0.5 if change else 0.0
        return clock * self._steps, ExchangeResult(0, drift)

    def _push(self) -> float:
        """Push this island's change; return its squared norm. Raises RunError if it is not finite, before it
        is committed: it is never applied."""
        for stage in self._stages:
            stage.unsharder.wait_for_readers()
        for shard in self._shards:
            torch.sub(shard.weights, shard.unit.master, out=shard.unit.grad_shard)
        self._servers.push_all()
        squares = sum(float(squared_norm(shard.unit.grad_shard)) for shard in self._shards)
        if not squares < float("inf"):
            raise RunError(
                "the weights of an island are not finite",
                given=f"island {self.data_rank}, after {self._steps} steps of its own",
                expected="finite weights",
                hint="a smaller learning rate, of the optimizer or of outer=nesterov:LR:MOMENTUM; --resume",
            )
        return squares

    def _continue(self) -> None:
        """Continue from the global weights."""
        for shard in self._shards:
            shard.unit.master.copy_(shard.weights)
        for stage in self._stages:
            stage.sync_params()

    def pull_state(self) -> None:
        self._servers.pull_state()
        for stage in self._stages:
            stage.sync_params()

    def push_state(self, num_steps: int) -> int:
        clock = self._servers.push_state(num_steps // self._steps)
        if self.data_rank == 0:
            return num_steps
        self._continue()
        return clock * self._steps

    def memory(self, use: MemoryUse) -> MemoryUse:
        outer = sum(shard.weights.nbytes for shard in self._shards)
        residuals = self._servers.residual_bytes
        return replace(use, optimizer=use.optimizer + outer, gradients=use.gradients + residuals)


class ServedOuter:
    """Global weights, and the outer momentum for a checkpoint."""

    kinds: Sequence[str]

    def __init__(self, parts: EngineParts) -> None:
        self._shards = parts.islands.outer.shards
        self._of_unit = {shard.unit: shard for shard in self._shards}
        has_momentum = parts.islands.outer.plan.local.momentum > 0
        self.kinds = ["momentum_buffer"] if has_momentum else []

    def pulled(self, unit: FlatParam) -> Tensor:
        return self._of_unit[unit].weights

    def options(self) -> dict[str, Any]:
        return {}

    def load(self, parts: Sequence[tuple[Chunk, list[Tensor]]]) -> None:
        """See [Note: weights between a pull and a push]."""
        for shard in self._shards if self.kinds else ():
            shard.momentum = torch.zeros_like(shard.weights)
        for chunk, (weights, *states) in parts:
            shard = self._shards[chunk.unit]
            own, pulled = (flat[chunk.start : chunk.stop] for flat in (shard.unit.master, shard.weights))
            own.add_(weights - pulled)
            pulled.copy_(weights)
            for state in states:
                assert shard.momentum is not None, "the outer optimizer has no momentum"
                shard.momentum[chunk.start : chunk.stop].copy_(state)

    def tensors(self, chunk: Chunk) -> list[Tensor]:
        shard = self._shards[chunk.unit]
        held = [shard.weights] + ([shard.momentum] if self.kinds and shard.momentum is not None else [])
        return [flat[chunk.start : chunk.stop] for flat in held]

    def clear(self) -> None:
        for shard in self._shards:
            shard.momentum = None
