"""Tables, JSON and pages of searched, priced and compared plans."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from plait.pages.timeline import WORDS, timeline_values
from plait.plan import format_bytes
from plait.plan.axes import EXPERTS, FEATURES, HIDDEN, SEQUENCE
from plait.plan.grid import Grid
from plait.plan.schedule import Kind, Timeline, simulate
from plait.plan.schedule.load import load_schedule, stages_of
from plait.planner.communication import Links
from plait.planner.compute import Rates
from plait.planner.frontier import front
from plait.planner.memory import kept_bytes, micro_bytes, peak_memory, rank_layouts, rank_memory, with_method
from plait.planner.plan_families import format_seconds
from plait.planner.ranked_plan import RankedPlan
from plait.planner.search import HEADROOM, SearchResult
from plait.planner.stages import block_counts
from plait.planner.step_estimate import (
    TYPICAL_ERROR,
    Overlapped,
    StageSeconds,
    StepEstimate,
    action_durations,
    stage_gathers,
    stage_seconds,
    step_reductions,
    update_s,
)
from plait.planner.traffic import axis_traffic
from plait.tables import facts_table, plain, table

_FOOT = (
    "interval: in the unit of the step; of 100 published steps it had not seen, 81 are within theirs.\n"
    "MFU: with attention to earlier tokens only, and to the full sequence; without recomputation.\n"
    "memory: of the fullest rank, upper end. exposed: waiting for communication."
)
_NEARLY = 1.03  # times the best plan's step
_NEAR = "\n~: the interval overlaps with the first plan's"
_MOST_ACTIONS, _MOST_OF_PAGE = 20_000, 80_000  # in a timeline, and in all of a page
COLORS = {"exposed": "#e07b39", "hidden": "#f0c24b", "optimizer": "#8e6bd1", "rest": "#8a93a0"}
_TOTALS = "dollars: device-hours at the device's price. energy: devices at full load only."


def search_tables(found: SearchResult, choices: list[RankedPlan]) -> Iterator[RenderableType]:
    """Yield what a search found: the best plan, the ranked ones, plans of less memory among the `choices`,
    and a line for each rejected family."""
    first = found.best[0]
    yield plain(f"{_plan(first)}\n")
    ranks = [
        f"{'~' if rank > 1 and found.is_near_tie(ranked) else ''}{rank}"
        for rank, ranked in enumerate(found.best, 1)
    ]
    caption = _FOOT + (_NEAR if any(rank.startswith("~") for rank in ranks) else "")
    differ = any(each.cluster != first.cluster for each in found.best)
    columns = [_devices(each) * differ + _columns(each) for each in found.best]
    yield _ranked(subject(first), ranks, columns, caption)
    if first.tokens is not None:
        title = f"training on {first.tokens:,.0f} tokens"
        yield _ranked(title, ranks, [_totals(ranked) for ranked in found.best], _TOTALS)
    plans = [
        plain(f"{rank:>3}  {_plan(ranked)}{_across_hosts(ranked)}")
        for rank, ranked in zip(ranks, found.best, strict=True)
    ]
    near = [each for each in choices if each.estimate.step_s <= _NEARLY * first.estimate.step_s]
    simple = min(near, key=lambda each: (len(str(each.plan).split()), each.estimate.step_s))
    plans.append(plain(f"simplest within {_NEARLY - 1:.0%}: {_plan(simple)}"))
    yield Group(Text("plans", style="italic"), *plans)
    if found.near:
        title = f"as fast within {TYPICAL_ERROR:.0%}, the planner's typical error"
        times = [f"{each.estimate.step_s / first.estimate.step_s:.2f}x" for each in found.near]
        texts = [
            plain(f"{slower}  {_plan(each)}{_across_hosts(each)}")
            for slower, each in zip(times, found.near, strict=True)
        ]
        yield Group(Text(title, style="italic"), *texts)
    leaner = [
        (
            format_seconds(each.estimate.step_s),
            format_bytes(int(each.estimate.memory_high_bytes)),
            _plan(each),
        )
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


def _limits(found: SearchResult) -> Iterator[str]:
    """Yield what the answer does not know."""
    first = found.best[0]
    if not found.is_complete:
        yield "The search has ended because its time was over (--seconds): there may be faster plans."
    if first.model.experts:
        yield f"Experts: {_experts(first)}. No constant was fitted to runs with experts."


def _experts(ranked: RankedPlan) -> str:
    """Say how many parameters of a mixture a token uses, and what uneven routing needs."""
    model = ranked.model
    text = (
        f"a token uses {model.active_params:,} of {model.num_params:,} parameters; time and memory are for "
    )
    if ranked.plan.capacity != "none":
        return f"{text}a capacity, the same for all routing"
    text += "tokens that are spread evenly"
    if ranked.plan.ep == 1:
        return text
    return f"{text}; a rank whose experts get all of ep's needs {format_bytes(int(uneven_bytes(ranked)))}"


def uneven_bytes(ranked: RankedPlan) -> float:
    """Return the memory of a rank whose experts get all tokens of the ranks of ep, upper end."""
    columns = ranked.model.expert_columns(ranked.plan.cols, ranked.plan.ep)
    program = replace(ranked.software, expert_rows=ranked.plan.ep * columns)
    return peak_memory(ranked.model, ranked.plan, ranked.cluster, ranked.work, program)[1]


def _across_hosts(ranked: RankedPlan) -> str:
    grid = Grid.from_plan(ranked.plan)
    for key, axes in {"tp": (HIDDEN, FEATURES), "cp": SEQUENCE, "ep": EXPERTS}.items():
        used = grid.used(*axes)
        if used and grid.stride(used[0]) * grid.degree(used[0]) > ranked.cluster.domain_size:
            return f"  ({key} across hosts)"
    return ""


def estimate_tables(ranked: RankedPlan) -> Iterator[RenderableType]:
    """Yield the figures of one plan, and the parts of its step."""
    memory = f"{_memory(ranked)}, upper end on the fullest rank"
    facts = {"plan": _plan(ranked) + _across_hosts(ranked)} | dict(_columns(ranked)) | {"memory": memory}
    if ranked.model.experts:
        facts["experts"] = _experts(ranked)
    yield facts_table(subject(ranked), [*facts.items(), *_totals(ranked)])
    estimate = ranked.estimate
    rows = [
        (part, format_seconds(seconds), f"{seconds / estimate.step_s:.1%}", _hidden(ranked, part))
        for part, seconds in estimate.parts.items()
    ]
    yield table("a step of the slowest rank", ("part", "time", "share", "hidden"), rows, left=("part",))
    yield plain(f"memory, middle estimate on the fullest rank: {estimate.memory}")


def compare_table(one: RankedPlan, other: RankedPlan) -> RenderableType:
    """Return the parts of the steps of two plans, and their differences."""
    left, right = one.estimate, other.estimate
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


def to_json(ranked: RankedPlan) -> dict[str, Any]:
    """Return the figures of a plan, in SI units."""
    estimate = ranked.estimate
    return {
        "plan": _plan(ranked),
        "devices": ranked.cluster.num_devices,
        "step_s": estimate.step_s,
        "interval_s": [estimate.low_s, estimate.high_s],
        "tokens_per_s_per_device": ranked.tokens_per_s_per_device,
        "mfu_causal": ranked.mfu(causal=True),
        "mfu_full": ranked.mfu(causal=False),
        "memory_bytes": estimate.memory.total,
        "memory_high_bytes": estimate.memory_high_bytes,
        "memory_uneven_bytes": uneven_bytes(ranked),
        "parameters": ranked.model.num_params,
        "active_parameters": ranked.model.active_params,
        "exposed_s": ranked.exposed_s,
        "bubble": estimate.bubble,
        "parts_s": dict(estimate.parts),
        "hidden_s": dict(estimate.hidden),
        "days": ranked.days,
        "device_hours": ranked.device_hours,
        "dollars": ranked.dollars,
        "joules": ranked.joules,
    }


def search_json(found: SearchResult) -> dict[str, Any]:
    """Return the ranked plans and the rejected families."""
    return {
        "cluster": found.best[0].cluster.name,
        "plans": [to_json(each) | {"near_tie": found.is_near_tie(each)} for each in found.best],
        "near": [to_json(each) for each in found.near],
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


def subject(ranked: RankedPlan) -> str:
    """Name the model, the devices and the work of a step."""
    work = ranked.work
    of = f"{ranked.cluster.num_devices:,} {ranked.cluster.device.name}"
    return f"{ranked.model.name} on {of}, {work.batch:,} x {work.sequence:,} tokens a step"


def _ranked(title: str, ranks: list[str], rows: list[list[tuple[str, str]]], caption: str) -> RenderableType:
    """Return a table with a row of values for each rank, by their headings."""
    headings = ("", *(name for name, _ in rows[0]))
    values = ((rank, *(value for _, value in row)) for rank, row in zip(ranks, rows, strict=True))
    return table(title, headings, values, caption=caption, left=(), pad_edge=False)


def _columns(ranked: RankedPlan) -> list[tuple[str, str]]:
    """Headings and values of a plan's step."""
    estimate = ranked.estimate
    return [
        ("step", format_seconds(estimate.step_s)),
        ("interval", _interval(estimate)),
        ("tok/s/dev", f"{ranked.tokens_per_s_per_device:,.0f}"),
        ("MFU, full", f"{ranked.mfu(causal=True):.0%}, {ranked.mfu(causal=False):.0%}"),
        ("memory", format_bytes(int(estimate.memory_high_bytes))),
        ("exposed", f"{ranked.exposed_s / estimate.step_s:.1%}"),
        ("bubble", f"{estimate.bubble:.1%}"),
    ]


