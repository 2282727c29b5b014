"""Sums over a slow link, and how much of them backward hides: two hosts connected by 1 Gbit/s.

    python benchmarks/links.py [--mbit 1000] [--sizes 1M 16M] [--rounds 5]

The hosts are those of `two_hosts.py`. Two ranks on each sum tensors: torch's Gloo, whose ring sends 1.5 times
the tensor over the link in each direction, and plait's algorithms, of which `two-level` sends it once. Then
one rank on each trains the Llama of 33.7 M parameters in fp32. A step is compared with the step without
communication and with the sum of its gradients alone: `hidden` is the part of this sum that takes no time of
its own. DDP with one bucket sums after backward.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import common
import ddp_peers
import plait
import two_hosts
from llama import llama_of
from peers import ADAMW
from plait.bench.report import machine
from plait.comm import World, all_reduce, all_reduce_by, connect
from plait.comm.shm.rendezvous import ranks_by_host

RANKS_OF_A_HOST = 2
GLOO = "torch, Gloo"
ALONE, SUM = "no communication", "the sum alone"
ONE_BUCKET_MB = 10_000
Calls = dict[str, Callable[[], object]]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--mbit", type=int, default=1000, help="of the link, per second and direction")
    parser.add_argument("--sizes", nargs="+", default=["1M", "16M"], help="of the tensors, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = common.parse(parser, rounds=1, sizes=["4K"], mbit=2000)
    if "RANK" in os.environ:
        world = connect(transport="gloo")
        two_hosts.write_first(world, sums(world, arguments) if world.size > 2 else steps(world, arguments))
        return
    of_sums = two_hosts.run(__file__, arguments.mbit, RANKS_OF_A_HOST)
    of_steps = two_hosts.run(__file__, arguments.mbit)
    rows = [*of_sums.results, *of_steps.results]
    common.report("sums over a link", rows, machine() | {"link": of_sums.link}, arguments.json)


def sums(world: World, arguments: argparse.Namespace) -> list[common.Row]:
    """Rows of all-reduces of each size by all ranks, in float32."""
    hosts, rows = ranks_by_host(world.group), []
    for word in arguments.sizes:
        tensor = torch.zeros(common.size_of(word) // 4)
        calls: Calls = {GLOO: partial(dist.all_reduce, tensor)}
        for name in ("ring", "halving", "two-level"):
            calls[name] = partial(all_reduce_by, name, tensor, world.group, hosts=hosts)
        times = measure(calls, world, arguments.rounds)
        rows += common.rows(f"all-reduce, {word}", times, yardstick=GLOO, peers=[GLOO])
    return rows


def steps(world: World, arguments: argparse.Namespace) -> list[common.Row]:
    """Rows of training steps, with the part of the sum that each hides."""
    model = llama_of(arguments)
    batch = model.batch(2)
    gradients = torch.zeros(sum(p.numel() for p in model.on_meta().parameters()))
    engine = plait.parallelize(model.on_meta(), "dp=2", optimizer_args=ADAMW, world=world)
    wraps: dict[str, ddp_peers.Wrap] = {
        ALONE: lambda module: module,
        "torch DDP": TorchDDP,
        "torch DDP, one bucket": partial(TorchDDP, bucket_cap_mb=ONE_BUCKET_MB),
        "plait DDP": plait.DistributedDataParallel,
        "plait DDP, one bucket": partial(plait.DistributedDataParallel, bucket_cap_mb=ONE_BUCKET_MB),
    }
    calls: Calls = {
        name: partial(ddp_peers.a_step(model.with_weights(), "fp32", wrap), batch)
        for name, wrap in wraps.items()
    }
    calls |= {SUM: partial(all_reduce, gradients, world.group), "plait dp=2": partial(engine.step, batch)}
    times = measure(calls, world, arguments.rounds)
    rows = common.rows("step, fp32", times, yardstick=ALONE, peers=["torch DDP"])
    of = {row["contender"]: row["median_ms"] for row in rows}
    for row in rows:
        exposed = (row["median_ms"] - of[ALONE]) / of[SUM]
        row["hidden"] = None if row["contender"] in (ALONE, SUM) else 1 - exposed
    return rows


def measure(calls: Calls, world: World, rounds: int) -> common.Times:
    """Seconds of the slowest rank; contenders take turns, and the first round is not counted."""
    times: common.Times = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            world.barrier()
            begin = time.perf_counter()
            call()
            elapsed = torch.tensor([time.perf_counter() - begin])
            all_reduce(elapsed, world.group, "max")
            if number:
                times[name].append(elapsed.item())
    return times


if __name__ == "__main__":
    main()
