"""Times of collectives on the ranks of a world, each checked before it is timed.

[Note: definition of a time]
A round visits every case (collective, size, storage), in a new order: a slow minute of the machine, or a
cache filled by the previous case, affects all cases alike, and not all repetitions of one. Short cases, which
are the noisiest, are visited four times. A visit is a barrier, then repetitions back to back for some
milliseconds. A rank's time is their mean, the visit's that of the slowest rank, the case's the median over
visits. As in nccl-tests, a rank that does not wait (the source of a broadcast) may be ahead of the others by
some repetitions: for small sizes this is the interval between consecutive messages.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from plait.bench.cases import Case, Pattern, make_case
from plait.bench.request import Request
from plait.comm import World, all_reduce, barrier, ranks_by_host
from plait.errors import CommError, ConfigError

_VISIT_S = 0.005
_SHORT_S, _SHORT_VISITS = 0.02, 4
_MAX_REPEATS = 500
_MIN_ROUNDS, _MAX_ROUNDS = 3, 25  # unless the request sets them


@dataclass(frozen=True, slots=True)
class Row:
    """The times of one case. `num_bytes`: of the full tensor, a multiple of the number of ranks."""

    collective: str
    storage: str
    num_bytes: int
    median_s: float
    min_s: float
    visits: int
    repeats: int  # per visit
    algorithm: str = "auto"  # the transport's own


@dataclass(frozen=True)
class Measurement:
    """Times, and the setup they were measured on."""

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
    collective: str
    storage: str
    num_bytes: int
    case: Case
    algorithm: str


class _Visits(NamedTuple):
    """Visits of a case per round, and repetitions per visit."""

    number: int
    repeats: int


def measure(
    world: World, request: Request, report_progress: Callable[[str], None] = lambda _: None
) -> Measurement:
    """Measure the collectives. Collective: every rank passes the same request and gets the same result.
    `report_progress` is called with a status line.

    Without `request.rounds` it stops when another round would exceed the budget, but not before three rounds.
    Raises CommError if a collective gives wrong results, ConfigError if a GPU has too little memory.
    """
    start = time.perf_counter()
    buffers = _buffers(world, request)
    cases = _cases(world, request, buffers)
    report_progress("checking results")
    pattern = Pattern(torch_dtype(request), world.size, world.device)
    estimates = [_check(timed, world, pattern) for timed in cases]
    visits = [*map(_visits, slowest(world, [estimates])[0])]
    for tensor in (tensor for pair in buffers.values() for tensor in pair):
        tensor.zero_()  # repeated sums in place stay finite
    times: list[list[float]] = []
    longest_round_s = 0.0
    while not _is_over(world, request, len(times), time.perf_counter() - start + longest_round_s):
        report_progress(f"measuring: round {len(times) + 1}")
        round_start = time.perf_counter()
        times.append(_round(cases, visits, world, seed=len(times)))
        longest_round_s = max(longest_round_s, time.perf_counter() - round_start)
    return Measurement(
        rows=_rows(cases, visits, slowest(world, times)),
        transport=world.group.transport.name,
        device=world.device.type,
        num_ranks=world.size,
        num_hosts=len(ranks_by_host(world.group, world.device)),
        dtype=request.dtype,
        rounds=len(times),
        seconds=time.perf_counter() - start,
    )


def _visits(seconds: float) -> _Visits:
    """Return the visits of a case that takes about `seconds`."""
    repeats = max(1, min(_MAX_REPEATS, round(_VISIT_S / max(seconds, 1e-9))))
    return _Visits(_SHORT_VISITS if seconds * repeats < _SHORT_S else 1, repeats)


def _rows(cases: list[_TimedCase], visits: list[_Visits], rounds: list[list[float]]) -> tuple[Row, ...]:
    rows, start = [], 0
    for timed, plan in zip(cases, visits, strict=True):
        seconds = [time_s for round_s in rounds for time_s in round_s[start : start + plan.number]]
        start += plan.number
        of_case = (timed.collective, timed.storage, timed.num_bytes)
        median_s, min_s = statistics.median(seconds), min(seconds)
        rows.append(Row(*of_case, median_s, min_s, len(seconds), plan.repeats, timed.algorithm))
    return tuple(rows)


def _is_over(world: World, request: Request, rounds: int, end_s: float) -> bool:
    """Return whether to stop. `end_s`: estimated end of another round. Collective, as clocks differ."""
    if request.rounds is not None:
        return rounds >= request.rounds
    over = rounds >= _MAX_ROUNDS or (rounds >= _MIN_ROUNDS and end_s > request.budget_s)
    return world.any_flag(over)


def _buffers(world: World, request: Request) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, by storage, two tensors of the largest size, with all pages touched. Cases view them."""
    dtype = torch_dtype(request)
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
            expected="two tensors for each storage",
            hint="--sizes 1K:16M",
        ) from error


