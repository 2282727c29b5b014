"""Seconds of a pipeline's step: the schedule's actions on a clock.

[Note: compiled schedules]
`plan/schedule` generates and simulates; its order of actions is compiled once per schedule into a flat list
that a short loop evaluates for any durations, with the result of `simulate`. After its first micro-batches a
schedule is periodic: for many micro-batches, two shorter runs that differ by one period of micro-batches
give the rest.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from plait.plan.schedule import make_schedule
from plait.plan.schedule.action import Action, Kind, Schedule
from plait.plan.schedule.generators import GENERATORS
from plait.plan.schedule.load import load_schedule
from plait.plan.schedule.simulate import Durations
from plait.plan.schedule.validate import run_untimed


class PipelineEnds(NamedTuple):
    """Per rank: when its last action ends, and how long it computes."""

    end: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def total(self) -> float:
        return max(self.end)


# Its rank, the index of its duration, the step whose result arrives from another rank, and the index of that
# transfer; -1: none. Not a class, which takes longer to make than all else in a step.
_Step = tuple[int, int, int, int]


@lru_cache(maxsize=1 << 12)
def pipeline_s(name: str, ranks: int, micros: int, chunks: int, durations: Durations) -> PipelineEnds:
    """Evaluate a schedule. See [Note: compiled schedules]."""
    if ranks == 1 and chunks <= 1:
        busy = micros * (durations.forward[0] + durations.backward[0] + durations.weight[0])
        return PipelineEnds((busy,), (busy,))
    fill = _FILLS * ranks
    while micros > fill + 2 * ranks and not name.startswith("file:"):
        few = fill + (micros - fill) % ranks
        first = _evaluate(_compiled(name, ranks, few, chunks), durations)
        second = _evaluate(_compiled(name, ranks, few + ranks, chunks), durations)
        busiest = max(high - low for low, high in zip(first.busy, second.busy, strict=True))
        if second.total - first.total >= busiest * (1 - 1e-9):
            periods = (micros - few) // ranks
            return PipelineEnds(
                *(
                    tuple(low + periods * (high - low) for low, high in zip(*pair, strict=True))
                    for pair in zip(first, second, strict=True)
                )
            )
        fill *= 2  # the rank with most work still catches up on waits of the first micro-batches
    return _evaluate(_compiled(name, ranks, micros, chunks), durations)


_FILLS = 3  # pipelines of micro-batches after which most schedules are periodic


@lru_cache(maxsize=512)
def _compiled(name: str, ranks: int, micros: int, chunks: int) -> tuple[int, tuple[_Step, ...]]:
    is_file = name.startswith("file:")
    schedule = (
        load_schedule(name, ranks, micros, chunks) if is_file else _schedule(name, ranks, micros, chunks)
    )
    return schedule.num_ranks, _steps(schedule)


def _steps(schedule: Schedule) -> tuple[_Step, ...]:
    stages, rank_of, split = schedule.num_stages, schedule.rank_of, schedule.split
    index: dict[tuple[Kind, int, int], int] = {}
    steps: list[_Step] = []
    for rank, action in run_untimed(schedule).order:
        kind, stage, micro = action
        offset = 0 if kind is Kind.F else 2 if kind is Kind.W else 1 if (stage, micro) in split else 3
        need = transfer = -1
        sender = stage - 1 if kind is Kind.F else stage + 1
        if kind is not Kind.W and rank_of.get(sender, rank) != rank:
            need, transfer = index[kind, sender, micro], min(stage, sender)
        index[action] = len(steps)
        steps.append((rank, offset * stages + stage, need, transfer))
    return tuple(steps)


def _evaluate(compiled: tuple[int, tuple[_Step, ...]], durations: Durations) -> PipelineEnds:
    ranks, steps = compiled
    full = tuple(b + w for b, w in zip(durations.backward, durations.weight, strict=True))
    seconds = (*durations.forward, *durations.backward, *durations.weight, *full)
    transfers = durations.transfer
    free, busy = [0.0] * ranks, [0.0] * ranks
    ended: list[float] = []
    for rank, duration, need, transfer in steps:
        start = free[rank]
        if need >= 0:
            arrived = ended[need] + transfers[transfer]
            if arrived > start:
                start = arrived
        taken = seconds[duration]
        busy[rank] += taken
        end = free[rank] = start + taken
        ended.append(end)
    return PipelineEnds(tuple(free), tuple(busy))


def _schedule(name: str, ranks: int, micros: int, chunks: int) -> Schedule:
    """Return a schedule for so many micro-batches, or a file's for its own."""
    if name.startswith("file:"):
        return load_schedule(name, ranks, 0)
    return make_schedule(name, ranks, micros, chunks)


@lru_cache(maxsize=256)
def stages_of(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage."""
    schedule = _schedule(name, ranks, 1, chunks)
    return tuple(schedule.rank_of[stage] for stage in range(schedule.num_stages))


@lru_cache(maxsize=256)
def stages_by_rank(name: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every rank, in model order."""
    of = stages_of(name, ranks, chunks)
    return tuple(tuple(stage for stage, at in enumerate(of) if at == rank) for rank in range(max(of) + 1))


Held = tuple[tuple[int, int], ...]  # see `in_flight`


def in_flight(name: str, ranks: int, micros: int, chunks: int, rank: int) -> tuple[Held, ...]:
    """Return what a rank holds at some moments, one of them its peak: for each of its stages, in model order,
    the micro-batches between forward and backward, and between backward and weight gradients."""
    if name in ("gpipe", "bfs"):  # all forwards come before the first backward
        return (((micros, 0),) * stages_of(name, ranks, chunks).count(rank),)
    return _in_flight(name, ranks, min(micros, 2 * ranks), chunks, rank)


@lru_cache(maxsize=1 << 12)
def _in_flight(name: str, ranks: int, micros: int, chunks: int, rank: int) -> tuple[Held, ...]:
    if name.startswith("file:"):
        return _largest(_schedule(name, ranks, micros, chunks).ranks[rank])
    return _largest(GENERATORS[name].make(rank, ranks, micros, chunks))


def _largest(actions: Sequence[Action]) -> tuple[Held, ...]:
    """Return what a rank holds after its forwards, without moments that another one covers."""
    saved = dict.fromkeys(sorted({stage for _, stage, _ in actions}), 0)
    split = {(stage, micro) for kind, stage, micro in actions if kind is Kind.W}
    deferred = dict(saved)
    found: list[Held] = []
    for kind, stage, micro in actions:
        if kind is Kind.F:
            saved[stage] += 1
            held = tuple((saved[of], deferred[of]) for of in saved)
            if not any(_covers(other, held) for other in found):
                found = [other for other in found if not _covers(held, other)] + [held]
        elif kind is Kind.W:
            deferred[stage] -= 1
        else:
            saved[stage] -= 1
            deferred[stage] += (stage, micro) in split
    return tuple(found)


def _covers(one: Held, other: Held) -> bool:
    return all(a[0] >= b[0] and a[1] >= b[1] for a, b in zip(one, other, strict=True))
