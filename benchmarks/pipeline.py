"""Pipeline parallelism: our schedules, those of torch, one process, and the ideal.

    python benchmarks/pipeline.py [--only WORD ...] [--precisions bf16] [--rounds 9]

The Llama of 33.7 M parameters on 2 ranks with one thread each: a step of 8 micro-batches of 1 x 256 tokens,
with the simplest optimizer, SGD, at a learning rate of 0. The contenders of a precision live in the same
processes and take turns; a time is that of the slower rank. The yardstick, `ideal`, follows from our engine
in one process with the same micro-batches, the other rank idle: half of its time, and the bubble of stages
that take equally long, 1 + (ranks - 1) / micro-batches. Schedules with shorter bubbles than 1F1B's may be
below it. `one process, twice` is the same on both ranks at once: what it takes longer, the cores take from
each other. Ours use the host transport, but for the one that says gloo; torch has Gloo. Gradients of
micro-batches are added up in float32 by all; `pipeline_peers.py` lists the differences between peers.

`clock_ms` is what the schedule's clock makes of the durations of actions that a trace has measured, and
`trace_ms` the step of the trace itself; `bubble` and `clock_bubble` are the shares of the ranks' time in
which they compute nothing. Before they are measured, all contenders have to get the loss and the gradient's
norm of one process, within 1e-4 of it in fp32 and 2e-2 in bf16; `apart` is how far off they are.

Under the table: what an action takes where next to nothing is computed, and how much of it is within its
computing. Of one process it is the executor alone, of gpipe messages too, and under 1f1b each waits for one.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import common
import pipeline_peers
import plait
from llama import Batch, Llama, llama_of, weights_folder
from pipeline_peers import DTYPES, Contender, Shape
from plait.bench.report import machine
from plait.comm import Connection, World, broadcast, connect
from plait.models import blocks_of, plan_stages
from plait.plan.schedule import simulate
from plait.plan.schedule.trace import durations_of, read_trace
from tensor_parallel import measure

RANKS = 2
MICROS = 8
ONE_PROCESS = "one process"
TWICE = "one process, twice"
IDEAL = "ideal"
PLANS = {
    "plait 1f1b": "schedule=1f1b",
    "plait gpipe": "schedule=gpipe",
    "plait interleaved": "schedule=interleaved chunks=2",
    "plait zb-h1": "schedule=zb-h1",
    "plait zbv": "schedule=zbv",
}
OVER_GLOO = "plait 1f1b, gloo"
MOST_APART = {"fp32": 1e-4, "bf16": 2e-2}
STILL = {"lr": 0.0}  # weights stay as they are
TINY_MICROS = 100
TINY_SCHEDULES = ("1f1b", "gpipe", "zb-h1")
TINY_SIZE = 4


def ours(name: str, model: Llama, words: str, precision: str, world: World) -> tuple[Contender, plait.Engine]:
    plan = f"pp={world.size} micro={MICROS} precision={precision} {words}"
    engine = plait.parallelize(
        model.on_meta(), plan, optimizer=torch.optim.SGD, optimizer_args=STILL, world=world
    )

    def facts(batch: Batch) -> tuple[float, float]:
        found = engine.step(batch)
        return found.loss, found.grad_norm

    return Contender(name, lambda batch: engine.step(batch).loss, facts, alone=world.size == 1), engine


class Field:
    """The contenders of a precision: one process and, of all others, those that `only` names."""

    def __init__(
        self, precision: str, world: World, gloo: World, folder: Path, arguments: argparse.Namespace
    ) -> None:
        """`folder`: with the model's weights, and for traces."""
        self.precision = precision
        self._world = world
        self._folder = folder
        self._engines: dict[str, plait.Engine] = {}
        model = llama_of(arguments)
        alone = World.alone(world.device)
        self.contenders = {ONE_PROCESS: ours(ONE_PROCESS, model, "", precision, alone)[0]}

        def wanted(name: str) -> bool:
            return not arguments.only or any(word in name for word in arguments.only)

        worlds = dict.fromkeys(PLANS, world) | {OVER_GLOO: gloo}
        for name, where in worlds.items():
            if wanted(name):
                words = PLANS.get(name, PLANS["plait 1f1b"]) + _stages(arguments, name)
                self.contenders[name], self._engines[name] = ours(name, model, words, precision, where)
        for name in pipeline_peers.SCHEDULES:
            if wanted(name):
                self.contenders[name] = pipeline_peers.torch_pipeline(
                    name, self._folder, precision, Shape(stops(arguments), MICROS, 1, model.sequence)
                )

    def takes_part(self, contender: Contender) -> bool:
        return self._world.rank == 0 or not contender.alone

    def check(self, batch: Batch) -> dict[str, float]:
        """How far off losses and norms are. Ends the program when that is too far."""
        apart: dict[str, float] = {}
        right = torch.zeros(2, dtype=torch.float64)
        for name, contender in self.contenders.items():
            found = torch.zeros(2, dtype=torch.float64)
            if self.takes_part(contender):
                found = torch.tensor(contender.facts(batch), dtype=torch.float64)
            if contender.alone:
                broadcast(found, self._world.group)
                right = found
            apart[name] = (found / right - 1).abs().max().item()
            if not apart[name] < MOST_APART[self.precision]:
                sys.exit(
                    f"{name} does not compute what one process does in {self.precision}: "
                    f"loss and norm {found.tolist()}, not {right.tolist()}"
                )
        return apart

    def times(self, batch: Batch, rounds: int) -> common.Times:
        calls = {name: c.step if self.takes_part(c) else None for name, c in self.contenders.items()}
        alone = self.contenders[ONE_PROCESS].step
        found = measure(calls | {TWICE: alone}, batch, self._world, rounds)
        bubble = (RANKS - 1) / MICROS
        return {IDEAL: [seconds / RANKS * (1 + bubble) for seconds in found[ONE_PROCESS]]} | found

    def clocks(self, batch: Batch, rounds: int) -> dict[str, common.Row]:
        """For each of ours: its clock's prediction from measured durations, and the measured time."""
        found: dict[str, common.Row] = {}
        for name, engine in self._engines.items():
            path = self._folder / "trace.json"
            traced(engine, batch, rounds, path)
            if self._world.rank == 0:
                found[name] = clock(path)
        return found


def _stages(arguments: argparse.Namespace, name: str) -> str:
    """By hand where that is asked for, and there are as many stages as ranks."""
    by_hand = arguments.stages and name not in ("plait interleaved", "plait zbv")
    return f" stages={','.join(map(str, arguments.stages))}" if by_hand else ""


def stops(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The blocks at which our plan, or `--stages`, cuts the model."""
    model = llama_of(arguments).on_meta()
    cut = plan_stages(model, blocks_of(model), RANKS, given=tuple(arguments.stages) or None)
    return tuple(stop for _, stop in cut.blocks)


def traced(engine: plait.Engine, batch: Batch, rounds: int, path: Path) -> None:
    engine.start_trace()
    for _ in range(rounds):
        engine.step(batch)
    engine.write_trace(path)


def clock(path: Path) -> common.Row:
    """A trace's figures, and the clock's prediction from them."""
    timelines = list(read_trace(path).values())
    predicted = simulate(timelines[0].schedule, durations_of(timelines))
    return {
        "trace_ms": 1e3 * statistics.median(timeline.total for timeline in timelines),
        "clock_ms": 1e3 * predicted.total,
        "bubble": statistics.median(timeline.bubble_fraction for timeline in timelines),
        "clock_bubble": predicted.bubble_fraction,
    }


def rows_of(
    precision: str, world: World, gloo: World, folder: Path, arguments: argparse.Namespace
) -> list[common.Row]:
    """Makes, checks and measures the contenders of a precision."""
    field = Field(precision, world, gloo, folder, arguments)
    torch.manual_seed(0)  # the same batch on both ranks
    batch = llama_of(arguments).batch(MICROS)
    apart = field.check(batch)
    times = field.times(batch, arguments.rounds)
    clocks = field.clocks(batch, arguments.rounds)
    none: common.Row = dict.fromkeys(("trace_ms", "clock_ms", "bubble", "clock_bubble"))
    rows = common.rows(precision, times, yardstick=IDEAL, peers=pipeline_peers.SCHEDULES)
    return [row | clocks.get(row["contender"], none) | {"apart": apart.get(row["contender"])} for row in rows]


class Tiny(nn.Module):
    """A block whose products cost nothing compared with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(TINY_SIZE, TINY_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


def ms_per_action(schedule: str, world: World, rounds: int, folder: Path) -> str:
    """Times of a rank's actions, from the step's first to its last, and the part that is computing."""

    def loss(outputs: Tensor, _: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return outputs.square().sum(), outputs.shape[0]

    engine = plait.parallelize(
        [Tiny() for _ in range(RANKS)],
        f"pp={world.size} micro={TINY_MICROS} schedule={schedule}",
        loss=loss,
        optimizer=torch.optim.SGD,
        optimizer_args=STILL,
        world=world,
    )
    batch = {"x": torch.ones(TINY_MICROS, TINY_SIZE)}
    engine.step(batch)
    path = folder / "tiny.json"
    traced(engine, batch, rounds, path)
    if world.rank:
        return ""
    timelines = read_trace(path).values()
    actions = len(next(iter(timelines)).ranks[0])
    total_ms = 1e3 * statistics.median(timeline.total for timeline in timelines) / actions
    busy_ms = 1e3 * statistics.median(timeline.busy(0) for timeline in timelines) / actions
    return f"{total_ms:.3f} ({busy_ms:.3f})"


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport="host")
    gloo = World(world.rank, world.size, world.local_rank, world.device, Connection("gloo"))
    rows = []
    with weights_folder(llama_of(arguments), world) as folder:
        for precision in arguments.precisions:
            rows += rows_of(precision, world, gloo, folder, arguments)
            gc.collect()  # its contenders end before the next one's begin; peers hold themselves in cycles
        costs = {s: ms_per_action(s, world, arguments.rounds, folder) for s in TINY_SCHEDULES}
        if world.rank == 0:
            alone = World.alone(world.device)
            costs[ONE_PROCESS] = ms_per_action("1f1b", alone, arguments.rounds, folder)
    if world.rank == 0:
        facts: dict[str, Any] = machine() | {
            "ranks": RANKS,
            "tokens": f"{MICROS} micro-batches of 1 x {llama_of(arguments).sequence}",
            "blocks": " | ".join(map(str, _numbers(stops(arguments)))),
            "others' backend": dist.get_backend(),
        }
        facts |= {f"ms per action (computing), {name}": words for name, words in costs.items()}
        common.report("pipeline parallelism, a step with SGD", rows, facts, arguments.json)
    gloo.close()
    world.close()


def _numbers(stops: tuple[int, ...]) -> list[int]:
    return [stop - start for start, stop in zip((0, *stops), stops, strict=False)]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose names have one of these words"
    )
    parser.add_argument("--precisions", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", nargs=RANKS, type=int, default=[], help="blocks of each stage")
    arguments = common.parse(parser, precisions=["bf16"], rounds=1)
    common.on_ranks(__file__, RANKS, lambda: worker(arguments))


if __name__ == "__main__":
    main()
