"""Predict the step of one plan on a cluster: time by part, memory of the fullest rank."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from plait.errors import PlanError
from plait.plan import MemoryUse, Plan
from plait.plan.context import AttentionMessages, heads_degree
from plait.plan.events import Collective, During
from plait.plan.layout import Layout
from plait.plan.memory import COMPUTE_BYTES
from plait.plan.schedule.load import stages_by_rank, stages_of
from plait.plan.schedule.simulate import Durations, PipelineEnds, pipeline_s
from plait.planner.block_messages import attention_of, block_collectives, sends_rows, tensor_groups
from plait.planner.cluster import Cluster
from plait.planner.communication import Group, Links, collective_s, send_s, server_exchange_s
from plait.planner.compute import (
    COLLECTIVE_OPERATORS,
    BlockWork,
    Rates,
    Seconds,
    block_seconds,
    embedding_seconds,
    expert_columns,
    head_seconds,
    optimizer_s,
)
from plait.planner.constants import Constants
from plait.planner.memory import (
    fullest_process,
    layout_of,
    peak_memory,
    rank_layouts,
    tokens_of_rank,
    unit_sizes,
    with_method,
)
from plait.planner.model_shape import ModelShape
from plait.planner.space import adapter_error, experts_error
from plait.planner.stages import StageKind, block_counts, stage_kinds
from plait.planner.unit_prices import UnitPrices, unit_prices
from plait.planner.workload import PLAIT, Software, Workload

__all__ = ["Software", "StageSeconds", "StepEstimate", "Workload", "estimate_step", "stage_seconds"]


@dataclass(frozen=True)
class StepEstimate:
    """A prediction. `parts`: seconds of the step on the slowest rank by what they are spent on (compute,
    recompute, bubble, tensor communication, data communication, pipeline communication, optimizer, ..., and
    with cp and ep attention and expert communication): exposed time only, they add up to `step_s`. `hidden`:
    seconds of communication during computation, by the same names."""

    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    memory: MemoryUse  # of the fullest rank
    memory_high_bytes: float  # upper end of its interval: a plan fits if this does
    bubble: float  # idle fraction


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch on one stage. The first three include the others.

    backward    of the input, with what is recomputed
    recompute   computed again in the backward
    tensor      communication inside layers, and its part in the forward
    attention   of it, that over the ranks of cp
    experts     of it, that over the ranks of ep
    """

    forward: float
    backward: float
    weight: float
    recompute: float
    tensor: float
    tensor_forward: float
    attention: float
    experts: float


TYPICAL_ERROR = 0.08  # of a step's time: the mean of published steps, their publisher left out of the fit
_SPREAD = 0.17  # of an interval: 81 of 100 steps are within it if their publisher is left out of the fit


def estimate_step(
    model: ModelShape,
    plan: Plan,
    cluster: Cluster,
    work: Workload,
    software: Software = PLAIT,
) -> StepEstimate:
    """Predict a step of `plan`. Raises PlanError for a plan that does not fit the model, the cluster or the
    batch."""
    check(model, plan, cluster, work, software)
    constants = cluster.constants
    rates = Rates.of(cluster.device, plan.precision, plan.tf32, constants)
    links = Links.of(cluster, constants)
    stages = stage_seconds(model, plan, cluster, work, software)
    gathers = stage_gathers(model, plan, links, stages, software, constants)
    ends = pipeline_ends(model, plan, links, stages, gathers, work)
    ranks = stages_of(plan.schedule, plan.pp, plan.num_chunks)
    layouts = rank_layouts(model, plan, software)
    data = step_reductions(plan, links, stages, layouts, software, constants)
    slowest = max(range(plan.pp), key=lambda rank: ends.end[rank] + data[rank].exposed)
    own = [stage for stage, rank in enumerate(ranks) if rank == slowest]
    counts = block_counts(model, plan, software)
    update = update_s(plan, layouts[slowest], sum(counts[stage] for stage in own), rates, links, software)
    span = _span_s(ends, slowest, cluster.ranks_per_core)
    counting = _counting_s(plan, action_durations(model, plan, links, stages, gathers, work))
    busy = min(span, ends.busy[slowest])
    step = span + counting + data[slowest].exposed + update + constants.step_s
    idle = span - busy
    sends = min(idle, 2 * (plan.pp - 1) * _transfer_s(model, plan, links, work))
    parts = {
        **_busy_parts(plan, [stages[s] for s in own], [gathers[s] for s in own], busy),
        "pipeline communication": sends,
        "bubble": idle - sends,
        "optimizer": update,
        "overhead": constants.step_s,
        **({"counts of routers": counting} if plan.counts_first else {}),
    }
    parts["data communication"] += data[slowest].exposed
    use = peak_memory(model, plan, cluster, work, software)
    memory, high = fullest_process(plan, *use, layouts[0].trained_numel)
    return StepEstimate(
        plan,
        step,
        step / (1 + _SPREAD),
        step * (1 + _SPREAD),
        parts,
        {"data communication": data[slowest].hidden + plan.micro * sum(gathers[s].hidden for s in own)},
        memory,
        high,
        idle / step,
    )


