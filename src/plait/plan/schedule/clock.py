"""A clock for schedules: when every action begins and ends, given how long actions take."""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.plan.schedule.action import Action, Schedule


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
        every = (num_stages,)
        return cls(
            (forward,) * every[0], (backward,) * every[0], (weight,) * every[0], (transfer,) * (every[0] - 1)
        )


@dataclass(frozen=True)
class Span:
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
    def of(cls, schedule: Schedule, ranks: Sequence[Sequence[Span]]) -> "Timeline":
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
    def bubble_fraction(self) -> float:
        """Of all ranks' time, what they idle."""
        if not self.total:
            return 0.0
        return sum(self.idle(rank) for rank in range(len(self.ranks))) / (self.total * len(self.ranks))
