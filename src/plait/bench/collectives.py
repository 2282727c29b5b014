"""Times of collectives on the ranks of a world, each checked before it is timed.

[Note: what one time is]
A round visits every case (verb, size, storage), in an order of its own: a slow minute of the machine, or a
cache that the case before has filled, falls on all cases alike, and not on all repetitions of one. The short
ones, which noise hurts most, it visits four times. A visit is a barrier, then repetitions back to back for
some milliseconds. A rank's time is their mean, the visit's that of the slowest rank, the case's the median
over visits. As in nccl-tests, a rank that waits for no one (the source of a broadcast) may be ahead of the
others by some repetitions: of a small size this is the time at which such messages follow each other.
"""

import random
import socket
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.bench.cases import Case, Pattern, make_case
from plait.bench.request import DTYPES, Request
from plait.comm import World, all_gather, all_reduce, barrier
from plait.errors import CommError, ConfigError

_VISIT_S = 0.005
_SHORT_S, _VISITS_OF_SHORT = 0.02, 4
_MOST_REPEATS = 500
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 25  # where the request does not say


@dataclass(frozen=True, slots=True)
class Row:
    """The times of one case. `num_bytes`: of the whole tensor, which is a multiple of the ranks' number."""

    verb: str
    storage: str
    num_bytes: int
    median_s: float
    least_s: float
    visits: int
    repeats: int  # in each visit


@dataclass(frozen=True)
class Measurement:
    """What was measured, on what."""

    rows: tuple[Row, ...]
    transport: str
    device: str
    num_ranks: int
    num_hosts: int
    dtype: str
    rounds: int
    seconds: float


@dataclass(frozen=True)
class _TimedCase:
    verb: str
    storage: str
    num_bytes: int
    make_case: Case


@dataclass(frozen=True)
class _VisitPlan:
    """What a round does for a case."""

    number: int
    repeats: int

    @classmethod
    def of(cls, seconds: float) -> "_VisitPlan":
        """Of a case that takes about `seconds`."""
        repeats = max(1, min(_MOST_REPEATS, round(_VISIT_S / max(seconds, 1e-9))))
        return cls(_VISITS_OF_SHORT if seconds * repeats < _SHORT_S else 1, repeats)


def measure(world: World, request: Request, tell: Callable[[str], None] = lambda _: None) -> Measurement:
    """Every rank calls it, with the same request, and gets the same. `tell` hears what is going on.

    Without `request.rounds` it ends when another round would not fit into the budget, but for three rounds.
    Raises CommError when a verb gives wrong results, ConfigError when a GPU has too little memory.
    """
    begin = time.perf_counter()
    arenas = _arenas(world, request)
    cases = _cases(world, request, arenas)
    tell("checking results")
    visits = _check_all(cases, world, Pattern(DTYPES[request.dtype], world.size, world.device))
    for tensor in (tensor for arena in arenas.values() for tensor in arena):
        tensor.zero_()  # what sums to itself, round after round
    times: list[list[float]] = []
    longest_s = 0.0
    while not _is_over(world, request, len(times), time.perf_counter() - begin + longest_s):
        tell(f"measuring: round {len(times) + 1}")
        round_begin = time.perf_counter()
        times.append(_round(cases, visits, world, seed=len(times)))
        longest_s = max(longest_s, time.perf_counter() - round_begin)
    return Measurement(
        rows=_rows(cases, visits, slowest(world, times)),
        transport=world.group.transport.name,
        device=world.device.type,
        num_ranks=world.size,
        num_hosts=num_hosts(world),
        dtype=request.dtype,
        rounds=len(times),
        seconds=time.perf_counter() - begin,
    )


def _rows(cases: list[_TimedCase], visits: list[_VisitPlan], rounds: list[list[float]]) -> tuple[Row, ...]:
    rows, begin = [], 0
    for case, done in zip(cases, visits, strict=True):
        seconds = [time_s for found in rounds for time_s in found[begin : begin + done.number]]
        begin += done.number
        median_s, least_s = statistics.median(seconds), min(seconds)
        rows.append(
            Row(case.verb, case.storage, case.num_bytes, median_s, least_s, len(seconds), done.repeats)
        )
    return tuple(rows)


def _is_over(world: World, request: Request, rounds: int, end_s: float) -> bool:
    """`end_s`: when another round would be over. The ranks' clocks differ: they agree."""
    if request.rounds is not None:
        return rounds >= request.rounds
    over = rounds >= _MOST_ROUNDS or (rounds >= _FEWEST_ROUNDS and end_s > request.budget_s)
    return world.any_flag(over)