def pipeline_ends(
    model: ModelShape,
    plan: Plan,
    links: Links,
    stages: "Sequence[StageSeconds]",
    gathers: "Sequence[Overlapped]",
    work: Workload,
) -> PipelineEnds:
    """Simulate the schedule with these stages and what their gathers add."""
    durations = action_durations(model, plan, links, stages, gathers, work)
    return pipeline_s(plan.schedule, plan.pp, plan.micro, plan.num_chunks, durations)


def action_durations(
    model: ModelShape,
    plan: Plan,
    links: Links,
    stages: "Sequence[StageSeconds]",
    gathers: "Sequence[Overlapped]",
    work: Workload,
) -> Durations:
    """Return the durations of the schedule's actions on each stage."""
    return Durations(
        tuple(stage.forward + extra.forward for stage, extra in zip(stages, gathers, strict=True)),
        tuple(stage.backward + extra.backward for stage, extra in zip(stages, gathers, strict=True)),
        tuple(stage.weight for stage in stages),
        (_transfer_s(model, plan, links, work),) * (len(stages) - 1),
    )


def _counting_s(plan: Plan, durations: Durations) -> float:
    """Seconds of forwards that count for losses of routers before those of the schedule."""
    if not plan.counts_first:
        return 0.0
    own = stages_by_rank(plan.schedule, plan.pp, plan.num_chunks)
    longest = max(sum(durations.forward[stage] for stage in of) for of in own)
    return (plan.micro - 1) * longest + sum(durations.forward) + sum(durations.transfer)


def _transfer_s(model: ModelShape, plan: Plan, links: Links, work: Workload) -> float:
    """Seconds of a micro-batch's way to the next stage."""
    if plan.pp == 1:
        return 0.0
    batch = work.batch // (plan.data_ranks * plan.micro)
    return send_s(
        links, plan.num_ranks // plan.pp, plan.num_ranks, message_bytes(model, plan, batch, work.sequence)
    )


def update_s(
    plan: Plan, layout: Layout, blocks: int, rates: Rates, links: Links, software: Software = PLAIT
) -> float:
    """Seconds of the optimizer on a rank with these parameters."""
    copies = 2 if plan.server == "replicated" else 1
    experts = layout.expert_numel
    owned = copies * (layout.trained_numel - experts) // (plan.num_servers or plan.shard_degree)
    owned += experts // max(1, plan.shard_degree // plan.ep)
    return optimizer_s(owned, blocks, rates, software.optimizer) + _offload_s(plan, owned, links)


def message_bytes(model: ModelShape, plan: Plan, batch: int, sequence: int) -> int:
    """Bytes of a micro-batch's output that a rank of a stage sends to the next one."""
    numel = batch * tokens_of_rank(model, plan, sequence) * model.hidden // plan.rows
    return numel * COMPUTE_BYTES[plan.dtype] // (plan.cols if plan.sp else 1)


def _span_s(ends: PipelineEnds, rank: int, ranks_per_core: float) -> float:
    """Seconds until a rank's last action. Ranks that wait leave their share of the cores to the others."""
    if ranks_per_core == 1:
        return ends.end[rank]
    return max(ends.end[rank] / ranks_per_core, statistics.fmean(ends.busy))


def _busy_parts(
    plan: Plan, stages: "list[StageSeconds]", gathers: "list[Overlapped]", busy_s: float
) -> dict[str, float]:
    """Split the seconds in which a rank's actions run. Without tp, a difference is of rounding alone."""
    tensor = sum(s.tensor - s.attention - s.experts for s in stages) if plan.rows * plan.cols > 1 else 0.0
    parts = {
        "recompute": plan.micro * sum(stage.recompute for stage in stages),
        "tensor communication": plan.micro * tensor,
        "data communication": plan.micro * sum(gather.exposed for gather in gathers),
    }
    if plan.cp > 1:
        parts["attention communication"] = plan.micro * sum(stage.attention for stage in stages)
    if plan.ep > 1:
        parts["expert communication"] = plan.micro * sum(stage.experts for stage in stages)
    return {"compute": busy_s - sum(parts.values()), **parts}


