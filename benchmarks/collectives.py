"""Collectives between the ranks of one host: shared memory, Gloo and memcpy, in one run.

    python benchmarks/collectives.py [--ranks 2] [--sizes 4K 25M 128M] [--rounds 15] [--json FILE]

float32. The same processes take turns with our host transport, torch.distributed over Gloo and with a plain
memcpy, in all ranks at once, of as many bytes as the verb reads and writes: `of_memcpy` is the share of
memcpy's bytes per second that the verb achieves. A time is that of the slower rank, and a median over rounds.
`owned` tensors come from `World.empty`, `foreign` ones from anywhere.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import common
from plait.bench.report import machine
from plait.comm import (
    Group,
    World,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    connect,
    reduce_scatter,
)

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WARM_UP = 2
MOST_CALLS = 50  # of one measurement: small ones are repeated


@dataclass(frozen=True)
class Case:
    """A verb on tensors of some storage. `copied_bytes`: of a memcpy that reads and writes as much."""

    verb: str
    storage: str
    ours: Callable[[], object]
    gloos: Callable[[], object]
    copied_bytes: float


def cases(num_bytes: int, world: World) -> list[Case]:
    p, group = world.size, world.group
    numel = num_bytes // 4 // p * p
    owned, piece = world.empty(numel, torch.float32).zero_(), world.empty(numel // p, torch.float32).zero_()
    foreign = torch.zeros(numel)
    own = owned.chunk(p)[world.rank]
    return [
        Case(
            "all-reduce",
            "owned",
            lambda: all_reduce(owned, group),
            lambda: dist.all_reduce(foreign),
            num_bytes,
        ),
        Case(
            "all-reduce",
            "foreign",
            lambda: all_reduce(foreign, group),
            lambda: dist.all_reduce(foreign),
            num_bytes,
        ),
        Case(
            "reduce-scatter",
            "owned",
            lambda: reduce_scatter(piece, owned, group),
            lambda: reduce_into(piece, owned),
            num_bytes * (1 + 1 / p) / 2,
        ),
        Case(
            "all-gather",
            "owned",
            lambda: all_gather(owned, own, group),
            lambda: gather_into(owned, own),
            num_bytes * (p - 1) / p,
        ),
        Case(
            "broadcast",
            "owned",
            lambda: broadcast(owned, group),
            lambda: dist.broadcast(owned, 0),
            num_bytes * (p - 1) / p,
        ),
    ]


def timed(call: Callable[[], object], calls: int, group: Group) -> float:
    """Seconds of one call on the slowest rank."""
    barrier(group)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = torch.tensor([(time.perf_counter() - begin) / calls])
    all_reduce(elapsed, group, "max")
    return elapsed.item()


def measure(num_bytes: int, world: World, rounds: int) -> list[common.Row]:
    found = []
    calls = max(1, min(MOST_CALLS, (4 << 20) // num_bytes))
    for case in cases(num_bytes, world):
        source, target = torch.zeros(2, int(case.copied_bytes) // 4)
        contenders: dict[str, Callable[[], object]] = {
            "host": case.ours,
            "gloo": case.gloos,
            "memcpy": lambda target=target, source=source: target.copy_(source),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds + WARM_UP):
            for name, contender in contenders.items():
                seconds = timed(contender, calls, world.group)
                if number >= WARM_UP:
                    times[name].append(seconds)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        found.append(
            {
                "verb": case.verb,
                "bytes": num_bytes,
                "storage": case.storage,
                "host_ms": 1e3 * medians["host"],
                "gloo_ms": 1e3 * medians["gloo"],
                "faster_than_gloo": medians["gloo"] / medians["host"],
                "of_memcpy": medians["memcpy"] / medians["host"],
            }
        )
    return found


def worker(sizes: list[str], rounds: int, json_path: Path | None) -> None:
    torch.set_num_threads(1)
    world = connect(device="cpu", transport="host")
    rows = [row for word in sizes for row in measure(common.size_of(word), world, rounds)]
    if world.rank == 0:
        common.report("collectives on one host", rows, machine() | {"ranks": world.size}, json_path)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["4K", "25M", "128M"], help="whole tensors, K or M")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = common.parse(parser, sizes=["4K"], rounds=1)
    common.on_ranks(
        __file__, arguments.ranks, lambda: worker(arguments.sizes, arguments.rounds, arguments.json)
    )


if __name__ == "__main__":
    main()