def _arenas(world: World, request: Request) -> dict[str, tuple[Tensor, Tensor]]:
    """By storage, two tensors as long as the largest case; every page of them is there. Cases are views."""
    dtype = DTYPES[request.dtype]
    numel = max(_numel(size, world, request) for size in request.sizes)
    makers: dict[str, Callable[[], Tensor]] = {
        "owned": lambda: world.empty(numel, dtype),
        "foreign": lambda: torch.empty(numel, dtype=dtype, device=world.device),
    }
    try:
        return {name: (makers[name]().zero_(), makers[name]().zero_()) for name in request.storages}
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU has too little memory for the largest size",
            given=str(error).splitlines()[0],
            hint="--sizes 1K:16M",
        ) from error


def _cases(world: World, request: Request, arenas: dict[str, tuple[Tensor, Tensor]]) -> list[_TimedCase]:
    cases = []
    for verb in request.verbs:
        # No tensor takes part in a barrier.
        storages = request.storages[:1] if verb == "barrier" else request.storages
        sizes = [0] if verb == "barrier" else sorted({_numel(size, world, request) for size in request.sizes})
        for storage in storages:
            for numel in sizes:
                first, second = (tensor[:numel] for tensor in arenas[storage])
                cases.append(
                    _TimedCase(verb, storage, first.nbytes, make_case(verb, world.group, first, second))
                )
    return cases


def _numel(num_bytes: int, world: World, request: Request) -> int:
    """The elements of a whole tensor of about so many bytes, which ranks can have equal pieces of."""
    return world.size * max(1, round(num_bytes / DTYPES[request.dtype].itemsize / world.size))


def _check_all(cases: list[_TimedCase], world: World, pattern: Pattern) -> list[_VisitPlan]:
    """How often to come to each case, whose results have been found right."""
    estimates = [_check(case, world, pattern) for case in cases]
    return [_VisitPlan.of(seconds) for seconds in slowest(world, [estimates])[0]]


def _check(case: _TimedCase, world: World, pattern: Pattern) -> float:
    """Seconds of a case, roughly."""
    gives, gets = case.exercise.gives, case.exercise.gets
    for part in gets:
        part.tensor.fill_(pattern.outside)
    if gives is not None:
        pattern.fill(gives)
    seconds = _visit(case.exercise, 1, world)
    if not all(map(pattern.fits, gets)):
        raise CommError(
            f"{case.verb} gives wrong results",
            given=f"{case.num_bytes} bytes of {case.storage} storage over {world.group.transport.name}, "
            f"rank {world.rank} of {world.size}",
            hint="another --backend",
        )
    # The first of its kind may have set up connections. Large ones do not show it.
    return seconds if case.num_bytes > _LARGE else _visit(case.exercise, 2, world)


_LARGE = 1 << 22


def _round(cases: list[_TimedCase], visits: list[_VisitPlan], world: World, *, seed: int) -> list[float]:
    """This rank's seconds by case and visit. See [Note: what one time is]."""
    due = [(case, done.repeats) for case, done in zip(cases, visits, strict=True) for _ in range(done.number)]
    order = list(range(len(due)))
    random.Random(seed).shuffle(order)
    times = [0.0] * len(due)
    for number in order:
        case, repeats = due[number]
        times[number] = _visit(case.exercise, repeats, world)
    return times


def _visit(make_case: Case, repeats: int, world: World) -> float:
    """Seconds per communication."""
    barrier(world.group)
    _finish(world)
    begin = time.perf_counter()
    for _ in range(repeats):
        make_case.run()
    _finish(world)
    return (time.perf_counter() - begin) / (repeats * make_case.trips)


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def slowest(world: World, times: list[list[float]]) -> list[list[float]]:
    """The longest of all ranks' times, each. Every rank must call it, with as many."""
    longest = torch.tensor(times, dtype=torch.float64, device=world.device)
    all_reduce(longest, world.group, "max")
    found: list[list[float]] = longest.tolist()
    return found


def num_hosts(world: World) -> int:
    """Every rank must call it."""
    mine = torch.tensor([zlib.crc32(socket.gethostname().encode())], device=world.device)
    names = torch.empty(world.size, dtype=mine.dtype, device=world.device)
    all_gather(names, mine, world.group)
    return len(set(names.tolist()))
