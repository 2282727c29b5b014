"""Simulated timing of schedules: when every action starts and ends, given the durations of actions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.plan.schedule.action import Action, Kind, Schedule
from plait.plan.schedule.validate import check, dependencies, run_untimed


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

    def of(self, action: Action, split: bool) -> float:
        """Duration of an action; `split`: its backward is the input gradient only."""
        if action.kind is Kind.F:
            return self.forward[action.stage]
        if action.kind is Kind.W:
            return self.weight[action.stage]
        return self.backward[action.stage] + (0 if split else self.weight[action.stage])


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
    free = [0.0] * schedule.num_ranks
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    for rank, action in run.order:
        start = free[rank]
        for need in dependencies(action, schedule.num_stages):
            arrived = ended[need]
            if schedule.rank_of[need.stage] != rank:
                arrived += durations.transfer[min(need.stage, action.stage)]
            start = max(start, arrived)
        end = start + durations.of(action, (action.stage, action.micro) in schedule.split)
        ended[action] = free[rank] = end
        spans[rank].append(Span(action, start, end))
    return Timeline.from_spans(schedule, spans)


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
