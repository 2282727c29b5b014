"""Data parallelism, ZeRO 0 to 3: our steps compared with torch's, DeepSpeed's and no communication.

    python benchmarks/data_parallel.py [--stages 0 1] [--only WORD ...] [--compiled] [--transport gloo]
    python benchmarks/data_parallel.py --ddp [--models llama small] [--precisions bf16 fp32] [--only WORD ...]

The Llama of 33.7 M parameters, bf16 compute, 2 ranks with one thread each. The contenders of a stage live in
the same processes and take turns, so that a noisy machine disturbs them alike; a step's time is that of the
slower rank. The yardstick, in every stage, is our step in processes that do not communicate: what is above it
is the price of data parallelism. `peers.py` lists the differences between peers.

Before they are measured, all contenders of a stage train from the same weights on one batch, another one on
each rank, and have to get the losses of our plan without ZeRO. A contender that did not average its gradients
would get those of ranks that do not communicate, which are far off: `loss_apart` is 0 for the first and 1 for
the second.

With `--compiled`, ours have `compile=true` and all peers' blocks are compiled by torch, too.

With `--ddp` it is our DistributedDataParallel and torch's (`ddp_peers.py`), on that Llama and on a model
of 1,500 small parameters. The yardstick is torch's step without communication; the losses to get are those
of ranks that average each gradient after backward.
"""

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import common
import ddp_peers
import peers
import plait
from llama import Batch, Llama, llama_of
from peers import ADAMW, Peer, Step
from plait.bench.report import machine
from plait.comm import World, all_reduce, connect

PLANS = {0: [""], 1: ["zero=1"], 2: ["zero=2"], 3: ["zero=3", "zero=3 reshard=step"]}  # stage -> ours
YARDSTICK = "no communication"
TORCH_ALONE = "torch, no communication"
CHECKED_STEPS = 6  # enough for ranks that do not communicate to be far off
MOST_APART = 0.25
MODELS = ["llama", "small"]  # of --ddp
WARM_UP = 2


def ours(model: Llama, words: str, world: World, *, compiles: bool = False) -> Step:
    plan = f"dp={world.size} precision=bf16 compile={str(compiles).lower()} {words}"
    engine = plait.parallelize(model.on_meta(), plan, optimizer_args=ADAMW, world=world)
    return lambda batch: engine.step(batch).loss


def weights_of(model: Llama, *, compiles: bool) -> Any:
    """A model for a peer. Its blocks share their compiled code, as ours do."""
    found: Any = model.with_weights()
    for block in found.model.layers if compiles else ():
        block.compile()
    return found


def wanted(name: str, only: list[str]) -> bool:
    return not only or any(word in name for word in only)


def contenders(
    model: Llama, stage: int, rivals: list[Peer], world: World, arguments: argparse.Namespace
) -> dict[str, Step]:
    """The yardstick and, of all others of the stage, those whose names have one of the words `only`."""

    alone, only, compiles = World.alone(world.device), arguments.only, arguments.compiled
    steps = {YARDSTICK: ours(model, "", alone, compiles=compiles)}
    for words in PLANS[stage]:
        name = f"plait {words}".strip()
        if wanted(name, only):
            steps[name] = ours(model, words, world, compiles=compiles)
    if stage == 0 and wanted(TORCH_ALONE, only):
        steps[TORCH_ALONE] = peers.ddp(weights_of(model, compiles=compiles), 1)
    for peer in rivals:
        if not wanted(peer.name, only):
            continue
        if peer.installed:
            steps[peer.name] = peer.make(weights_of(model, compiles=compiles), world.size)
        elif world.rank == 0:
            print(f"{peer.name}: left out, {peer.package} is not installed (`make bench` installs it)")
    return steps


def first_losses(step: Step, batch: Batch, world: World) -> Tensor:
    """The mean loss over ranks of each of the first steps on one batch."""
    losses = torch.tensor([float(step(batch)) for _ in range(CHECKED_STEPS)])
    all_reduce(losses, world.group)
    return losses / world.size


class Oracle:
    """Says whether a contender trains: what its losses must be, and what they would be without averaging."""

    def __init__(self, right: Step, lone: Step, batch: Batch, world: World) -> None:
        self._batch, self._world = batch, world
        self._right = first_losses(right, batch, world)
        self._lone = first_losses(lone, batch, world)

    def check(self, name: str, step: Step) -> float:
        """How far the last of its losses is from ours: 1 is as far as without communication. Ends the
        program when that is too far."""
        losses = first_losses(step, self._batch, self._world)
        apart = float((losses - self._right).abs()[-1] / (self._lone - self._right).abs()[-1])
        falls = bool((losses.diff() < 0).all())
        if not (falls and apart < MOST_APART):
            sys.exit(f"{name} does not train as it has to: {losses.tolist()}, not {self._right.tolist()}")
        return apart


