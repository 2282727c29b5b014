"""Data parallelism: our step beside torch DDP's and beside the same step without communication.

    python benchmarks/data_parallel.py [--json FILE]

The Llama of 33.7 M parameters, bf16 compute, 2 ranks with one thread each. All contenders live in the
same processes and take turns, so that a noisy machine disturbs them alike; a step's time is that of
the slower rank. The yardsticks are each contender's step in processes that do not communicate: what
is above them is the price of data parallelism.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import common
import plait
from plait.comm import World, all_reduce, connect, launch_local
from plait.models import causal_lm_on_meta

LLAMA = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SEQUENCE = 256
ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
Step = Callable[[dict[str, torch.Tensor]], Any]


def ours(world: World) -> Step:
    plan = f"dp={world.size} precision=bf16"
    return plait.parallelize(causal_lm_on_meta(LLAMA), plan, optimizer_args=ADAMW, world=world).step


def torchs(world: World) -> Step:
    """What a torch user writes: autocast, DDP with gradients as views of its buckets, fused AdamW."""
    model: torch.nn.Module = AutoModelForCausalLM.from_config(causal_lm_on_meta(LLAMA).config)
    if world.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(
    steps: dict[str, Step], batch: dict[str, torch.Tensor], world: World, rounds: int
) -> common.Times:
    times: common.Times = {name: [] for name in steps}
    for number in range(rounds + 2):  # two rounds of warm-up
        for name, step in steps.items():
            world.barrier()
            begin = time.perf_counter()
            step(batch)
            elapsed = torch.tensor([time.perf_counter() - begin])
            all_reduce(elapsed, world.group, "max")
            if number >= 2:
                times[name].append(elapsed.item())
    return times


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = connect()
    alone = World.alone(world.device)
    steps = {
        "no communication": ours(alone),
        "plait": ours(world),
        "torch, no communication": torchs(alone),
        "torch DDP": torchs(world),
    }
    rows = []
    for sequences in arguments.batches:
        ids = torch.randint(0, LLAMA["vocab_size"], (sequences, SEQUENCE))
        times = measure(steps, {"input_ids": ids, "labels": ids}, world, arguments.rounds)
        case = f"{sequences} x {SEQUENCE}"
        rows += common.rows(case, times, yardstick="no communication", peer="torch DDP")
    if world.rank == 0:
        facts = common.machine() | {"ranks": world.size, "backend": dist.get_backend()}
        common.report("data parallelism", rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 1], help="sequences per rank and step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
    else:
        command = [sys.executable, str(Path(__file__).resolve())]
        sys.exit(launch_local(arguments.ranks, sys.argv[1:], command=command))


if __name__ == "__main__":
    main()
