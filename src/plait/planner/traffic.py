"""Bytes that a rank sends in a step along every axis, and the links of the cluster that carry them: those of
`plait explain`, by the sizes of a model instead of a dry run.
"""

from dataclasses import dataclass

from plait.plan import AXES, CommCount, CommKey, Grid, Layout, Plan, sum_traffic
from plait.plan.axes import FEATURES, STAGES
from plait.plan.estimate.memory import COMPUTE_BYTES
from plait.plan.estimate.traffic import RankFacts, StageFacts, TransportFacts, ring_bytes, step_traffic
from plait.plan.schedule.load import load_schedule
from plait.planner.cluster import Cluster
from plait.planner.communication import Group, Links, network
from plait.planner.compute import BlockWork
from plait.planner.memory import stage_units
from plait.planner.model_shape import ModelShape
from plait.planner.stages import block_counts
from plait.planner.step_estimate import block_collectives, message_bytes, recomputed_share, reduced_itemsize
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
    by_rank = [sent_bytes(model, plan, work, rank) for rank in range(plan.pp)]
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
    """Return the bytes that a pipeline rank sends in a step, by axis."""
    facts = rank_facts(model, plan, work, rank)
    sent = dict.fromkeys(facts.grid.used(*AXES), 0.0)
    for key, count in sum_traffic(step_traffic(facts).values()).items():
        if len(key.axes) == 1:
            sent[key.axes[0]] += ring_bytes({key: count}, facts.grid)
    if model.tied and (0 in facts.own) != (len(facts.stages) - 1 in facts.own):
        # The gradient of a weight that is on both ends, apart from the others of its units, is summed.
        shards = plan.rows * plan.cols * (plan.shard_degree if plan.zero >= 2 else 1)
        sent[STAGES] += model.vocab * model.hidden / shards * reduced_itemsize(plan)
    return sent


def rank_facts(model: ModelShape, plan: Plan, work: Workload, rank: int) -> RankFacts:
    """Return the facts of a pipeline rank by the sizes of the model, on devices that share no memory."""
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
    coord = grid.rank({STAGES: rank})
    terms = TransportFacts(reduced_itemsize(plan), shares=False, exchanges=False, host_size=plan.num_ranks)
    stages = [facts(stage, blocks) for stage, blocks in enumerate(counts)]
    return RankFacts(plan, grid, coord, schedule, stages, {}, terms)
