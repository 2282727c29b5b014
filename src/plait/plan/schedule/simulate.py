"""Simulated timing of schedules: when every action starts and ends, given the durations of actions.

[Note: compiled schedules]
The order of a schedule's actions is compiled into a flat list that a short loop evaluates for any durations.
After its first micro-batches a schedule is periodic: for many micro-batches, two shorter runs that differ by
one period of micro-batches give the ends of the rest.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.plan.schedule.action import FORWARD, WEIGHT, Action, Kind, Schedule
from plait.plan.schedule.load import FILE, load_schedule
from plait.plan.schedule.validate import check, run_untimed


@dataclass(frozen=True)
class Durations:
    """Seconds (or any other unit) of each stage's actions, and of the transfers between stages.

    backward    of the input gradient; an unsplit backward takes `backward` + `weight`
    transfer    from stage s to s + 1, and of a gradient back: one fewer than stages. Does not occupy the
                ranks
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
    ) -> "Durations":
        """The same for all stages. Defaults as in papers: a backward is twice a forward, split into equal
        parts."""
        return cls(
            (forward,) * num_stages,
            (backward,) * num_stages,
            (weight,) * num_stages,
            (transfer,) * (num_stages - 1),
        )


class Span(NamedTuple):
    """An action with its start and end, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Simulated or measured start and end of every action."""

    schedule: Schedule
    ranks: tuple[tuple[Span, ...], ...]

    @classmethod
    def from_spans(cls, schedule: Schedule, ranks: Sequence[Sequence[Span]]) -> "Timeline":
        return cls(schedule, tuple(tuple(spans) for spans in ranks))

    @property
    def total(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        spans = [span for rank in self.ranks for span in rank]
        return max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank computes, out of `total`."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle(self, rank: int) -> float:
        return self.total - self.busy(rank)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the total time of all ranks that is idle."""
        if not self.total:
            return 0.0
        return sum(self.idle(rank) for rank in range(len(self.ranks))) / (self.total * len(self.ranks))


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Compute when every action starts and ends, each as soon as its rank is free and its inputs are there.

    For a valid schedule; raises ScheduleError for one that cannot run, and for durations of another number of
    stages.
    """
    _check_durations(schedule, durations)
    run = run_untimed(schedule)
    if run.stuck:
        check(schedule)
    compiled = _compile(schedule, run.order)
    ends, _ = _evaluate(compiled, durations)
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    for (rank, action), (_, _, need, transfer), end in zip(run.order, compiled.steps, ends, strict=True):
        free = spans[rank][-1].end if spans[rank] else 0.0
        arrived = ends[need] + durations.transfer[transfer] if need >= 0 else 0.0
        spans[rank].append(Span(action, max(free, arrived), end))
    return Timeline.from_spans(schedule, spans)


class PipelineEnds(NamedTuple):
    """Per rank: when its last action ends, and how long it computes."""

    end: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def total(self) -> float:
        return max(self.end)


@lru_cache(maxsize=1 << 12)
def pipeline_s(name: str, ranks: int, micros: int, chunks: int, durations: Durations) -> PipelineEnds:
    """Return the ends of a schedule by name: of its `simulate`. See [Note: compiled schedules]."""
    if ranks == 1 and chunks <= 1:
        busy = micros * (durations.forward[0] + durations.backward[0] + durations.weight[0])
        return PipelineEnds((busy,), (busy,))
    fill = _FILLS * ranks
    while micros > fill + 2 * ranks and not name.startswith(FILE):
        few = fill + (micros - fill) % ranks
        first, second = (_ends(name, ranks, number, chunks, durations) for number in (few, few + ranks))
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
    return _ends(name, ranks, micros, chunks, durations)


_FILLS = 3  # pipelines of micro-batches after which most schedules are periodic


def _ends(name: str, ranks: int, micros: int, chunks: int, durations: Durations) -> PipelineEnds:
    compiled, seconds = _compiled(name, ranks, micros, chunks), _seconds(durations)
    _, free = _evaluate(compiled, durations)
    busy = (sum([seconds[at] * times for at, times in of_rank]) for of_rank in compiled.counts)
    return PipelineEnds(tuple(free), tuple(busy))


# Its rank, the index of its duration, the step whose result arrives from another rank, and the index of that
# transfer; -1: none. Not a class, which takes longer to make than all else in a step.
_Step = tuple[int, int, int, int]


class _Compiled(NamedTuple):
    """See [Note: compiled schedules]. `counts`: per rank, how often it takes which duration."""

    steps: tuple[_Step, ...]
    counts: tuple[tuple[tuple[int, int], ...], ...]


@lru_cache(maxsize=512)
def _compiled(name: str, ranks: int, micros: int, chunks: int) -> _Compiled:
    schedule = load_schedule(name, ranks, micros, chunks)
    return _compile(schedule, run_untimed(schedule).order)


def _compile(schedule: Schedule, order: Sequence[tuple[int, Action]]) -> _Compiled:
    stages, rank_of, split = schedule.num_stages, schedule.rank_of, schedule.split
    index: dict[tuple[Kind, int, int], int] = {}
    steps: list[_Step] = []
    for rank, action in order:
        kind, stage, micro = action
        offset = 0 if kind is FORWARD else 2 if kind is WEIGHT else 1 if (stage, micro) in split else 3
        need = transfer = -1
        sender = stage - 1 if kind is FORWARD else stage + 1
        if kind is not WEIGHT and rank_of.get(sender, rank) != rank:
            need, transfer = index[kind, sender, micro], min(stage, sender)
        index[action] = len(steps)
        steps.append((rank, offset * stages + stage, need, transfer))
    counts: list[list[tuple[int, int]]] = [[] for _ in schedule.ranks]
    for (rank, duration), times in Counter(map(itemgetter(0, 1), steps)).items():
        counts[rank].append((duration, times))
    return _Compiled(tuple(steps), tuple(map(tuple, counts)))


def _seconds(durations: Durations) -> tuple[float, ...]:
    """The durations of forwards, backwards, weight gradients and unsplit backwards, by stage."""
    full = tuple(b + w for b, w in zip(durations.backward, durations.weight, strict=True))
    return (*durations.forward, *durations.backward, *durations.weight, *full)


def _evaluate(compiled: _Compiled, durations: Durations) -> tuple[list[float], list[float]]:
    """End of every step, and end of every rank."""
    seconds, transfers = _seconds(durations), durations.transfer
    free = [0.0] * len(compiled.counts)
    ends: list[float] = []
    for rank, duration, need, transfer in compiled.steps:
        start = free[rank]
        if need >= 0:
            arrived = ends[need] + transfers[transfer]
            if arrived > start:
                start = arrived
        end = free[rank] = start + seconds[duration]
        ends.append(end)
    return ends, free


def global_order(schedule: Schedule) -> dict[Action, int]:
    """Return the position of every action in one order of all ranks' actions: that in which they end, for
    stages of equal duration. Each action comes after all that it depends on. Raises ScheduleError."""
    spans = [
        span for rank in simulate(schedule, Durations.uniform(schedule.num_stages)).ranks for span in rank
    ]
    ordered = sorted(spans, key=lambda span: (span.end, span.action.stage))
    return {span.action: index for index, span in enumerate(ordered)}


def _check_durations(schedule: Schedule, durations: Durations) -> None:
    stages = schedule.num_stages
    counts = (len(durations.forward), len(durations.backward), len(durations.weight))
    if counts != (stages,) * 3 or len(durations.transfer) != stages - 1:
        raise ScheduleError(
            "the durations do not match the number of stages",
            given=f"{counts[0]} forwards, {counts[1]} backwards, {counts[2]} weight gradients and "
            f"{len(durations.transfer)} transfers",
            expected=f"one for each of {stages} stages, and {stages - 1} transfers between them",
            hint=f"Durations.uniform({stages})",
        )
