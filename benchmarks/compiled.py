"""Gain of torch.compile in a step, and its cost at the start, which `compile=auto` compares.

    python benchmarks/compiled.py [--rounds 5] [--precision bf16] [--only WORD ...] [--json FILE]

The Llama of 33.7 M parameters, 2 ranks with one thread each, 2 x 256 tokens on a rank. The engine of a plan
without and the one with `compile=true` live in the same processes and take turns. Times are of rank 0's
processor, which other programs of the machine change least; they contain the spinning of its waits. A
compilation is the first step, with the processes that it starts, less a later step: of one block, as the
blocks of a model share their code. It is warm if torch's cache (TORCHINDUCTOR_CACHE_DIR) has that code.
"""

import argparse
import os
import sys
import time
from functools import partial

import torch

import common
import plait
from llama import llama_of
from peers import ADAMW
from plait.bench.report import machine
from plait.comm import connect

RANKS = 2
SEQUENCES = 2  # of a rank
PLANS = ("dp=2", "dp=2 zero=3", "dp=2 recompute=selective", "tp=2", "tp=2 sp=true")


def processor_s() -> float:
    """Return the seconds of this process and of those that it started and that have ended."""
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def measure(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # ranks of a grid have the same batch
    model, world, found = llama_of(arguments), connect(), []
    for plan in arguments.only or PLANS:
        words = (plan, f"{plan} compile=true")
        engines = {
            name: plait.parallelize(
                model.on_meta(), f"{name} precision={arguments.precision}", optimizer_args=ADAMW, world=world
            )
            for name in words
        }
        times: common.Times = {name: [] for name in engines}
        batch, first_s = model.batch(SEQUENCES), dict.fromkeys(engines, 0.0)
        for number in range(arguments.rounds + 1):
            for name, engine in engines.items():
                begin_s = processor_s()
                engine.step(batch)
                if number:
                    times[name].append(processor_s() - begin_s)
                else:
                    first_s[name] = processor_s() - begin_s
        if world.rank == 0:
            found += common.rows(plan, times, yardstick=plan, peers=())
            cost_s = first_s[words[1]] - min(times[words[1]])
            print(f"{plan}: a compilation took {cost_s:.1f} s of the processor", flush=True)
    if world.rank == 0:
        common.report("compiled blocks, processor time", found, machine(), arguments.json)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--only", nargs="+", metavar="PLAN")
    arguments = common.parse(parser, rounds=1, only=["dp=2"])
    common.on_ranks(__file__, RANKS, partial(measure, arguments))


if __name__ == "__main__":
    sys.exit(main())
