"""A clock for schedules: when every action begins and ends, given how long actions take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.errors import ScheduleError
from plait.plan.schedule.action import Action, Kind, Schedule
from plait.plan.schedule.validate import check, dependencies, live_activations, run_untimed


@dataclass(frozen=True)
class Durations:
    """Seconds (or any other unit) of each stage's actions, and of the transfers between stages.

    backward    of the input's gradient; a whole backward takes `backward` + `weight`
    transfer    from stage s to s + 1, and of a gradient back: one fewer than stages. It takes no rank's time
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
        """The same for all stages. As in papers: a backward is twice a forward, and its halves are equal."""
        return cls(
            (forward,) * num_stages,
            (backward,) * num_stages,
            (weight,) * num_stages,
            (transfer,) * (num_stages - 1),
        )

    def of(self, action: Action, split: bool) -> float:
        """How long an action takes; `split` where a backward is its input gradient alone."""
        if action.kind is Kind.F:
            return self.forward[action.stage]
        if action.kind is Kind.W:
            return self.weight[action.stage]
        return self.backward[action.stage] + (0 if split else self.weight[action.stage])


class Span(NamedTuple):
    """An action from its start to its end, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank did, or will do, what: of a clock, or measured."""

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
        """What a rank computes, of `total`."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle(self, rank: int) -> float:
        return self.total - self.busy(rank)

    @property
    def ideal(self) -> float:
        """How long it would take if no rank waited: what the busiest one computes."""
        return max((self.busy(rank) for rank in range(len(self.ranks))), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Of all ranks' time, what they idle."""
        if not self.total:
            return 0.0
        return sum(self.idle(rank) for rank in range(len(self.ranks))) / (self.total * len(self.ranks))


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """When every action begins and ends, each as soon as its rank is free and what it needs is there.

    Takes a schedule that `check` passes; raises ScheduleError for one that cannot run, and for durations of
    another number of stages.
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


def peak_bytes(schedule: Schedule, bytes_of_stage: Sequence[float]) -> tuple[float, ...]:
    """The most bytes of saved activations that each rank holds at once.

    bytes_of_stage   what one micro-batch's forward saves, by stage; it is there until the whole backward, or
                     its weights' half, has ended. Whatever the durations, as a rank's order says it all
    """
    return tuple(
        max(live_activations(schedule, actions, bytes_of_stage), default=0.0) for actions in schedule.ranks
    )


def peak_activation_bytes(
    schedule: Schedule, rank: int, kept: Mapping[int, tuple[int, int] | None]
) -> int | None:
    """The most bytes over a rank's actions. `kept`: of each of its stages, what one micro-batch keeps from
    its forward to its backward, and from there to the backward's other half; None where nobody can say."""
    most = now = 0
    for action in schedule.ranks[rank]:
        found = kept[action.stage]
        if found is None:
            return None
        saved, rest = found
        splits = (action.stage, action.micro) in schedule.split
        if action.kind is Kind.F:
            now += saved
        elif action.kind is Kind.B:
            now += (rest if splits else 0) - saved
        else:
            now -= rest
        most = max(most, now)
    return most


def _check_durations(schedule: Schedule, durations: Durations) -> None:
    stages = schedule.num_stages
    numbers = (len(durations.forward), len(durations.backward), len(durations.weight))
    if numbers != (stages,) * 3 or len(durations.transfer) != stages - 1:
        raise ScheduleError(
            "the durations are not of this schedule's stages",
            given=f"{numbers[0]} forwards, {numbers[1]} backwards, {numbers[2]} weights' halves and "
            f"{len(durations.transfer)} transfers",
            expected=f"one for each of {stages} stages, and {stages - 1} transfers between them",
        )
