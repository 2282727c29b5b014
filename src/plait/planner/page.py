"""Values of a plan's page: plans to choose from, and one step of each in detail."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.pages.timeline import WORDS, timeline_values
from plait.plan import AXES, CommCount, CommKey, Grid, Layout, Plan
from plait.plan.axes import FEATURES, STAGES, TENSOR, TOKENS
from plait.plan.events import Event, RankFacts, StageFacts, ring_bytes, step_events, sum_events
from plait.plan.memory import COMPUTE_BYTES, MASTER_BYTES
from plait.plan.schedule import Kind, Timeline, simulate
from plait.plan.schedule.load import load_schedule, stages_of
from plait.planner.cluster import Cluster
from plait.planner.communication import Group, Links, network
from plait.planner.compute import BlockWork, Rates
from plait.planner.frontier import front
from plait.planner.memory import kept_bytes, micro_bytes, rank_memory, stage_units
from plait.planner.model_shape import ModelShape
from plait.planner.plan_report import to_json
from plait.planner.ranked_plan import RankedPlan
from plait.planner.stages import block_counts
from plait.planner.step_estimate import (
    Overlapped,
    StageSeconds,
    action_durations,
    block_collectives,
    message_bytes,
    messages_of,
    rank_layouts,
    recomputed_share,
    stage_gathers,
    stage_seconds,
    step_reductions,
    update_s,
)
from plait.planner.workload import PLAIT, Workload

_MOST_ACTIONS, _MOST_OF_PAGE = 20_000, 80_000  # in a timeline, and in all of a page
COLORS = {"exposed": "#e07b39", "hidden": "#f0c24b", "optimizer": "#8e6bd1", "rest": "#8a93a0"}


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
    model, plan, cluster, work = ranked.model, ranked.plan, ranked.cluster, ranked.work
    batch = work.batch // (plan.data_ranks * plan.micro)
    on_gpu = "cpu" not in cluster.device.name.lower()
    memory = []
    for rank in range(plan.pp):
        use = rank_memory(model, plan, rank, batch, work.sequence, PLAIT, on_gpu)
        kept = kept_bytes(model, plan, rank, batch, work.sequence, PLAIT)
        memory.append({**asdict(use), "total": use.total, "kept_peak": kept})
    return {
        "timeline": _timeline(ranked) if is_drawn else None,
        "ranks_per_stage": plan.num_ranks // plan.pp,
        "memory": memory,
        "stage_bytes": micro_bytes(model, plan, batch, work.sequence, PLAIT),
        "axes": [asdict(each) for each in axis_traffic(model, plan, cluster, work, ranked.estimate.step_s)],
    }


def _timeline(ranked: RankedPlan) -> dict[str, Any]:
    """Return the actions of the pipeline's ranks, then their reductions and optimizers."""
    model, plan, cluster, work = ranked.model, ranked.plan, ranked.cluster, ranked.work
    constants = cluster.constants
    rates = Rates.of(cluster.device, plan.precision, plan.tf32, constants)
    links = Links.of(cluster, constants)
    stages = stage_seconds(model, plan, cluster, work)
    gathers = stage_gathers(model, plan, links, stages, PLAIT, constants)
    durations = action_durations(model, plan, links, stages, gathers, work)
    timeline = simulate(load_schedule(plan.schedule, plan.pp, plan.micro, plan.num_chunks), durations)
    values = timeline_values(timeline, "one step", "s")
    _add_communication(values, timeline, stages, gathers)
    ranks, counts = stages_of(plan.schedule, plan.pp, plan.num_chunks), block_counts(model, plan, PLAIT)
    layouts = rank_layouts(model, plan, PLAIT)
    reductions = step_reductions(plan, links, stages, layouts, PLAIT, constants)
    first = len(values["types"])
    for rank, row in enumerate(values["rows"]):
        blocks = sum(counts[stage] for stage, of in enumerate(ranks) if of == rank)
        hidden = f"{1e3 * reductions[rank].hidden:.3g} ms of it are hidden by the computation"
        parts = (
            reductions[rank].exposed,
            update_s(plan, layouts[rank].numel, blocks, rates, links),
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
        if kind is Kind.W:
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


# --- bytes along the axes


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of a step along one axis, of the rank that sends the most.

    stride         ranks between neighbours
    sent_bytes     by one rank
    local          ranks of a group in one domain; `domains` that a group spans
    link_fraction  of the step, at the usable bandwidth, that a device's link in its domain carries the bytes
    network_fraction  the same of a domain's links to the network, for all its groups
    """

    axis: str
    degree: int
    stride: int
    sent_bytes: float
    local: int
    domains: int
    link_fraction: float
    network_fraction: float


def axis_traffic(
    model: ModelShape, plan: Plan, cluster: Cluster, work: Workload, step_s: float
) -> list[AxisTraffic]:
    """Return the traffic of every axis with more than one rank."""
    links = Links.of(cluster, cluster.constants)
    ranks, grid = plan.num_ranks, Grid.from_plan(plan)
    groups = {axis: Group(grid.degree(axis), grid.stride(axis), ranks) for axis in AXES}
    # With a named algorithm, ranks of one stage send differently much.
    differ = (STAGES,) if plan.algorithm == "auto" else (STAGES, *TOKENS)
    by_rank = [sent_bytes(model, plan, work, rank) for rank in grid.group(0, *differ)]
    found = []
    for axis, group in groups.items():
        if group.degree == 1:
            continue
        sent = max(each[axis] for each in by_rank)  # an axis with several ranks has traffic
        local, domains = group.placement(links.domain)
        between = 0.0
        if domains > 1:
            sharing = min(links.domain, ranks) / local
            between = sent * sharing / network(links, domains * group.stride) / step_s
        inside = sent / links.link / step_s if local > 1 else 0.0
        found.append(AxisTraffic(axis, group.degree, group.stride, sent, local, domains, inside, between))
    return found


def sent_bytes(model: ModelShape, plan: Plan, work: Workload, rank: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by axis: those of `plait explain`, by a model's sizes
    instead of a dry run."""
    facts = rank_facts(model, plan, work, rank)
    events = [*step_events(facts), *_tied_events(model, facts)]
    sent = dict.fromkeys(facts.grid.used(*AXES), 0.0)
    for key, count in sum_events(events).items():
        if len(key.axes) == 1:
            sent[key.axes[0]] += ring_bytes({key: count}, facts.grid)
    return sent


def _tied_events(model: ModelShape, facts: RankFacts) -> Iterator[Event]:
    """Yield the sum of the gradients of a weight that is on both ends, apart from the others of its units."""
    if model.tied and (0 in facts.own) != (len(facts.stages) - 1 in facts.own):
        shards = facts.grid.degree(*TENSOR, *facts.roles.states())
        num_bytes = model.vocab * model.hidden // shards * MASTER_BYTES[facts.plan.dtype]
        yield from facts.calls("gradients", "all-reduce", [num_bytes], STAGES, channel="shared")


def rank_facts(model: ModelShape, plan: Plan, work: Workload, rank: int) -> RankFacts:
    """Return the facts of a rank by the sizes of the model, on devices that share no memory."""
    grid, batch = Grid.from_plan(plan), work.batch // (plan.data_ranks * plan.micro)
    counts = block_counts(model, plan, PLAIT)
    message = (message_bytes(model, plan, batch, work.sequence),)
    part = BlockWork.of(plan, batch, work.sequence, PLAIT, overlaps=True)
    collectives = block_collectives(model, part, COMPUTE_BYTES[plan.precision])
    share, last = recomputed_share(plan.recompute), len(counts) - 1

    def facts(stage: int, blocks: int) -> StageFacts:
        layout = Layout(
            stage_units(model, plan.rows, plan.cols, plan.shard_degree, blocks, stage, len(counts))
        )
        traffic = {}
        for axis, op, forward, backward, num_bytes in collectives:
            calls = blocks * ((1 + share) * forward + backward)
            if axis == FEATURES:  # of the embedding's output, and of the gradient of the head's input
                calls += (1 if op == "all-reduce" else 2) * ((stage == 0) + (stage == last))
            traffic[CommKey((axis,), "", op)] = CommCount(round(calls), round(calls * num_bytes))
        return StageFacts(layout, traffic, output=message, gradient=message)

    schedule = load_schedule(plan.schedule, plan.pp, plan.micro, plan.num_chunks)
    stages = [facts(stage, blocks) for stage, blocks in enumerate(counts)]
    return RankFacts(plan, grid, rank, schedule, stages, {}, messages_of(plan).transport)