def measure(steps: dict[str, Step], batch: Batch, world: World, rounds: int) -> common.Times:
    times: common.Times = {name: [] for name in steps}
    for number in range(rounds + WARM_UP):
        for name, step in steps.items():
            world.barrier()
            begin = time.perf_counter()
            step(batch)
            elapsed = torch.tensor([time.perf_counter() - begin])
            all_reduce(elapsed, world.group, "max")
            if number >= WARM_UP:
                times[name].append(elapsed.item())
    return times


def rows_of(stage: int, oracle: Oracle, world: World, arguments: argparse.Namespace) -> list[common.Row]:
    """Makes, checks and measures the contenders of a stage."""
    model, rivals = llama_of(arguments), peers.peers_of(stage)
    steps = contenders(model, stage, rivals, world, arguments)
    apart = {
        name: oracle.check(name, step) for name, step in steps.items() if name not in (YARDSTICK, TORCH_ALONE)
    }
    rows = []
    for sequences in arguments.batches:
        times = measure(steps, model.batch(sequences), world, arguments.rounds)
        case = f"zero {stage}, {sequences} x {model.sequence}"
        rows += common.rows(case, times, yardstick=YARDSTICK, peers=[peer.name for peer in rivals])
    return [row | {"loss_apart": apart.get(row["contender"])} for row in rows]


def stage_rows(world: World, arguments: argparse.Namespace) -> list[common.Row]:
    model = llama_of(arguments)
    lone = ours(model, "", World.alone(world.device))
    oracle = Oracle(ours(model, "", world), lone, model.batch(2), world)
    rows = []
    for stage in arguments.stages:
        rows += rows_of(stage, oracle, world, arguments)
        gc.collect()  # a stage's contenders end before the next one's begin; peers hold themselves in cycles
    return rows


def ddp_rows(world: World, arguments: argparse.Namespace) -> list[common.Row]:
    """Makes, checks and measures DistributedDataParallel, ours and torch's."""
    rows = []
    models = ddp_models(arguments)
    for (name, (make, batch_of)), precision in itertools.product(models.items(), arguments.precisions):
        if name not in arguments.models:
            continue
        right = ddp_peers.averaged_by_hand(make(), precision, world)
        oracle = Oracle(right, ddp_peers.a_step(make(), precision), batch_of(2), world)
        for what, group in ddp_peers.groups().items():
            chosen = [contender for contender in group if wanted(contender.name, arguments.only)]
            steps = {c.name: ddp_peers.a_step(make(), precision, c.wrap) for c in chosen}
            apart = {contender: oracle.check(contender, step) for contender, step in steps.items()}
            if chosen:
                steps[TORCH_ALONE] = ddp_peers.a_step(make(), precision)
            for sequences in arguments.batches if chosen else ():
                times = measure(steps, batch_of(sequences), world, arguments.rounds)
                case = f"{name}, {precision}, {sequences} x {llama_of(arguments).sequence}{what}"
                found = ddp_peers.rows_with_torch(case, times, chosen, yardstick=TORCH_ALONE)
                rows += [row | {"loss_apart": apart.get(row["contender"])} for row in found]
            steps.clear()
            gc.collect()
    return rows


def ddp_models(
    arguments: argparse.Namespace,
) -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]]:
    """The models of --ddp, and their batches: of the small one, as many rows as the Llama has tokens."""
    model = llama_of(arguments)
    layers = 10 if arguments.smallest else ddp_peers.NUM_LAYERS
    return {
        "llama": (model.with_weights, model.batch),
        "small": (lambda: ddp_peers.small(layers), lambda n: ddp_peers.small_batch(n * model.sequence)),
    }


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport=arguments.transport)
    torch.manual_seed(world.rank)
    rows = ddp_rows(world, arguments) if arguments.ddp else stage_rows(world, arguments)
    if world.rank == 0:
        facts = machine() | {
            "ranks": world.size,
            "plait's transport": world.group.transport.name if world.size > 1 else "none",
            "others' backend": dist.get_backend(),
        }
        title = "DistributedDataParallel" if arguments.ddp else "data parallelism"
        common.report(title, rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel, ours and torch's")
    parser.add_argument("--compiled", action="store_true", help="with compiled blocks, without --ddp")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="with --ddp")
    precisions = list(ddp_peers.COMPUTE)
    parser.add_argument("--precisions", nargs="+", default=precisions, choices=precisions, help="with --ddp")
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose names have one of these words"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 1], help="sequences per rank and step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "host", "gloo"], help="ours; peers have torch's Gloo"
    )
    parser.add_argument("--ranks", type=int, default=2, help="2 or more")
    arguments = common.parse(parser, precisions=["fp32"], batches=[1], rounds=1)
    common.on_ranks(__file__, arguments.ranks, lambda: worker(arguments))


if __name__ == "__main__":
    main()
