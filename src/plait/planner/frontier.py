"""Plans to choose from besides the fastest: those of less memory, and the best of each tp, pp and zero."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from plait.plan import Plan
from plait.planner.best_first import Counts, Field, Search
from plait.planner.bounds import Prices
from plait.planner.outcome import Outcome
from plait.planner.price import Price
from plait.planner.search import HEADROOM, Found
from plait.planner.space import VALUES, Decided, Space, read_pins
from plait.planner.workload import OWN

_SMALLER = 0.96  # times a plan's memory: what the next smaller one has at most
_MOST_SMALLER = 24
_STEPS, _STEPS_OF_DEGREES = 1500, 60  # of the search for one plan
_MOST_DEGREES = 60


def alternatives(
    found: Found,
    pins: str = "",
    report: Callable[[Counts], None] = lambda _: None,
    *,
    headroom: float = HEADROOM,
    of_degrees: bool = True,
) -> list[Outcome]:
    """Return the best plans; plans of less and less memory; and, if `of_degrees`, one of every tp, pp and
    zero, as far as one is found soon: each a fast one, if not the fastest. Ascending by time, on the best
    plan's cluster."""
    best = found.best[0]
    cluster, work = best.cluster, best.work
    space = Space(best.model, cluster.num_devices, work.batch, read_pins(pins))
    at = Field(cluster, space, Prices(best.model, cluster, work, OWN), headroom=headroom)
    known = [each.price for each in found.best if each.cluster == cluster]
    others = _of_degrees(at, report) if of_degrees else ()
    prices = {price.plan: price for price in (*others, *_smaller(at, known[0], report), *known)}
    return [replace(best, price=price) for price in sorted(prices.values(), key=lambda price: price.step_s)]


def front(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the plans of which none of the others is as fast with as little memory. Ascending by time."""
    kept: list[Outcome] = []
    for each in sorted(outcomes, key=lambda each: (each.price.step_s, each.price.memory_high_bytes)):
        if not kept or each.price.memory_high_bytes < kept[-1].price.memory_high_bytes:
            kept.append(each)
    return kept


def _smaller(at: Field, best: Price, report: Callable[[Counts], None]) -> Iterator[Price]:
    price: Price | None = best
    for _ in range(_MOST_SMALLER):
        if price is None:
            return
        yield price
        device = replace(at.cluster.device, memory_bytes=_SMALLER * price.memory_high_bytes)
        smaller = replace(at, cluster=replace(at.cluster, device=device), headroom=0.0)
        price = _soon(smaller, _STEPS, report)


def _of_degrees(at: Field, report: Callable[[Counts], None]) -> Iterator[Price]:
    degrees = {(plan.cols, plan.pp) for plan in at.space.expand(Plan(), Decided.NOTHING) if plan.rows == 1}
    for cols, pp in sorted(degrees)[:_MOST_DEGREES]:
        for zero in at.space.values("zero", VALUES["zero"]):
            space = replace(at.space, only={"tp": {Plan(tp=str(cols)).tp}, "pp": {pp}, "zero": {zero}})
            price = _soon(replace(at, space=space), _STEPS_OF_DEGREES, report)
            if price is not None:
                yield price


def _soon(at: Field, steps: int, report: Callable[[Counts], None]) -> Price | None:
    """Return the fastest plan, or the fastest that was seen in so many steps."""
    search = Search(report=report, most_steps=steps)
    price = next((price for _, price in search.fastest([at])), None)
    seen = search.least[1]
    return at.pricing.price(seen) if price is None and seen is not None else price