def _devices(ranked: RankedPlan) -> list[tuple[str, str]]:
    return [("devices", f"{ranked.cluster.num_devices:,}")]


def _totals(ranked: RankedPlan) -> list[tuple[str, str]]:
    """Headings and values of the complete training; none if its tokens are unknown."""
    if ranked.days is None or ranked.device_hours is None:
        return []
    assert ranked.dollars is not None, "follows from the tokens"
    assert ranked.joules is not None, "follows from the tokens"
    return [
        *_devices(ranked),
        ("days", f"{ranked.days:,.1f}"),
        ("device-hours", f"{ranked.device_hours:,.0f}"),
        ("dollars", f"{ranked.dollars:,.0f}"),
        ("energy", f"{ranked.joules / 3.6e9:,.1f} MWh"),
    ]


def _plan(ranked: RankedPlan) -> str:
    """Return the plan's text, with the precision even if it is the default."""
    text = str(ranked.plan)
    return text if "precision=" in text else f"{text} precision={ranked.plan.precision}"


def _interval(estimate: StepEstimate) -> str:
    """Format a time's interval in the unit of the time, without it."""
    scale = 1 if estimate.step_s >= 1 else 1e3 if estimate.step_s >= 1e-3 else 1e6
    low, high = scale * estimate.low_s, scale * estimate.high_s
    return f"{low:,.0f}-{high:,.0f}" if high >= 1000 else f"{low:.3g}-{high:.3g}"