def check(
    model: ModelShape, plan: Plan, cluster: Cluster, work: Workload, software: Software = PLAIT
) -> None:
    """Raise PlanError for a plan that does not fit the model, the cluster or the batch."""
    if plan.num_ranks > cluster.num_devices:
        raise PlanError(
            "the plan needs more devices than the cluster has",
            given=f"{plan} ({plan.num_ranks} ranks) on {cluster.name}",
            expected=f"at most {cluster.num_devices} ranks",
            hint=f"a cluster of {plan.num_ranks:,} devices, or smaller degrees",
        )
    cluster.device.check_precision(plan.precision)
    for error in (experts_error(model, plan.ep), adapter_error(model, plan, plan.base)):
        if error is not None:
            raise error
    if plan.router_balance == "step" and not model.experts:
        raise PlanError(
            "router_balance has no effect without experts",
            given=f"router_balance=step, {model.name}",
            expected="a mixture, whose routers have losses",
            hint="no router_balance",
        )
    if plan.sync != "all":
        raise PlanError(
            "the planner can price parameter servers only with sync=all",
            given=f"sync={plan.sync}",
            expected="workers that take every step together",
            hint="sync=all; how much the other policies gain depends on how uneven the workers are",
        )
    if plan.local_steps:
        raise PlanError(
            "the planner does not know the time of local steps",
            given=f"local_steps={plan.local_steps}",
            expected="gradients that all data ranks reduce in every step",
            hint="no local_steps; `plait explain` shows the bytes of an exchange",
        )
    plan.check_batch(work.batch)
    block_counts(model, plan, software)


@lru_cache(maxsize=1 << 15)
def _stage_seconds(
    model: ModelShape,
    counts: tuple[int, ...],
    part: BlockWork,
    recompute: str,
    rates: Rates,
    links: Links,
    constants: Constants,
) -> tuple[StageSeconds, ...]:
    of_block = part, recompute, rates, links, constants
    block = _block_seconds(model, *of_block)
    dense = _block_seconds(model.dense_block, *of_block) if model.dense_layers else _NOTHING
    head = head_seconds(model, part, rates, constants)
    embedding = embedding_seconds(model, part, rates)
    seconds: dict[StageKind, StageSeconds] = {}
    kinds = stage_kinds(model, counts)
    for kind in dict.fromkeys(kinds):
        others, first = kind.blocks - kind.dense, kind.dense
        total = StageSeconds(*[others * a + first * b for a, b in zip(block, dense, strict=True)])
        for end in [embedding] * kind.is_first + [head] * kind.is_last:
            total = StageSeconds(
                total.forward + end.forward,
                total.backward + end.backward,
                total.weight + end.weight,
                *total[3:],
            )
        seconds[kind] = total
    return tuple([seconds[kind] for kind in kinds])


@lru_cache(maxsize=1 << 13)
def _block_seconds(
    model: ModelShape, part: BlockWork, recompute: str, rates: Rates, links: Links, constants: Constants
) -> StageSeconds:
    """Seconds of one block."""
    block = block_seconds(model, part, rates, constants)
    share, of_attention = recomputed_share(recompute), recomputed_attentions(recompute)
    again = block.selective if recompute == "selective" else share * block.forward
    tensor = _block_tensor_s(model, part, links, rates, block, constants)
    attention = _attention_messages_s(model, part, links, rates)
    experts = _expert_messages_s(model, part, links, rates, block, constants)
    attention_back = attention.backward + of_attention * attention.again
    experts_back = experts.backward + of_attention * experts.again
    across = tensor.forward + attention.forward + experts.forward
    across_back = tensor.backward + share * tensor.again + attention_back + experts_back
    collectives = sum(each.forward for each in block_collectives(model, part, rates.itemsize))
    host = 0.0 if part.graphs else block.host + COLLECTIVE_OPERATORS * rates.launch_s * collectives
    weight = max(block.weight, host) if part.splits else block.weight
    halves = block.backward + across_back + again
    if part.splits:  # the host starts both halves
        backward = max(halves, (1 + share) * host)
    else:
        backward = max(halves + weight, (2 + share) * host) - weight
    return StageSeconds(
        max(block.forward + across, host),
        backward,
        weight,
        again,
        across + across_back,
        across,
        attention.forward + attention_back,
        experts.forward + experts_back,
    )


_NOTHING = StageSeconds(*[0.0] * len(StageSeconds._fields))


