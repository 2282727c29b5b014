"""Training with local steps, on ranks and simulated in one process in plain torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.plan import Plan
from support import programs

STEPS = 8


@dataclass
class IslandsTrace:
    """Losses of rank 0's island, its last state as `engine.state()` returns it, and the drifts measured."""

    first_weights: dict[str, Tensor]
    losses: list[float]
    state: dict[str, Tensor]
    drifts: list[float]

    def weights_of(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.state.items() if k.startswith(prefix)}


def task(build: Any = programs.llama, **options: Any) -> programs.Task:
    return programs.Task(build, steps=STEPS, **options)


def train(task: programs.Task, plan: str, muted: tuple[str, ...] = ()) -> IslandsTrace:
    """Train on this rank."""
    engine = programs.engine_of(task, plan)
    first, losses, drifts = engine.full_parameters(), [], []
    for batch in task.data(task.steps):
        with programs.muted(*muted):
            result = engine.step(programs.share_of(batch, engine))
        losses.append(result.loss)
        if result.exchange is not None:
            drifts.append(result.exchange.drift)
    return IslandsTrace(first, losses, engine.state(), drifts)


class Ledger(nn.Module):
    """Weights of which row w is minus the number of steps of island w, by SGD at a learning rate of 1."""

    def __init__(self, islands: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(islands, 2048, dtype=torch.float64))

    def forward(self, worker: Tensor) -> Tensor:
        return self.rows[int(worker)].sum()


def ledger_engine(islands: int, words: str) -> plait.Engine:
    return plait.parallelize(
        Ledger(islands),
        f"dp={islands} precision=fp64 {words}",
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 1.0},
        loss=lambda out, _: (out, 1),
    )


class _Island:
    """One model and its inner optimizer."""

    def __init__(self, task: programs.Task, weights: dict[str, Tensor], micro: int) -> None:
        self.model = task.build(on_meta=False).double()
        self.model.load_state_dict(weights, strict=False)
        self.named = dict(self.model.named_parameters())
        groups = programs.decay_groups(self.named)
        self._optimizer = getattr(torch.optim, task.optimizer)(groups, **{"foreach": False} | task.arguments)
        self._clip_norm = math.inf if task.clip_norm is None else task.clip_norm
        self._micro = micro

    def step(self, batch: dict[str, Tensor]) -> float:
        self._optimizer.zero_grad()
        loss = programs.mean_loss(self.model, batch, self._micro)
        loss.backward()
        nn.utils.clip_grad_norm_(self.named.values(), self._clip_norm, foreach=False)
        self._optimizer.step()
        return loss.item()


class _Outer:
    """Global weights and the outer optimizer: torch's, on one parameter per weight."""

    def __init__(self, plan: Plan, weights: dict[str, Tensor]) -> None:
        self.weights = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
        _, *numbers = plan.outer.split(":")
        lr, momentum = map(float, numbers) if numbers else (1.0, 0.0)
        self._options: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        self._optimizers = {n: torch.optim.SGD([p], **self._options) for n, p in self.weights.items()}

    def step(self, changes: dict[str, list[Tensor]]) -> None:
        for name, of_islands in changes.items():
            self.weights[name].grad = -torch.stack(of_islands).mean(0)
            self._optimizers[name].step()


def simulate(
    task: programs.Task, plan: Plan, first: dict[str, Tensor], part_of: dict[str, int] | None = None
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], list[float]]:
    """Return the weights of each island, the global ones, and the losses of the first island. `part_of`: the
    part in which a parameter is exchanged."""
    islands = [_Island(task, first, plan.micro * plan.data_shards) for _ in range(plan.num_islands)]
    outer, losses = _Outer(plan, first), []
    steps, parts = plan.local_steps, plan.exchange_parts
    delay = steps // parts if parts > 1 else 0
    due: dict[int, dict[str, list[Tensor]]] = {}
    for number, batch in enumerate(task.data(task.steps), 1):
        shares = [{k: v.chunk(len(islands))[i] for k, v in batch.items()} for i in range(len(islands))]
        of_islands = [island.step(share) for island, share in zip(islands, shares, strict=True)]
        losses.append(of_islands[0])
        with torch.no_grad():
            for turn in ("apply", "start") if delay else ("start", "apply"):
                if turn == "start":
                    for part in range(parts):
                        if number % steps == steps * (part + 1) // parts % steps:
                            due[number + delay] = {
                                name: [island.named[name].detach() - weight for island in islands]
                                for name, weight in outer.weights.items()
                                if part_of is None or part_of[name] == part
                            }
                elif number in due:
                    changes = due.pop(number)
                    outer.step(changes)
                    for island in islands:
                        for name in changes:
                            share = 0.5 if delay else 0.0
                            island.named[name].mul_(share).add_(outer.weights[name], alpha=1 - share)
    own = [{n: p.detach().clone() for n, p in island.named.items()} for island in islands]
    return own, {n: p.detach() for n, p in outer.weights.items()}, losses


def check(trace: IslandsTrace, task: programs.Task, plan: Plan, **options: Any) -> None:
    """Compare with the simulation, to 1e-9."""
    own, common, losses = simulate(task, plan, trace.first_weights, **options)
    assert trace.losses == [pytest.approx(loss, rel=1e-9) for loss in losses]
    for index, weights in enumerate(own):
        assert programs.largest_difference(trace.weights_of(f"islands/{index}/weights/"), weights)[0] <= 1e-9
    assert programs.largest_difference(trace.weights_of("weights/"), common)[0] <= 1e-9


def parts_of(task: programs.Task, plan: str) -> dict[str, int]:
    """The part in which each parameter of this rank is exchanged."""
    outer = programs.engine_of(task, plan)._parts.islands.outer
    return {piece.name: part for shard, part in outer.parts.items() for piece in shard.unit.layout.params}


def interrupted(task: programs.Task, first: str, then: str, at_step: int, folder: Path) -> IslandsTrace:
    """Train under the plan `first`, save after `at_step` steps, and continue under `then`, from other weights
    and on as many ranks. The losses are those after the load."""
    engine, batches = programs.engine_of(task, first), task.data(task.steps)
    for batch in batches[:at_step]:
        engine.step(programs.share_of(batch, engine))
    path = engine.save(folder)
    engine = programs.engine_of(task, then, seed=4)
    engine.load(path)
    results = [engine.step(programs.share_of(batch, engine)) for batch in batches[at_step:]]
    return IslandsTrace({}, [result.loss for result in results], engine.state(), [])


def saved(task: programs.Task, plan: str, at_step: int, folder: Path) -> dict[str, Tensor]:
    """Train and save after `at_step` steps, and return the state."""
    engine = programs.engine_of(task, plan)
    for batch in task.data(task.steps)[:at_step]:
        engine.step(programs.share_of(batch, engine))
    engine.save(folder)
    return engine.state()


def loaded(task: programs.Task, plan: str, folder: Path) -> dict[str, Tensor]:
    """The state of an engine that has loaded what `saved` saved."""
    engine = programs.engine_of(task, plan, seed=4)
    engine.load(next(iter(sorted(folder.glob("step-*")))))
    return engine.state()
