"""Broadcasts over Gloo: its own, and a pipelined chain in S segments, next to the chain's formula.

    python benchmarks/broadcast.py [--ranks 4] [--sizes 1M 16M 64M] [--segments 1 2 4 ...] [--rounds 9]

The contenders take turns; a time is that of the slowest rank, from a barrier on, and a median over rounds.
`estimated_ms` is (p - 2 + S)(latency + N / (S B)), with the latency and bandwidth of messages between ranks 0
and 1, measured before; for Gloo's own tree it is `gloo_broadcast_s` of plan/cost_model.py. The formulas are
for ranks with a link each: on one host, where all share the processors that copy, they are too low. Under
torchrun, the ranks may be on several hosts.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import common
from plait.bench.report import machine
from plait.comm import World, all_reduce, barrier, broadcast, broadcast_by, connect, receive, send
from plait.plan.cost_model import Link, best_segments, chain_broadcast_s, fit, gloo_broadcast_s

GLOO = "gloo"
MESSAGES = (1 << 10, 1 << 20, 1 << 24)  # bytes, to fit the link


def timed(call: Callable[[], object], world: World) -> float:
    """Seconds of a call on the slowest rank."""
    barrier(world.group)
    begin = time.perf_counter()
    call()
    elapsed = torch.tensor([time.perf_counter() - begin])
    all_reduce(elapsed, world.group, "max")
    return elapsed.item()


def ping(tensor: Tensor, world: World) -> None:
    """A message from rank 0 to rank 1 and back."""
    if world.rank < 2:
        first, second = (send, receive) if world.rank == 0 else (receive, send)
        first(tensor, world.group, 1 - world.rank)
        second(tensor, world.group, 1 - world.rank)


def link_of(world: World, rounds: int) -> Link:
    """Latency and bandwidth of a message."""
    tensors = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in MESSAGES]
    points = [
        (tensor.nbytes, timed(lambda tensor=tensor: ping(tensor, world), world) / 2)
        for _ in range(rounds + 1)
        for tensor in tensors
    ][len(tensors) :]  # the first round connects
    line = fit(points)
    assert line is not None, "messages of several sizes"
    return Link(line.latency_s, line.bytes_per_s)


def measure(num_bytes: int, segments: list[int], link: Link, world: World, rounds: int) -> list[common.Row]:
    tensor, p = torch.zeros(num_bytes, dtype=torch.uint8), world.size
    contenders: dict[str, Callable[[], object]] = {GLOO: lambda: broadcast(tensor, world.group)}
    estimates = {GLOO: gloo_broadcast_s(p, num_bytes, link)}
    best = best_segments(num_bytes, p, link.latency_s, link.bytes_per_s)
    for number in sorted({*segments, best}):
        name = f"chain, S={number}{', the best by the formula' if number == best else ''}"
        contenders[name] = lambda number=number: broadcast_by("chain", tensor, world.group, segments=number)
        estimates[name] = chain_broadcast_s(p, num_bytes, number, link)
    times: common.Times = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, call in contenders.items():
            seconds = timed(call, world)
            if number:
                times[name].append(seconds)
    return [
        {
            "bytes": num_bytes,
            "contender": name,
            "median_ms": 1e3 * statistics.median(seconds),
            "estimated_ms": 1e3 * estimates[name],
            "faster_than_gloo": common.ratio(times[GLOO], seconds),
        }
        for name, seconds in times.items()
    ]


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport="gloo")
    segments, rounds = arguments.segments, arguments.rounds
    link = link_of(world, rounds)
    rows = [
        row
        for word in arguments.sizes
        for row in measure(common.size_of(word), segments, link, world, rounds)
    ]
    if world.rank == 0:
        facts = machine() | {
            "ranks": world.size,
            "latency": f"{1e3 * link.latency_s:.3g} ms",
            "bandwidth": f"{link.bytes_per_s / 1e9:.3g} GB/s",
        }
        common.report("broadcasts over Gloo", rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", default=["1M", "16M", "64M"], help="K or M")
    parser.add_argument("--segments", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = common.parse(parser, ranks=3, sizes=["4K"], segments=[1, 4], rounds=1)
    common.on_ranks(__file__, arguments.ranks, lambda: worker(arguments))


if __name__ == "__main__":
    main()
