"""The speed of a rank's device while all ranks of the host work: matrix products, memory, operators.

[Note: collectives after computation]
Collectives in a loop find the ranks in step. Those inside a block come after milliseconds of products, which
do not take equally long on all ranks; a rank that waited has slept, and wakes up or gets its core back; and
the tensors are in other cores' caches. On 2 ranks of 2 cores a sum of 1 MB takes 0.15 ms in a loop and 1.2 to
1.9 after 4 to 50 ms of products, in pairs of 4 ranks 0.6 and 2.4 to 3.6. So what counts is how much longer
products and collectives take than products alone.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from plait.bench.cases import Case, make_case
from plait.bench.collectives import slowest, synchronize
from plait.bench.operators import MOST_COPIES, core_seconds, in_turn, linear_case, operator_cases
from plait.comm import Group, World, barrier, ranks_by_host, shares_memory, start_scattered_sum
from plait.errors import ConfigError
from plait.plan.cost_model import fit
from plait.plan.host_profile import DeviceSpeed, Points

_Key = tuple[str, int, int]  # kind, ranks of a host, hosts

_VISIT_S = 0.03  # of one repetition of a case
_ROUNDS = 5
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # larger than caches


def measure_device(
    world: World, report_progress: Callable[[str], None] = lambda _: None, rounds: int = _ROUNDS
) -> DeviceSpeed:
    """Measure all ranks at the same time, and return the speed of the slowest. Collective."""
    device, kind = world.device, world.device.type
    # Precision, what, size, work, and what makes the case.
    cases: list[tuple[str, str, float, float, Callable[[], Callable[[], object]]]] = []
    for name, dtype in _DTYPES.items():
        if kind == "cpu" and name == "fp16":  # most CPUs have no fp16 arithmetic
            continue
        for size in _SIZES[kind]:
            flops = 2.0 * size**3
            cases.append((name, _SQUARE, flops, flops, partial(_product, size, dtype, device)))
        if kind == "cpu" and name in ("fp32", "bf16"):
            cases += [(name, *case) for case in operator_cases(dtype)]
    source = torch.ones(_COPY_BYTES[kind] // 4, device=device)
    target, small = torch.empty_like(source), torch.zeros(8, device=device)
    cases.append(("", "copy", 0, 2 * source.nbytes, lambda: partial(target.copy_, source)))
    cases.append(("", "launch", 0, 1, lambda: partial(small.add_, 1)))
    lines = CollectiveLines(world)
    host_ranks = lines.host_ranks
    times: list[list[float]] = []
    for number in range(rounds):
        report_progress(f"measuring: round {number + 1} of {rounds}")
        times.append([_seconds(make(), world, host_ranks) for *_, make in cases])
        lines.measure()
    medians = map(statistics.median, zip(*slowest(world, times), strict=True))
    rates: dict[str, dict[str, Points]] = {}
    for (precision, what, at, work, _), seconds in zip(cases, medians, strict=True):
        points = rates.setdefault(precision, {})
        points[what] = (*points.get(what, ()), (float(at), work / seconds))
    (_, copied), (_, launched) = (rates[""][what][0] for what in ("copy", "launch"))
    del rates[""]
    products = {precision: points.pop(_SQUARE) for precision, points in rates.items()}
    operators = {precision: points for precision, points in rates.items() if points}
    facts = _facts(world, host_ranks)
    speed = DeviceSpeed(host_ranks, facts[0], kind, *facts[1:], copied, 1 / launched, products, operators)
    return replace(speed, collectives=lines.fitted(), network=lines.fitted_over_hosts())


class CollectiveLines:
    """Times of the collectives that plans use, in groups of so many hosts, and ranks on each, as divide all;
    all groups at once. Ranks wait for one another, so that a delay of one delays all: the least time of a
    case counts. Of those inside a block, the median: see [Note: collectives after computation]."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._products = linear_case(_TOKENS, _WIDTH, torch.float32) if world.device.type == "cpu" else None
        self._rounds: list[list[float]] = []
        self._inside: set[_Key] = set()
        self._cases: list[tuple[_Key, int, Case]] = []
        self._hosts = _equal_hosts(world)
        pools = [world.empty(_POOL_BYTES // 4, torch.float32).zero_() for _ in range(2)]
        for hosts, local in product(_divisors(len(self._hosts)), _divisors(self.host_ranks)):
            if hosts * local > 1:
                self._add_group(hosts, local, pools)

    @property
    def host_ranks(self) -> int:
        """Ranks of a host."""
        return len(self._hosts[0])

    def _add_group(self, hosts: int, local: int, pools: Sequence[Tensor]) -> None:
        """Add the collectives of groups of so many hosts, and of so many ranks of each."""
        rank = self._world.rank
        number, index = next((i, host.index(rank)) for i, host in enumerate(self._hosts) if rank in host)
        of_hosts = self._hosts[number // hosts * hosts :][:hosts]
        start = index // local * local
        group = self._world.subgroup(tuple(sorted(r for host in of_hosts for r in host[start:][:local])))
        for kind, num_bytes in product(_KINDS, _MESSAGES):
            if kind == "send-receive" and group.size > 2:
                continue
            if _is_inside(kind, group) and num_bytes == _MESSAGES[0]:  # takes as long as its wait
                continue
            numel = num_bytes // 4 // group.size * group.size
            count = min(MOST_COPIES, _POOL_BYTES // num_bytes)
            pairs = [[pool[i * numel :][:numel] for pool in pools] for i in range(count)]
            turns = [make_case(kind, group, first, second) for first, second in pairs]
            self._add((kind, local, hosts), group, numel * 4, turns)
            if kind == "reduce-scatter" and shares_memory(group):
                turns = [Case(partial(_scattered_sum, full, group)) for full, _ in pairs]
                self._add(("scattered sum", local, hosts), group, numel * 4, turns)
        if shares_memory(group):
            for num_bytes in _MESSAGES[1:]:
                tensors = torch.zeros(min(MOST_COPIES, _POOL_BYTES // num_bytes), num_bytes // 4).unbind()
                turns = [make_case("all-reduce", group, each, each) for each in tensors]
                self._add(("foreign all-reduce", local, hosts), group, num_bytes, turns)
            # Parameters are in one memory: ranks wait for its owners.
            self._add(("unshard", local, hosts), group, 0, [make_case("barrier", group, pools[0], pools[1])])

    def _add(self, key: _Key, group: Group, num_bytes: int, turns: Sequence[Case]) -> None:
        case = replace(turns[0], run=in_turn([each.run for each in turns]))
        self._cases.append((key, num_bytes, case))
        if _is_inside(key[0], group):
            self._inside.add(key)

    def measure(self) -> None:
        """Time all cases once. Collective."""
        seconds = []
        for key, num_bytes, case in self._cases:
            case.run()
            if key in self._inside:
                both = self._visit_s([self._compute, case.run], _AFTER)
                seconds.append((both - self._visit_s([self._compute], _AFTER)) / _AFTER)
            else:
                repeats = max(1, min(20, _MESSAGES[-1] // max(1, num_bytes)))
                seconds.append(self._visit_s([case.run], repeats) / (repeats * case.num_messages))
        self._rounds.append(slowest(self._world, [seconds])[0] if seconds else [])

    def _visit_s(self, calls: Sequence[Callable[[], object]], repeats: int) -> float:
        """Seconds of so many times all these calls, until the last rank is ready."""
        barrier(self._world.group)
        begin_s = time.perf_counter()
        for _ in range(repeats):
            for call in calls:
                call()
        synchronize(self._world)
        barrier(self._world.group)
        return time.perf_counter() - begin_s

    def _compute(self) -> None:
        assert self._products is not None, "measured on CPUs only"
        for _ in range(_PRODUCTS):
            self._products()

    def fitted(self) -> tuple[tuple[str, int, float, float], ...]:
        """Inside a host: kind, ranks, seconds and seconds per byte."""
        return tuple((kind, ranks, *line) for (kind, ranks, hosts), line in self._lines() if hosts == 1)

    def fitted_over_hosts(self) -> tuple[tuple[str, int, int, float, float], ...]:
        """Kind, ranks of a host, hosts, seconds and seconds per byte."""
        return tuple((*key, *line) for key, line in self._lines() if key[-1] > 1)

    def _lines(self) -> Iterator[tuple[_Key, tuple[float, float]]]:
        points: dict[_Key, list[tuple[int, float]]] = {}
        times = zip(*self._rounds, strict=True)
        for (key, num_bytes, _), seconds in zip(self._cases, times, strict=True):
            typical = statistics.median(seconds) if key in self._inside else min(seconds)
            points.setdefault(key, []).append((num_bytes, max(typical, _LEAST_S)))
        for key, each in points.items():
            line = fit(each)
            if line is not None:
                yield key, (line.latency_s, 1 / line.bytes_per_s)


def _equal_hosts(world: World) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host. Raises ConfigError if some host has more than another."""
    hosts = ranks_by_host(world.group, world.device)
    sizes = {len(host) for host in hosts}
    if len(sizes) > 1:
        raise ConfigError(
            "the hosts have different numbers of ranks",
            given=" and ".join(map(str, sorted(sizes))),
            expected="as many ranks on each host",
            hint=f"--nproc-per-node {min(sizes)} on all hosts",
        )
    return hosts


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _is_inside(kind: str, group: Group) -> bool:
    """True for collectives of activations. Where memory is shared, parameters and gradients have others."""
    return shares_memory(group) and kind in ("foreign all-reduce", "all-gather", "reduce-scatter")


def _scattered_sum(full: Tensor, group: Group) -> None:
    numel = full.numel() // group.size
    work = start_scattered_sum(full, group)
    for _ in work.into(full[group.rank * numel :][:numel]):
        pass
    work.release()


_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "send-receive")
_MESSAGES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # bytes
_POOL_BYTES = 1 << 26  # tensors in turn, as in a step: see [Note: cold operands] in operators.py
_SQUARE = "square"
# Of the products before a collective; layers of them, and repetitions.
_TOKENS, _WIDTH, _PRODUCTS, _AFTER = 256, 512, 3, 6
_LEAST_S = 1e-6  # of a difference, which noise can make negative


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _seconds(run: Callable[[], object], world: World, host_ranks: int) -> float:
    """Seconds of one call, with all ranks at work."""
    barrier(world.group)
    if world.device.type == "cpu":
        return core_seconds(run) * max(1.0, host_ranks / num_cores())
    run()
    count, begin_s = 0, time.perf_counter()
    elapsed_s = 0.0
    while elapsed_s < _VISIT_S:
        run()
        torch.cuda.synchronize(world.device)
        count += 1
        elapsed_s = time.perf_counter() - begin_s
    return elapsed_s / count


def _facts(world: World, host_ranks: int) -> tuple[str, int, int, float]:
    """Return the device's name, devices of the host, multiprocessors, bytes of memory."""
    if world.device.type == "cuda":
        facts = torch.cuda.get_device_properties(world.device)
        return facts.name, torch.cuda.device_count(), facts.multi_processor_count, float(facts.total_memory)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return platform.processor() or platform.machine(), num_cores(), 1, host_bytes / host_ranks