def stage_seconds(
    model: ModelShape,
    plan: Plan,
    cluster: Cluster,
    work: Workload,
    software: Software = PLAIT,
) -> tuple[StageSeconds, ...]:
    """Seconds of one micro-batch on every stage, with the communication inside layers; independent of zero,
    shard and offload."""
    plan = with_method(model, plan, cluster.host_size)
    batch, constants = work.batch // (plan.data_ranks * plan.micro), cluster.constants
    rates = Rates.of(cluster.device, plan.precision, plan.tf32, constants)
    links = Links.of(cluster, constants)
    counts = block_counts(model, plan, software)
    part = BlockWork.of(model, plan, batch, work.sequence, software)
    return _stage_seconds(model, counts, part, plan.recompute, rates, links, constants)


def recomputed_share(recompute: str) -> float:
    """Share of the blocks that are recomputed in full."""
    if recompute.startswith("every="):
        return 1 / int(recompute.removeprefix("every="))
    return float(recompute == "full")


def recomputed_attentions(recompute: str) -> float:
    """Share of the blocks whose attention, and messages of experts, are recomputed. Over the ranks of cp its
    results are kept, and some messages are repeated."""
    return 1.0 if recompute == "selective" else recomputed_share(recompute)


def _kind(message: AttentionMessages, part: BlockWork) -> str:
    """The kind of collective whose price a message has: a ring passes on what a gather does."""
    if message.op not in ("all-to-all", "messages"):
        return message.op
    is_ring = message.ranks * heads_degree(part.cp_method, part.cp) == part.cp
    return "all-gather" if is_ring else "exchange in layers"


class Passes(NamedTuple):
    """Exposed seconds of one block's messages in a forward, in one that is recomputed, and in a backward."""

    forward: float
    again: float
    backward: float


def _block_tensor_s(
    model: ModelShape, part: BlockWork, links: Links, rates: Rates, block: Seconds, constants: Constants
) -> Passes:
    """Return those of collectives inside layers that are sharded.

    Input gradients are reduced during the products of weight gradients, and sequence-parallel inputs are
    gathered again during the products of input gradients (parallel/tensor/shared_input.py, and Megatron). No
    products hide collectives of experts."""
    groups = tensor_groups(part)
    forward, again, backward, hidden = 0.0, 0.0, 0.0, 0.0
    for each in block_collectives(model, part, rates.itemsize):
        if each.axes in groups:
            kind = "foreign all-reduce" if each.op == "all-reduce" else each.op
            once = collective_s(kind, links, groups[each.axes], each.num_bytes)
            forward += each.forward * once
            again += each.again * once
            if each.overlaps and part.overlaps:
                hidden += each.forward * once
            else:
                backward += (each.forward if each.overlaps else each.backward) * once
    if hidden:
        during = block.shared_weight + (block.shared_input if part.sp else 0.0)
        backward += _overlap(during, hidden, constants)[0] + (hidden / 2 if part.sp else 0.0)
    return Passes(forward, again, backward)


def _attention_messages_s(model: ModelShape, part: BlockWork, links: Links, rates: Rates) -> Passes:
    """Return those of attention over the ranks of cp. Nothing hides them, which is too slow for rings."""
    passes = [0.0, 0.0, 0.0]
    for message in attention_of(model, part):
        group = Group(message.ranks, message.apart * part.rows * part.cols, part.ranks)
        full = part.tokens * rates.itemsize * message.received * message.ranks / (message.ranks - 1)
        once = collective_s(_kind(message, part), links, group, full)
        calls = message.forward, message.again, message.backward
        passes = [seconds + number * once for seconds, number in zip(passes, calls, strict=True)]
    return Passes(*passes)


