"""Bytes that a plan's ranks send along each axis in a step: the events of `plan/events.py` by the sizes of a
model, instead of a dry run."""

from collections.abc import Iterator
from dataclasses import dataclass

from plait.plan import AXES, CommCount, CommKey, Grid, Layout, Plan
from plait.plan.axes import FEATURES, SEQUENCE, STAGES, TENSOR, TOKENS, Axes
from plait.plan.events import Event, RankFacts, StageFacts, ring_bytes, step_events, sum_events
from plait.plan.memory import COMPUTE_BYTES, MASTER_BYTES
from plait.plan.schedule.load import load_schedule
from plait.planner.block_messages import block_collectives, sends_rows
from plait.planner.cluster import Cluster
from plait.planner.communication import Group, Links, network
from plait.planner.compute import BlockWork
from plait.planner.memory import stage_units, unit_sizes
from plait.planner.model_shape import ModelShape
from plait.planner.stages import StageKind, block_counts, stage_kinds
from plait.planner.step_estimate import message_bytes, recomputed_attentions, recomputed_share
from plait.planner.unit_prices import messages_of
from plait.planner.workload import PLAIT, Workload


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
    part = BlockWork.of(model, plan, batch, work.sequence, PLAIT)
    share, of_attention = recomputed_share(plan.recompute), recomputed_attentions(plan.recompute)
    shapes = [model, model.dense_block] if model.dense_layers else [model]
    collectives = [block_collectives(shape, part, COMPUTE_BYTES[plan.dtype]) for shape in shapes]

    def facts(kind: StageKind) -> StageFacts:
        layout = Layout(stage_units(model, unit_sizes(plan), kind))
        calls: list[tuple[Axes, str, float, float, float]] = []
        for each, blocks in zip(collectives, (kind.blocks - kind.dense, kind.dense), strict=False):
            for one in each:
                again = one.again * (of_attention if one.axes == SEQUENCE or sends_rows(one) else share)
                back = again + one.backward
                calls.append((one.axes, one.op, blocks * one.forward, blocks * back, one.num_bytes))
        if plan.cols > 1:  # of the embedding's output, and of the gradient of the head's input
            num_bytes = part.tokens * COMPUTE_BYTES[plan.dtype] * model.hidden / plan.rows
            first, last, ops = kind.is_first, kind.is_last, ("all-reduce", *["all-gather"] * plan.sp)
            calls += [((FEATURES,), op, first, last, num_bytes) for op in ops]
        traffic: dict[CommKey, CommCount] = {}
        counting: dict[CommKey, CommCount] = {}
        for axes, op, ahead, back, num_bytes in calls:
            key = CommKey(grid.used(*axes), "", op)
            for sums, number in [(traffic, ahead + back)] + [(counting, ahead)] * plan.counts_first:
                once = CommCount(round(number), round(number * num_bytes))
                sums[key] = sums.get(key, CommCount()) + once
        return StageFacts(layout, traffic, output=message, gradient=message, counting=counting)

    schedule = load_schedule(plan.schedule, plan.pp, plan.micro, plan.num_chunks)
    stages = [facts(kind) for kind in stage_kinds(model, counts)]
    return RankFacts(plan, grid, rank, schedule, stages, {}, messages_of(plan).transport)