def _memory(ranked: RankedPlan) -> str:
    """Format a plan's memory, and whether the device has it."""
    needed, device = ranked.estimate.memory_high_bytes, ranked.cluster.device
    of = f" of {format_bytes(int(device.memory_bytes))}"
    fits = ", within the headroom" if needed > device.memory_bytes * (1 - HEADROOM) else ""
    return format_bytes(int(needed)) + of + (fits if needed <= device.memory_bytes else ": does not fit")


def _hidden(ranked: RankedPlan, part: str) -> str:
    hidden = ranked.estimate.hidden.get(part, 0.0)
    return format_seconds(hidden) if hidden else ""


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))


def page_values(ranked_plans: Sequence[RankedPlan]) -> dict[str, Any]:
    """Return the plans, in the given order, with what their page draws. Those on the front, and then the
    fastest, have timelines, as far as these are not too large."""
    best = ranked_plans[0]
    on_front = front(list(ranked_plans))
    order = sorted(ranked_plans, key=lambda each: (each not in on_front, each.estimate.step_s))
    left, detailed = _MOST_OF_PAGE, {}
    for each in order:
        actions = 3 * each.plan.pp * each.plan.micro * max(1, each.plan.num_chunks)
        is_drawn = actions <= min(left, _MOST_ACTIONS) and each.cluster.ranks_per_core == 1
        left -= actions if is_drawn else 0
        detailed[each.plan] = None if each.plan.num_servers else step_values(each, is_drawn=is_drawn)
    cluster = best.cluster
    return {
        "capacity_bytes": cluster.device.memory_bytes,
        "machine": {
            "name": str(cluster),
            "device": cluster.device.name,
            "domain": max(cluster.domain_size, cluster.host_size),
            "hosts": cluster.num_hosts,
            "host_size": cluster.host_size,
            "topology": cluster.topology,
            "network_bytes_per_s": cluster.network_bytes_per_s,
            "link_bytes_per_s": cluster.device.link_bytes_per_s,
        },
        "choices": [
            to_json(each)
            | {"degrees": _degrees(each), "front": each in on_front, "detail": detailed[each.plan]}
            for each in ranked_plans
        ],
    }


def _degrees(ranked: RankedPlan) -> dict[str, Any]:
    plan = ranked.plan
    return {"dp": plan.data_ranks, "tp": plan.tp, "pp": plan.pp, "zero": plan.zero}