def _expert_messages_s(
    model: ModelShape, part: BlockWork, links: Links, rates: Rates, block: Seconds, constants: Constants
) -> Passes:
    """Return those of messages to experts and back. Only another micro-batch's computation hides them."""
    apart = part.cp if math.gcd(part.ep, part.cp) == 1 else 1  # see plan/axes.py [Note: ranks of ep]
    own = expert_columns(model, part)
    group = Group(part.ep * own, apart * part.rows * part.cols // own, part.ranks)
    calls = [each for each in block_collectives(model, part, rates.itemsize) if sends_rows(each)]
    once = [collective_s("exchange in layers", links, group, each.num_bytes) for each in calls]
    exposed = partial(_overlap, constants=constants, overlaps=part.overlaps_experts)
    sent = sum(each.forward * seconds for each, seconds in zip(calls, once, strict=True))
    returned = sum(each.backward * seconds for each, seconds in zip(calls, once, strict=True))
    forward = exposed(block.forward, sent)[0]
    return Passes(forward, forward, exposed(block.backward + block.weight, returned)[0])


class Overlapped(NamedTuple):
    """Seconds of communication during computation; `exposed` of the forward and of the backward."""

    exposed: float
    hidden: float
    forward: float = 0.0
    backward: float = 0.0
    hidden_forward: float = 0.0


def _overlap(
    compute: float, communication: float, constants: Constants, *, overlaps: bool = True
) -> tuple[float, float]:
    """Exposed and hidden seconds of communication that runs during computation, which slow each other."""
    hidden = min(compute, communication) if overlaps else 0.0
    return communication - hidden + constants.overlap_tax * hidden, hidden


def stage_gathers(
    model: ModelShape,
    plan: Plan,
    links: Links,
    stages: tuple[StageSeconds, ...],
    software: Software,
    constants: Constants,
) -> list[Overlapped]:
    """Seconds that a micro-batch's all-gathers of parameters, and reductions of gradients, add to each
    stage."""
    if plan.zero < 2 or plan.token_ranks == 1:
        return [Overlapped(0.0, 0.0)] * len(stages)
    price = unit_prices(plan, links)
    if not price.of_micros:
        return [Overlapped(0.0, 0.0)] * len(stages)
    counts = block_counts(model, plan, software)
    overlap = partial(_overlap, constants=constants, overlaps=software.overlaps_data)
    kinds, sizes, once_s = stage_kinds(model, counts), unit_sizes(plan), _calls(price, software, constants)
    result: dict[StageKind, Overlapped] = {}
    for kind, seconds in dict(zip(kinds, stages, strict=True)).items():
        layout = layout_of(model, sizes, (kind,))
        forward = backward = 0.0
        for event in price.of_micros:
            once = once_s(event.collective, layout)
            calls = event.calls / plan.micro
            in_forward = min(1.0, calls) if event.during is During.PASSES else 0.0
            forward += in_forward * once
            backward += (calls - in_forward) * once
        ahead = overlap(seconds.forward, forward)
        back = overlap(seconds.backward + seconds.weight, backward)
        result[kind] = Overlapped(ahead[0] + back[0], ahead[1] + back[1], ahead[0], back[0], ahead[1])
    return [result[kind] for kind in kinds]


def _calls(
    price: UnitPrices, software: Software, constants: Constants
) -> Callable[[Collective, Layout], float]:
    """Seconds of the calls of a collective for each unit of a layout."""
    rank_s = constants.launch_s if software.fills_lists else 0.0
    return partial(price.seconds, sends_tensors=software.sends_tensors, rank_s=rank_s)


def step_reductions(
    plan: Plan,
    links: Links,
    stages: tuple[StageSeconds, ...],
    layouts: Sequence[Layout],
    software: Software,
    constants: Constants,
) -> list[Overlapped]:
    """Seconds per pipeline rank of the reductions of gradients, and gathers of parameters, once a step."""
    overlap = partial(_overlap, constants=constants, overlaps=software.overlaps_data)
    if plan.num_servers:
        push, pull = server_exchange_s(plan, links, layouts[0].trained_numel)
        exposed, hidden = overlap(sum(s.backward + s.weight for s in stages), push)
        return [Overlapped(exposed + pull, hidden)]
    if plan.token_ranks == 1:
        return [Overlapped(0.0, 0.0)] * plan.pp
    of_ranks, price = stages_by_rank(plan.schedule, plan.pp, plan.num_chunks), unit_prices(plan, links)
    hides, once_s = software.overlaps_data and software.overlaps_gathers, _calls(price, software, constants)
    of_layouts: dict[int, Overlapped] = {}  # most ranks have equal stages
    for layout, own in zip(layouts, of_ranks, strict=True):
        if id(layout) in of_layouts:
            continue
        scatter = gather = 0.0
        for collective, _, during in price.events:
            if during is During.LAST_BACKWARD:
                scatter += once_s(collective, layout)
            elif during is During.NEXT_FORWARD:
                gather += once_s(collective, layout)
        back = overlap(sum([stages[stage].backward + stages[stage].weight for stage in own]), scatter)
        ahead = _overlap(sum([stages[stage].forward for stage in own]), gather, constants, overlaps=hides)
        of_layouts[id(layout)] = Overlapped(back[0] + ahead[0], back[1] + ahead[1])
    return [of_layouts[id(layout)] for layout in layouts]


def _offload_s(plan: Plan, owned: float, links: Links) -> float:
    """Gradients to the host and parameters back."""
    if plan.offload == "none":
        return 0.0
    return owned * (4 + COMPUTE_BYTES[plan.dtype]) / links.host + owned * 28 / _HOST_MEMORY


_HOST_MEMORY = 2e10  # bytes per second of a CPU's Adam for one device's share of a host: DDR4, 8 devices