def _cases(world: World, request: Request, buffers: dict[str, tuple[Tensor, Tensor]]) -> list[_TimedCase]:
    cases = []
    for collective in request.collectives:
        storages, sizes = request.storages, sorted({_numel(size, world, request) for size in request.sizes})
        if collective == "barrier":  # it has no tensors
            storages, sizes = storages[:1], [0]
        algorithms = request.algorithms_of(collective, world.size)
        for algorithm, storage, numel in product(algorithms, storages, sizes):
            first, second = (tensor[:numel] for tensor in buffers[storage])
            case = make_case(collective, world.group, first, second, algorithm)
            cases.append(_TimedCase(collective, storage, first.nbytes, case, algorithm))
    return cases


def _numel(num_bytes: int, world: World, request: Request) -> int:
    """Return the elements of a full tensor of about `num_bytes`, divisible by the number of ranks."""
    return world.size * max(1, round(num_bytes / torch_dtype(request).itemsize / world.size))


def _check(timed: _TimedCase, world: World, pattern: Pattern) -> float:
    """Check the results of a case, and return its approximate time in seconds."""
    case_input, outputs = timed.case.input, timed.case.outputs
    for slice_ in outputs:
        slice_.tensor.fill_(pattern.unused_value)
    if case_input is not None:
        pattern.fill(case_input)
    seconds = _visit(timed.case, 1, world)
    if not all(map(pattern.matches, outputs)):
        raise CommError(
            f"{timed.collective} gives wrong results",
            given=f"algorithm {timed.algorithm}, "
            f"{timed.num_bytes} bytes of {timed.storage} storage over {world.group.transport.name}, "
            f"rank {world.rank} of {world.size}",
            expected="the reduction that one rank alone computes",
            hint="another --transport",
        )
    # The first call may have set up connections, which is negligible for large ones.
    return seconds if timed.num_bytes > _LARGE_BYTES else _visit(timed.case, 2, world)


_LARGE_BYTES = 1 << 22


def _round(cases: list[_TimedCase], visits: list[_Visits], world: World, *, seed: int) -> list[float]:
    """Return this rank's seconds by case and visit. See [Note: definition of a time]."""
    visit_list = [
        (timed, plan.repeats) for timed, plan in zip(cases, visits, strict=True) for _ in range(plan.number)
    ]
    order = list(range(len(visit_list)))
    random.Random(seed).shuffle(order)
    times = [0.0] * len(visit_list)
    for index in order:
        timed, repeats = visit_list[index]
        times[index] = _visit(timed.case, repeats, world)
    return times


def _visit(case: Case, repeats: int, world: World) -> float:
    """Return seconds per communication."""
    barrier(world.group)
    synchronize(world)
    start = time.perf_counter()
    for _ in range(repeats):
        case.run()
    synchronize(world)
    return (time.perf_counter() - start) / (repeats * case.num_messages)


def synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def slowest(world: World, times: list[list[float]]) -> list[list[float]]:
    """Return the elementwise maximum of all ranks' times. Collective, with the same shape on all ranks."""
    longest = torch.tensor(times, dtype=torch.float64, device=world.device)
    all_reduce(longest, world.group, "max")
    result: list[list[float]] = longest.tolist()
    return result


def device_for(backend: str, local_ranks: int) -> str:
    """Return "cuda" if the ranks of this host get a GPU each, or must."""
    num_gpus = torch.cuda.device_count()
    if backend == "nccl" and num_gpus < local_ranks:
        raise ConfigError(
            "NCCL needs a GPU per rank",
            given=f"{local_ranks} ranks on a host with {num_gpus} GPUs",
            expected=f"at most {num_gpus} local ranks",
            hint="--transport gloo" if num_gpus < 2 else f"--ranks {num_gpus}",
        )
    use_cuda = backend in ("auto", "nccl") and num_gpus >= local_ranks
    return "cuda" if use_cuda else "cpu"


def torch_dtype(request: Request) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype
