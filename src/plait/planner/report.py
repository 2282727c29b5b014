"""Tables and JSON of searched, priced and compared plans."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from plait.plan import format_bytes
from plait.planner.families import format_seconds
from plait.planner.frontier import front
from plait.planner.outcome import Outcome
from plait.planner.price import Price
from plait.planner.search import HEADROOM, Found
from plait.tables import facts_table, plain, table

_FOOT = (
    "interval: in the unit of the step; of 100 published steps it had not seen, 77 are within theirs.\n"
    "MFU: with attention to earlier tokens only, and to the full sequence; without recomputation.\n"
    "memory: of the fullest rank, upper end. exposed: waiting for communication."
)
_NEARLY = 1.03  # times the best plan's step
_LONG = 1 << 15  # tokens of a sequence
_NEAR = "\n~: the interval overlaps with the first plan's"
_TOTALS = "dollars: device-hours at the device's price. energy: devices at full load only."


def search_tables(found: Found, choices: list[Outcome]) -> Iterator[RenderableType]:
    """Yield what a search found: the ranked plans, those of less memory among the `choices`, and a line for
    each rejected family."""
    first = found.best[0]
    ranks = [
        f"{'~' if rank > 1 and found.is_near_tie(outcome) else ''}{rank}"
        for rank, outcome in enumerate(found.best, 1)
    ]
    caption = _FOOT + (_NEAR if any(rank.startswith("~") for rank in ranks) else "")
    differ = any(each.cluster != first.cluster for each in found.best)
    columns = [_devices(each) * differ + _columns(each) for each in found.best]
    yield _ranked(subject(first), ranks, columns, caption)
    if first.tokens is not None:
        title = f"training on {first.tokens:,.0f} tokens"
        yield _ranked(title, ranks, [_totals(outcome) for outcome in found.best], _TOTALS)
    plans = [
        plain(f"{rank:>3}  {_plan(outcome)}{_across_hosts(outcome)}")
        for rank, outcome in zip(ranks, found.best, strict=True)
    ]
    near = [each for each in choices if each.price.step_s <= _NEARLY * first.price.step_s]
    simple = min(near, key=lambda each: (len(str(each.plan).split()), each.price.step_s))
    plans.append(plain(f"simplest within {_NEARLY - 1:.0%}: {_plan(simple)}"))
    yield Group(Text("plans", style="italic"), *plans)
    leaner = [
        (format_seconds(each.price.step_s), format_bytes(int(each.price.memory_high_bytes)), _plan(each))
        for each in front(choices)[1:]
    ]
    if leaner:
        yield table("the fastest of less memory", ("step", "memory", "plan"), leaner, left=("plan",))
    if found.families:
        lines = [(family.name, family.reason) for family in found.families]
        yield table(
            "not among them",
            ("plans with", "the fastest of them, or the memory that it lacks"),
            lines,
            left=("plans with", "the fastest of them, or the memory that it lacks"),
        )
    yield from map(plain, _limits(found))
    counts = found.counts
    yield plain(
        f"{counts.bounded:,} plans and parts of plans, {counts.too_large:,} dropped because of memory, "
        f"{counts.priced:,} priced"
    )


def _limits(found: Found) -> Iterator[str]:
    """Yield what the answer does not know."""
    first = found.best[0]
    if not found.is_complete:
        yield "The search has ended because its time was over (--seconds): there may be faster plans."
    if first.model.experts:
        yield (
            "Experts: not calibrated by any published run; plait has no expert parallelism yet; tokens are "
            "assumed to be spread evenly."
        )
    if first.work.sequence >= _LONG:
        yield (
            "Context parallelism is not implemented yet: published trainings on sequences of this length use "
            "it, and keep a higher MFU than any plan above."
        )


def _across_hosts(outcome: Outcome) -> str:
    ranks = outcome.plan.rows * outcome.plan.cols
    return "  (tp across hosts)" if ranks > outcome.cluster.domain_size else ""


def price_tables(outcome: Outcome) -> Iterator[RenderableType]:
    """Yield the figures of one plan, and the parts of its step."""
    memory = f"{_memory(outcome)}, upper end on the fullest rank"
    facts = {"plan": _plan(outcome) + _across_hosts(outcome)} | dict(_columns(outcome)) | {"memory": memory}
    yield facts_table(subject(outcome), [*facts.items(), *_totals(outcome)])
    price = outcome.price
    rows = [
        (part, format_seconds(seconds), f"{seconds / price.step_s:.1%}", _hidden(outcome, part))
        for part, seconds in price.parts.items()
    ]
    yield table("a step of the slowest rank", ("part", "time", "share", "hidden"), rows, left=("part",))
    yield plain(f"memory, middle estimate on the fullest rank: {price.memory}")


def compare_table(one: Outcome, other: Outcome) -> RenderableType:
    """Return the parts of the steps of two plans, and their differences."""
    left, right = one.price, other.price
    parts = dict.fromkeys((*left.parts, *right.parts))
    rows = [(part, left.parts.get(part, 0.0), right.parts.get(part, 0.0)) for part in parts]
    shown: list[tuple[str, ...]] = [
        (part, format_seconds(a), format_seconds(b), _signed(b - a))
        for part, a, b in (*rows, ("total", left.step_s, right.step_s))
        if a or b
    ]
    shown.append(("memory", *map(_memory, (one, other)), ""))
    caption = (
        f"A: {_plan(one)}\nB: {_plan(other)}\nB takes {right.step_s / left.step_s:.2f} times as long as A"
    )
    return table(subject(one), ("part", "A", "B", "B - A"), shown, left=("part",), caption=caption)


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a plan, in SI units."""
    price = outcome.price
    return {
        "plan": _plan(outcome),
        "devices": outcome.cluster.num_devices,
        "step_s": price.step_s,
        "interval_s": [price.low_s, price.high_s],
        "tokens_per_s_per_device": outcome.tokens_per_s_per_device,
        "mfu_causal": outcome.mfu(causal=True),
        "mfu_full": outcome.mfu(causal=False),
        "memory_bytes": price.memory.total,
        "memory_high_bytes": price.memory_high_bytes,
        "exposed_s": outcome.exposed_s,
        "bubble": price.bubble,
        "parts_s": dict(price.parts),
        "hidden_s": dict(price.hidden),
        "days": outcome.days,
        "device_hours": outcome.device_hours,
        "dollars": outcome.dollars,
        "joules": outcome.joules,
    }


