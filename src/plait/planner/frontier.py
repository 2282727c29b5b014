"""Plans to choose from besides the fastest: plans of less memory, and the best of each tp, pp and zero."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from plait.plan import Plan
from plait.planner.best_first import Field, Search, SearchCounts
from plait.planner.ranked_plan import RankedPlan
from plait.planner.search import SearchResult
from plait.planner.space import VALUES, Decided
from plait.planner.step_estimate import StepEstimate

_SMALLER = 0.96  # times a plan's memory: what the next smaller one has at most
_MOST_SMALLER = 24
_STEPS, _STEPS_OF_DEGREES = 1500, 60  # of the search for one plan
_MOST_DEGREES = 60


def alternatives(
    found: SearchResult,
    report: Callable[[SearchCounts], None] = lambda _: None,
    *,
    of_degrees: bool = True,
) -> list[RankedPlan]:
    """Return the best plans; plans of less and less memory; and, if `of_degrees`, one of every tp, pp and
    zero, as far as one is found soon: each a fast one, if not the fastest. Ascending by time, on the best
    plan's cluster."""
    best, at = found.best[0], replace(found.field, weight=1.0, limit_s=math.inf)
    known = [each.estimate for each in (*found.best, *found.near) if each.cluster == best.cluster]
    others = _of_degrees(at, report) if of_degrees else ()
    estimates = {estimate.plan: estimate for estimate in (*others, *_smaller(at, known[0], report), *known)}
    return [
        replace(best, estimate=estimate)
        for estimate in sorted(estimates.values(), key=lambda estimate: estimate.step_s)
    ]


def front(ranked_plans: list[RankedPlan]) -> list[RankedPlan]:
    """Return the plans that no other plan matches in both time and memory, in ascending order of time."""
    kept: list[RankedPlan] = []
    for each in sorted(
        ranked_plans, key=lambda each: (each.estimate.step_s, each.estimate.memory_high_bytes)
    ):
        if not kept or each.estimate.memory_high_bytes < kept[-1].estimate.memory_high_bytes:
            kept.append(each)
    return kept


def _smaller(at: Field, best: StepEstimate, report: Callable[[SearchCounts], None]) -> Iterator[StepEstimate]:
    estimate: StepEstimate | None = best
    for _ in range(_MOST_SMALLER):
        if estimate is None:
            return
        yield estimate
        device = replace(at.cluster.device, memory_bytes=_SMALLER * estimate.memory_high_bytes)
        smaller = replace(at, cluster=replace(at.cluster, device=device), headroom=0.0)
        estimate = _soon(smaller, _STEPS, report)


def _of_degrees(at: Field, report: Callable[[SearchCounts], None]) -> Iterator[StepEstimate]:
    degrees = {(plan.cols, plan.pp) for plan in at.space.expand(Plan(), Decided.NOTHING) if plan.rows == 1}
    for cols, pp in sorted(degrees)[:_MOST_DEGREES]:
        for zero in at.space.values("zero", VALUES["zero"]):
            space = replace(at.space, only={"tp": {Plan(tp=str(cols)).tp}, "pp": {pp}, "zero": {zero}})
            estimate = _soon(replace(at, space=space), _STEPS_OF_DEGREES, report)
            if estimate is not None:
                yield estimate


def _soon(at: Field, steps: int, report: Callable[[SearchCounts], None]) -> StepEstimate | None:
    """Return the fastest plan, or the fastest that was seen in so many steps."""
    search = Search(report=report, most_steps=steps)
    estimate = next((estimate for _, estimate in search.fastest([at])), None)
    seen = search.least[1]
    return at.estimates.estimate(seen) if estimate is None and seen is not None else estimate
