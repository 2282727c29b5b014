"""Tensor parallelism: our passes and steps, those of torch and transformers, and one process.

    python benchmarks/tensor_parallel.py [--only WORD ...] [--precisions bf16] [--transport gloo]

The Llama of 33.7 M parameters, 4 x 256 tokens, 2 ranks with one thread each. The contenders of a precision
live in the same processes and take turns; a time is that of the slower rank. The yardstick is plain torch in
one process with one thread, the other rank idle: half of it would be a perfect cut. Blocks are compiled if a
plan says so. "forward + backward" drops the gradients, "step" has fused AdamW in it. `tensor_peers.py` lists
the differences between peers.

Before they are measured, all contenders of a precision train from the same weights on one batch, and have to
get the losses of one process: within 1e-4 in fp32 and 2e-2 in bf16. `loss_apart` is how far off they are.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import common
import plait
import tensor_peers
from llama import Batch, Llama, llama_of, weights_folder
from peers import ADAMW
from plait.bench.report import machine
from plait.comm import World, all_reduce, broadcast, connect
from tensor_peers import DTYPES, ONE_PROCESS, Contender

RANKS = 2
SEQUENCES = 4
PLANS = ["tp=1", f"tp={RANKS}", f"tp={RANKS} compile=true", f"tp={RANKS} sp=true"]
CHECKED_STEPS = 4
MOST_APART = {"fp32": 1e-4, "bf16": 2e-2}
WARM_UP = 1  # the check was one, too
Call = Callable[[Batch], float] | None


def ours(model: Llama, words: str, precision: str, world: World) -> Contender:
    plan = f"{words} precision={precision}"
    engine = plait.parallelize(model.on_meta(), plan, optimizer_args=ADAMW, world=world)

    def passes(batch: Batch) -> float:
        loss, num_targets = engine.loss(batch)
        engine.backward(loss, num_targets)
        engine.discard_step()
        return float(loss.detach() / num_targets)

    return Contender(
        f"plait {words}", passes, lambda batch: engine.step(batch).loss, alone=engine.world.size == 1
    )


def contenders(precision: str, world: World, weights: Path, arguments: argparse.Namespace) -> list[Contender]:
    """The yardstick and, of all others, those whose names have one of the words `only`."""

    def wanted(name: str) -> bool:
        return not arguments.only or any(word in name for word in arguments.only)

    lone = World.alone(world.device)
    found = [tensor_peers.one_process(weights, precision)]
    for words in PLANS:
        if wanted(f"plait {words}"):
            found.append(ours(llama_of(arguments), words, precision, lone if words == "tp=1" else world))
    for name, make in tensor_peers.PEERS.items():
        if not wanted(name):
            continue
        if tensor_peers.installed(name):
            found.append(make(weights, precision))
        elif world.rank == 0:
            print(f"{name}: left out, {tensor_peers.NEEDS[name]} is not installed (`make bench` installs it)")
    return found


def losses_of(contender: Contender, batch: Batch, world: World) -> Tensor:
    """Losses of its first steps on one batch and of the passes after them; rank 0's of one without peers."""
    losses = torch.zeros(CHECKED_STEPS + 1)
    if takes_part(contender, world):
        calls = [contender.step] * CHECKED_STEPS + [contender.passes]
        losses = torch.tensor([call(batch) for call in calls])
    if contender.alone:
        broadcast(losses, world.group)
    return losses


def takes_part(contender: Contender, world: World) -> bool:
    return world.rank == 0 or not contender.alone


def check(
    found: list[Contender],
    precision: str,
    batch: Batch,
    world: World,
    most_apart: dict[str, float] = MOST_APART,
) -> dict[str, float]:
    """How far each contender's losses are from those of one process, on the rank where they are furthest.
    Ends the program when that is too far, or when they do not fall."""
    apart = {}
    right = torch.zeros(0)
    for contender in found:
        losses = losses_of(contender, batch, world)
        if contender.name == ONE_PROCESS:
            right = losses
        off = (losses - right).abs().max().reshape(1)
        all_reduce(off, world.group, "max")
        if not (bool((losses.diff() < 0).all()) and off.item() < most_apart[precision]):
            sys.exit(
                f"{contender.name} does not train as one process does in {precision}: "
                f"{losses.tolist()}, not {right.tolist()}"
            )
        apart[contender.name] = off.item()
    return apart


def measure(calls: dict[str, Call], batch: Batch, world: World, rounds: int) -> common.Times:
    """A call that is None: this rank waits."""
    times: common.Times = {name: [] for name in calls}
    for number in range(rounds + WARM_UP):
        for name, call in calls.items():
            world.barrier()
            elapsed = torch.zeros(1)
            if call is not None:
                begin = time.perf_counter()
                call(batch)
                elapsed[0] = time.perf_counter() - begin
            all_reduce(elapsed, world.group, "max")
            if number >= WARM_UP:
                times[name].append(elapsed.item())
    return times


def rows_of(precision: str, world: World, weights: Path, arguments: argparse.Namespace) -> list[common.Row]:
    """Makes, checks and measures the contenders of a precision."""
    found = contenders(precision, world, weights, arguments)
    torch.manual_seed(0)  # the same batch on both ranks
    batch = llama_of(arguments).batch(SEQUENCES)
    apart = check(found, precision, batch, world)
    rows = []
    for case in ("passes", "step"):
        calls: dict[str, Call] = {
            contender.name: getattr(contender, case) if takes_part(contender, world) else None
            for contender in found
        }
        times = measure(calls, batch, world, arguments.rounds)
        title = f"{precision}, {'forward + backward' if case == 'passes' else case}"
        rows += common.rows(title, times, yardstick=ONE_PROCESS, peers=tensor_peers.PEERS)
    return [row | {"loss_apart": apart[row["contender"]]} for row in rows]


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport=arguments.transport)
    rows = []
    with weights_folder(llama_of(arguments), world) as weights:
        for precision in arguments.precisions:
            rows += rows_of(precision, world, weights, arguments)
            gc.collect()  # its contenders end before the next one's begin; peers hold themselves in cycles
    if world.rank == 0:
        facts = machine() | {
            "ranks": world.size,
            "tokens": f"{SEQUENCES} x {llama_of(arguments).sequence}",
            "plait's transport": world.group.transport.name,
            "others' backend": dist.get_backend(),
        }
        common.report("tensor parallelism", rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose names have one of these words"
    )
    parser.add_argument("--precisions", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "host", "gloo"], help="ours; peers have torch's Gloo"
    )
    arguments = common.parse(parser, precisions=["bf16"], rounds=1)
    common.on_ranks(__file__, RANKS, lambda: worker(arguments))


if __name__ == "__main__":
    main()
