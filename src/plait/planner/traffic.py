"""Bytes that a rank sends in a step along every axis, and the links of the cluster that carry them.

Rings, as in `communication.py`: each pass (reduce-scatter, all-gather) over n ranks sends (n - 1) / n of the
bytes. Losses and norms are left out.
"""

from dataclasses import dataclass

from plait.plan import AXES, Grid, Plan
from plait.plan.axes import FEATURES, HIDDEN, REPLICAS, STAGES, Roles
from plait.plan.estimate.memory import COMPUTE_BYTES
from plait.plan.schedule.load import stages_of
from plait.planner.cluster import Cluster
from plait.planner.communication import Group, Links, network
from plait.planner.memory import rank_layout
from plait.planner.model_shape import ModelShape
from plait.planner.stages import block_counts
from plait.planner.step_estimate import message_bytes, recomputed_share, reduced_itemsize
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
    batch = work.batch // (plan.data_ranks * plan.micro)
    size, reduced = COMPUTE_BYTES[plan.precision], reduced_itemsize(plan)
    tokens = batch * work.sequence * size * plan.micro
    ranks, counts = stages_of(plan.schedule, plan.pp, plan.num_chunks), block_counts(model, plan, PLAIT)
    own = [stage for stage, of in enumerate(ranks) if of == rank]
    blocks = sum(counts[stage] for stage in own)
    passes = 4 * (2 + recomputed_share(plan.recompute))  # two all-reduces in a forward, two in a backward
    inside = model.qkv_width + (model.mlp_matrices - 1) * model.active_ffn
    numel = rank_layout(model, plan, rank, PLAIT).numel
    gathers = 0 if plan.zero == 0 else 1 if plan.zero < 3 or plan.reshard == "step" else 2 * plan.micro
    scatters = 0 if plan.zero == 0 else plan.micro if plan.zero >= 2 and not plan.accumulates_full else 1
    sends = sum((ranks[other] != rank) for stage in own for other in (stage - 1, stage + 1)
                if 0 <= other < len(ranks))  # fmt: skip
    (replicated,), (sharded, *_) = REPLICAS, Roles.from_plan(plan).states()
    shard = plan.shard_degree
    replicas = plan.data_ranks // shard
    is_first, is_last = 0 in own, len(ranks) - 1 in own
    ends = is_first + is_last  # all-reduces of the embedding's output and of the gradient of the head's input
    tied = model.tied and is_first != is_last  # then the gradient of their one weight is summed
    tied_shards = plan.rows * plan.cols * (shard if plan.zero >= 2 else 1)
    hidden = tokens * model.hidden / plan.rows
    return {
        STAGES: plan.micro * sends * message_bytes(model, plan, batch, work.sequence)
        + tied * model.vocab * model.hidden / tied_shards * reduced,
        replicated: 2 * _share(replicas) * numel / shard * reduced,
        sharded: _share(shard) * numel * (gathers * size + scatters * reduced),
        HIDDEN: _share(plan.rows) * blocks * passes * tokens * inside / plan.cols / 2,
        FEATURES: _share(plan.cols) * (blocks * (passes + 2 * plan.sp) + 2 * ends) * hidden,
    }


def _share(degree: int) -> float:
    return (degree - 1) / degree
