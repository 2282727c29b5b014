"""The communication of a step for the parameters and gradients of one unit.

`plan/estimate/traffic.py` sums this list, from facts of a dry run or of a model's sizes, and the planner
prices it. It does not say which messages a collective consists of (codes, factors, steps of an algorithm).
"""

from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from plait.plan.plan import Plan


class Collective(Enum):
    """A collective for one unit."""

    GATHER = auto()  # of parameters, over ranks that shard their states
    PARTIAL_SUM = auto()  # of gradients of parameters whose gradients are partial sums on several columns
    REDUCE = auto()  # of gradients, to the owners of their ranges
    SUM_RANGES = auto()  # of owned ranges, over replicas


class During(Enum):
    """Computation at the same time."""

    PASSES = auto()  # every forward; calls in excess of the number of micro-batches are in backwards
    BACKWARDS = auto()  # of every micro-batch
    LAST_BACKWARD = auto()
    NEXT_FORWARD = auto()  # the first one after the update


class Event(NamedTuple):
    """A collective, its calls in a step, and when they are."""

    collective: Collective
    calls: int
    during: During


def unit_events(
    plan: Plan, *, trains: bool = True, gathers: int | None = None, covers_replicas: bool = False
) -> tuple[Event, ...]:
    """Return the events of a unit in a step from the second one on.

    trains           its parameters are trained
    gathers          number of gathers; None: one per pass, although a unit may stay unsharded between two
    covers_replicas  the reduction to owners is over replicas too
    """
    if gathers is None:
        per_pass = 1 if plan.reshard == "step" else 2 * plan.micro
        gathers = per_pass if plan.zero == 3 else int(trains)
    micros = plan.micro if trains and not plan.accumulates_full else 0
    return _events(plan.zero, gathers, trains, micros, covers_replicas or plan.local_steps > 0)


@cache  # a search asks for few of them, and often
def _events(zero: int, gathers: int, trains: bool, micros: int, owners_only: bool) -> tuple[Event, ...]:
    """`micros`: number of micro-batches after each of which gradients are reduced; 0: once a step."""
    events = []
    if gathers and zero:
        during = During.PASSES if zero == 3 else During.NEXT_FORWARD
        events.append(Event(Collective.GATHER, gathers, during))
    if trains:
        times = (micros, During.BACKWARDS) if micros else (1, During.LAST_BACKWARD)
        events += [Event(Collective.PARTIAL_SUM, *times), Event(Collective.REDUCE, *times)]
        if not owners_only:
            events.append(Event(Collective.SUM_RANGES, 1, During.LAST_BACKWARD))
    return tuple(events)