def search_json(found: Found) -> dict[str, Any]:
    """Return the ranked plans and the rejected families."""
    return {
        "cluster": found.best[0].cluster.name,
        "plans": [to_json(each) | {"near_tie": found.is_near_tie(each)} for each in found.best],
        "families": [
            {
                "name": family.name,
                "plan": str(family.best.plan) if family.best else None,
                "slowdown": family.slowdown,
                "excess_bytes": family.excess_bytes,
                "reason": family.reason,
            }
            for family in found.families
        ],
        "considered": found.counts.bounded,
        "priced": found.counts.priced,
    }


def subject(outcome: Outcome) -> str:
    """Name the model, the devices and the work of a step."""
    work = outcome.work
    of = f"{outcome.cluster.num_devices:,} {outcome.cluster.device.name}"
    return f"{outcome.model.name} on {of}, {work.batch:,} x {work.sequence:,} tokens a step"


def _ranked(title: str, ranks: list[str], rows: list[list[tuple[str, str]]], caption: str) -> RenderableType:
    """Return a table with a row of values for each rank, by their headings."""
    headings = ("", *(name for name, _ in rows[0]))
    values = ((rank, *(value for _, value in row)) for rank, row in zip(ranks, rows, strict=True))
    return table(title, headings, values, caption=caption, left=(), pad_edge=False)


def _columns(outcome: Outcome) -> list[tuple[str, str]]:
    """Headings and values of a plan's step."""
    price = outcome.price
    return [
        ("step", format_seconds(price.step_s)),
        ("interval", _interval(price)),
        ("tok/s/dev", f"{outcome.tokens_per_s_per_device:,.0f}"),
        ("MFU, full", f"{outcome.mfu(causal=True):.0%}, {outcome.mfu(causal=False):.0%}"),
        ("memory", format_bytes(int(price.memory_high_bytes))),
        ("exposed", f"{outcome.exposed_s / price.step_s:.1%}"),
        ("bubble", f"{price.bubble:.1%}"),
    ]


def _devices(outcome: Outcome) -> list[tuple[str, str]]:
    return [("devices", f"{outcome.cluster.num_devices:,}")]


def _totals(outcome: Outcome) -> list[tuple[str, str]]:
    """Headings and values of the complete training; none if its tokens are unknown."""
    if outcome.days is None or outcome.device_hours is None:
        return []
    assert outcome.dollars is not None, "follows from the tokens"
    assert outcome.joules is not None, "follows from the tokens"
    return [
        *_devices(outcome),
        ("days", f"{outcome.days:,.1f}"),
        ("device-hours", f"{outcome.device_hours:,.0f}"),
        ("dollars", f"{outcome.dollars:,.0f}"),
        ("energy", f"{outcome.joules / 3.6e9:,.1f} MWh"),
    ]


def _plan(outcome: Outcome) -> str:
    """Return the plan's text, with the precision even if it is the default."""
    text = str(outcome.plan)
    return text if "precision=" in text else f"{text} precision={outcome.plan.precision}"


def _interval(price: Price) -> str:
    """Format a time's interval in the unit of the time, without it."""
    scale = 1 if price.step_s >= 1 else 1e3 if price.step_s >= 1e-3 else 1e6
    return f"{scale * price.low_s:.3g}-{scale * price.high_s:.3g}"


def _memory(outcome: Outcome) -> str:
    """Format a plan's memory, and whether the device has it."""
    needed, device = outcome.price.memory_high_bytes, outcome.cluster.device
    of = f" of {format_bytes(int(device.memory_bytes))}"
    fits = ", within the headroom" if needed > device.memory_bytes * (1 - HEADROOM) else ""
    return format_bytes(int(needed)) + of + (fits if needed <= device.memory_bytes else ": does not fit")


def _hidden(outcome: Outcome, part: str) -> str:
    hidden = outcome.price.hidden.get(part, 0.0)
    return format_seconds(hidden) if hidden else ""


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))
