"""Plans that are not among the best because of one of their values, and the reason."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.plan import Plan, format_bytes
from plait.planner.best_first import Field, Search
from plait.planner.space import VALUES, Decided
from plait.planner.step_estimate import StepEstimate

_MOST_STEPS = 400  # of the search for a family's best plan
_SLOWER = 1.005  # times the best plan's step: less is as fast
_KEYS = ("pp", "tp", "cp", "ep", "zero", "schedule", "recompute", "sp", "offload")


@dataclass(frozen=True)
class PlanFamily:
    """All plans with one value that none of the best plans has.

    name           such as `zero=0`
    best           the fastest that was found; None: unknown, or none fits
    slowdown       its time by the best plan's; a lower bound of all if `best` is None
    excess_bytes   above the device's memory, of the plan that needs the least; None if one fits
    reason         a sentence
    """

    name: str
    best: StepEstimate | None
    slowdown: float | None
    excess_bytes: float | None
    reason: str


def rejected_families(at: Field, best: Sequence[StepEstimate], searched: Search) -> Iterator[PlanFamily]:
    """Yield the families that none of the best plans belongs to. `searched`: the search that found these."""
    degrees = list(at.space.expand(Plan(), Decided.NOTHING))
    for key in _KEYS:
        shown = {getattr(estimate.plan, key) for estimate in best}
        for name, values in _groups(key, at, degrees):
            if not shown & values and time.process_time() < searched.end_s:
                space = replace(at.space, only={key: values})
                family = _family(name, key, replace(at, space=space), best, searched)
                if family is not None:
                    yield family


def _groups(key: str, at: Field, degrees: Sequence[Plan]) -> Iterator[tuple[str, set[Any]]]:
    """Yield names and values of the families of a key."""
    if key in at.space.pins:
        return
    if key == "tp":
        grids = {plan.tp: plan for plan in degrees}
        for tp, plan in grids.items():
            if plan.rows == 1:
                yield f"tp={tp}", {tp}
        yield "tp of several rows", {tp for tp, plan in grids.items() if plan.rows > 1}
        return
    of_degrees = {getattr(plan, key) for plan in degrees}
    values = of_degrees if key in ("pp", "cp", "ep") else at.space.values(key, VALUES[key])
    for value in sorted(values):
        yield f"{key}={str(value).lower() if isinstance(value, bool) else value}", {value}


def _family(
    name: str, key: str, at: Field, ranked: Sequence[StepEstimate], searched: Search
) -> PlanFamily | None:
    """The fastest plan and why it is slower, or why none fits; None for a family without plans."""
    best = ranked[0]
    fastest = searched.within(at, _MOST_STEPS)
    estimate = next((estimate for _, estimate in fastest.fastest()), None)
    if estimate is not None:
        return _found(name, estimate, best, "")
    found = () if fastest.is_exhausted else (fastest.least[1], _nearby(key, at, ranked, fastest))
    plans = [plan for plan in found if plan is not None]
    lean = Search(
        report=searched.report, most_steps=_MOST_STEPS, end_s=searched.end_s, enough=at.capacity_bytes
    )
    smallest = None if plans else lean.smallest(at)
    if smallest is not None:
        excess = smallest[1] - at.capacity_bytes
        reason = f"does not fit by {format_bytes(int(excess))}; {smallest[0]}"
        return PlanFamily(name, None, None, excess, reason)
    if fastest.is_exhausted:
        return None
    least = fastest.reached / at.weight / best.step_s
    if lean.least[0] <= at.capacity_bytes and lean.least[1] is not None:
        like = _nearby(key, at, [at.estimates.estimate(lean.least[1])], fastest)
        plans = [plan for plan in (lean.least[1], like) if plan is not None]
    if not plans:
        bound = f"at least {least:.2f}x; " if least >= _SLOWER else ""
        return PlanFamily(
            name, None, least, None, f"{bound}no plan that fits was found in {_MOST_STEPS} steps"
        )
    estimate = min((at.estimates.estimate(plan) for plan in plans), key=lambda each: each.step_s)
    return _found(name, estimate, best, f"{least:.2f}x to " if least >= _SLOWER else "at most ")


def _found(name: str, estimate: StepEstimate, best: StepEstimate, bound: str) -> PlanFamily:
    """A family with its fastest plan, or one that is at most `bound` slower than that."""
    slowdown = estimate.step_s / best.step_s
    if bound or slowdown >= _SLOWER:
        reason = f"{bound}{slowdown:.2f}x: {difference(estimate, best)}"
    else:
        more = estimate.memory_high_bytes - best.memory_high_bytes
        memory = f", {format_bytes(int(abs(more)))} {'more' if more > 0 else 'less'} memory"
        same = format_bytes(int(abs(more))) == format_bytes(0)
        reason = f"as fast as the best: {difference(estimate, best)}{'' if same else memory}"
    return PlanFamily(name, estimate, slowdown, None, f"{reason}; {estimate.plan}")


def _nearby(key: str, at: Field, ranked: Sequence[StepEstimate], searched: Search) -> Plan | None:
    """Return a fast plan of a family among those that have the best plans' values of other keys."""
    for others in (_KEYS, ("pp", "tp", "schedule", "sp"), ("zero",)):
        near = {other: {getattr(p.plan, other) for p in ranked} for other in others if other != key}
        space = replace(at.space, only={**at.space.only, **near})
        search = searched.within(replace(at, space=space), _MOST_STEPS)
        next(search.fastest(), None)
        if search.least[1] is not None:
            return search.least[1]
    return None


def difference(estimate: StepEstimate, best: StepEstimate) -> str:
    """The part of a step that makes a plan slower than the best."""
    more = {part: seconds - best.parts.get(part, 0.0) for part, seconds in estimate.parts.items()}
    part = max(more, key=lambda part: more[part])
    return f"{part} +{format_seconds(more[part])}"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits."""
    if seconds >= 1:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