def step_values(ranked: RankedPlan, *, is_drawn: bool = True) -> dict[str, Any]:
    """Return a step in detail: every action on a clock, memory of the pipeline's ranks, bytes along the axes.
    `is_drawn`: with the actions."""
    model, cluster, work, software = ranked.model, ranked.cluster, ranked.work, ranked.software
    plan = with_method(model, ranked.plan, cluster.host_size)
    batch = work.batch // (plan.data_ranks * plan.micro)
    on_gpu = "cpu" not in cluster.device.name.lower()
    memory = []
    for rank in range(plan.pp):
        use = rank_memory(model, plan, rank, batch, work.sequence, software, on_gpu)
        kept = kept_bytes(model, plan, rank, batch, work.sequence, software)
        memory.append({**asdict(use), "total": use.total, "kept_peak": kept})
    return {
        "timeline": _timeline(ranked) if is_drawn else None,
        "ranks_per_stage": plan.num_ranks // plan.pp,
        "memory": memory,
        "stage_bytes": micro_bytes(model, plan, batch, work.sequence, software),
        "axes": [asdict(each) for each in axis_traffic(model, plan, cluster, work, ranked.estimate.step_s)],
    }


def _timeline(ranked: RankedPlan) -> dict[str, Any]:
    """Return the actions of the pipeline's ranks, then their reductions and optimizers."""
    model, plan, cluster, work = ranked.model, ranked.plan, ranked.cluster, ranked.work
    software, constants = ranked.software, cluster.constants
    rates = Rates.of(cluster.device, plan.precision, plan.tf32, constants)
    links = Links.of(cluster, constants)
    stages = stage_seconds(model, plan, cluster, work)
    gathers = stage_gathers(model, plan, links, stages, software, constants)
    durations = action_durations(model, plan, links, stages, gathers, work)
    timeline = simulate(load_schedule(plan.schedule, plan.pp, plan.micro, plan.num_chunks), durations)
    values = timeline_values(timeline, "one step", "s")
    _add_communication(values, timeline, stages, gathers)
    ranks, counts = stages_of(plan.schedule, plan.pp, plan.num_chunks), block_counts(model, plan, software)
    layouts = rank_layouts(model, plan, software)
    reductions = step_reductions(plan, links, stages, layouts, software, constants)
    first = len(values["types"])
    for rank, row in enumerate(values["rows"]):
        blocks = sum(counts[stage] for stage, of in enumerate(ranks) if of == rank)
        hidden = f"{1e3 * reductions[rank].hidden:.3g} ms of it are hidden by the computation"
        parts = (
            reductions[rank].exposed,
            update_s(plan, layouts[rank], blocks, rates, links, software),
            constants.step_s,
        )
        end = row["spans"][-1]
        for number, seconds in enumerate(parts):
            if seconds:
                row["spans"] += (first + 3 * rank + number, -1, end, end + seconds)
                end += seconds
        values["types"] += [
            _type(
                "exposed communication", "reduction of gradients, all-gather of parameters", "exposed", hidden
            ),
            _type("optimizer", "optimizer", "optimizer"),
            _type("rest of a step", "rest of a step: Python, loss, norm", "rest"),
        ]
    return values | {"total": ranked.estimate.step_s, "bubble": ranked.estimate.bubble}


def _type(name: str, label: str, color: str, facts: str = "") -> dict[str, Any]:
    return {"name": name, "label": label, "color": COLORS[color], "ink": "black", "facts": facts}


def _add_communication(
    values: dict[str, Any],
    timeline: Timeline,
    stages: Sequence[StageSeconds],
    gathers: Sequence[Overlapped],
) -> None:
    """Add to the types of actions the shares of their time that wait for communication, and that hide it."""
    values |= {"exposed": COLORS["exposed"], "hidden": COLORS["hidden"]}
    spans = {(span.action.kind, span.action.stage): span for spans in timeline.ranks for span in spans}
    by_label = {each["label"]: each for each in values["types"]}
    for (kind, stage), span in spans.items():
        if kind is Kind.W or span.end == span.start:  # an embedding alone sends no gradient back
            continue
        seconds, extra = stages[stage], gathers[stage]
        if kind is Kind.F:
            exposed, hidden = seconds.tensor_forward + extra.forward, extra.hidden_forward
        else:
            exposed = seconds.tensor - seconds.tensor_forward + extra.backward
            hidden = extra.hidden - extra.hidden_forward
        length = span.end - span.start
        described = by_label[f"{WORDS[kind]} of stage {stage}"]
        described["exposed"], described["hidden"] = exposed / length, min(1.0, hidden / length)
        described["facts"] = f"communication: {1e3 * exposed:.3g} ms exposed, {1e3 * hidden:.3g} ms hidden"
