"""Estimate of one rank's communication in a step: the keys and counts that its `CommLog` will have.

One function per strand of traffic, for steps from the second one on, with finite gradients. The first step
communicates more: ranks agree on orders and compare their batches.

[Note: facts from a dry run]
The communication inside layers, the order in which a stage uses its units and the sizes of its outputs
follow from the model's own code, which these functions do not know: they take them as `StageFacts`, from one
micro-batch that the same code ran on meta (`plait/estimate/dry_run.py`). Everything else follows from the
plan, the schedule and the layout.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from plait.plan.axes import FEATURES, REPLICAS, STAGES, Axes, Roles
from plait.plan.collectives import Hosts, Send, Steps, all_reduce_steps, reduce_scatter_steps, scratch_numel
from plait.plan.comm_log import CommCount, CommKey, Traffic, sum_traffic
from plait.plan.compression import (
    BLOCK_BYTES,
    SUM_BYTES,
    Factors,
    blocks_per_rank,
    compresses,
    message_blocks,
    reduces_over_all,
    rounds_to_bf16,
)
from plait.plan.estimate.memory import COMPUTE_BYTES, MASTER_BYTES
from plait.plan.events import Collective, unit_events
from plait.plan.grid import Grid
from plait.plan.layout import Layout, UnitLayout
from plait.plan.plan import Plan
from plait.plan.prefetch import ExecOrder, planned_gathers
from plait.plan.schedule.action import Action, Kind, Schedule


@dataclass(frozen=True)
class StageFacts:
    """Facts of one stage at one coordinate of the tp grid.

    traffic     of one micro-batch's forward and backward, along the tp axes
    exec_order  order of use of the units, by their blocks; None: unknown
    output      bytes of each tensor sent to the next stage
    gradient    bytes of each gradient that comes back for them
    buffers     bytes of each buffer that is broadcast from the first data rank
    """

    layout: Layout
    traffic: Traffic = field(default_factory=dict)
    exec_order: ExecOrder[str] | None = None
    output: tuple[int, ...] = ()
    gradient: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransportFacts:
    """Properties of the transport that decide byte counts.

    grad_itemsize  bytes per element of a full gradient
    shares         the ranks along `shard` share one parameter memory
    exchanges      replicas send each other full gradients
    host_size      ranks per host
    """

    grad_itemsize: int
    shares: bool
    exchanges: bool
    host_size: int


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank. `stages`: all stages of the pipeline, at this rank's tp coordinate. `shared`: units
    that several stages have, with those stages."""

    plan: Plan
    grid: Grid
    rank: int
    schedule: Schedule
    stages: Sequence[StageFacts]
    shared: Mapping[str, Sequence[int]]
    transport: TransportFacts

    @cached_property
    def pp_coord(self) -> int:
        """The rank's coordinate on `pp`."""
        return self.grid.coord(self.rank)[STAGES]

    @cached_property
    def roles(self) -> Roles:
        return Roles.from_plan(self.plan)

    @property
    def actions(self) -> Sequence[Action]:
        return self.schedule.ranks[self.pp_coord]

    @cached_property
    def own(self) -> dict[int, StageFacts]:
        """The rank's own stages."""
        return {stage: self.stages[stage] for stage in self.schedule.stages_of(self.pp_coord)}

    def key(self, op: str, *axes: str, channel: str = "") -> CommKey:
        return CommKey(self.grid.used(*axes), channel, op)

    def calls(self, op: str, sizes: Iterable[int], *axes: str, channel: str = "") -> dict[CommKey, CommCount]:
        """Traffic of one call per size, in bytes; empty for a group of one rank."""
        sizes = list(sizes)
        if self.grid.degree(*axes) == 1 or not sizes:
            return {}
        return {self.key(op, *axes, channel=channel): CommCount(len(sizes), sum(sizes))}


def step_traffic(facts: RankFacts) -> dict[str, dict[CommKey, CommCount]]:
    """All communication of the rank in a step, by strand."""
    strands = {
        "layers": layers_traffic(facts),
        "parameters": parameters_traffic(facts),
        "gradients": gradients_traffic(facts),
        "stages": stages_traffic(facts),
        "step": per_step_traffic(facts),
    }
    return {strand: traffic for strand, traffic in strands.items() if traffic}


def layers_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Communication inside layers that are sharded over the tp grid: the same for every micro-batch."""
    micros = facts.plan.micro
    return sum_traffic(
        {key: count * micros for key, count in stage.traffic.items()} for stage in facts.own.values()
    )


# --- parameters and gradients


def parameters_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """All-gathers of parameters, or a barrier before they are used in shared memory."""
    calls = [_unit_traffic(facts, {Collective.GATHER})]
    for stage in facts.own.values():
        if facts.transport.shares and any(unit.trains for unit in stage.layout.units):
            calls.append(facts.calls("barrier", [0], *facts.roles.states(), channel="gathers"))
    return sum_traffic(calls)


def gradients_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Reductions of gradients to the owners of their ranges, and between replicas of those."""
    calls = [_unit_traffic(facts, set(Collective) - {Collective.GATHER})]
    master = MASTER_BYTES[facts.plan.dtype]
    for name, stages in facts.shared.items():
        units = [unit for s in stages if s in facts.own for unit in facts.stages[s].layout.units]
        sizes = [unit.range_numel * master for unit in units if unit.name == name and unit.trains]
        if len({facts.schedule.rank_of[stage] for stage in stages}) > 1:
            calls.append(facts.calls("all-reduce", sizes[:1], STAGES, channel="shared"))
    return sum_traffic(calls)


def _unit_traffic(facts: RankFacts, of: Set[Collective]) -> dict[CommKey, CommCount]:
    """The messages of these collectives, for all units of the rank."""
    covers, calls = _covers_replicas(facts), []
    for number, stage in facts.own.items():
        gathers = _gathers(facts, number)
        for unit in stage.layout.units:
            events = unit_events(
                facts.plan,
                trains=unit.trains,
                gathers=None if gathers is None else gathers[unit.block],
                covers_replicas=covers,
            )
            for event in events:
                if event.collective in of:
                    once = _messages(facts, unit, event.collective)
                    calls.append({key: count * event.calls for key, count in once.items()})
    return sum_traffic(calls)


def _gathers(facts: RankFacts, number: int) -> Counter[str] | None:
    """Gathers of a stage's blocks, if the order of their use is known or none are gathered."""
    plan, order = facts.plan, facts.stages[number].exec_order
    if facts.transport.shares:
        return Counter()
    if plan.zero < 3 or order is None:
        return None
    passes = [a.kind is Kind.B for a in facts.actions if a.stage == number and a.kind is not Kind.W]
    return Counter(planned_gathers(order, passes, plan.prefetch, keeps=plan.reshard == "step"))


def _messages(facts: RankFacts, unit: UnitLayout, collective: Collective) -> dict[CommKey, CommCount]:
    """The messages of one call."""
    if collective is Collective.GATHER:
        num_bytes = unit.numel * COMPUTE_BYTES[facts.plan.dtype]
        return facts.calls("all-gather", [num_bytes], *facts.roles.states(), channel="gathers")
    if collective is Collective.PARTIAL_SUM:  # in float32 at least
        size = max(facts.transport.grad_itemsize, SUM_BYTES)
        sizes = [(stop - start) * size for sharers, start, stop in unit.partial if len(sharers) > 1]
        return facts.calls("all-reduce", sizes, FEATURES, channel="gradients")
    return _reduction(facts, unit, replicas=collective is Collective.SUM_RANGES)


def _covers_replicas(facts: RankFacts) -> bool:
    """True if a unit's first reduction is over replicas too."""
    plan = facts.plan
    if compresses(plan):
        return reduces_over_all(plan)
    named = plan.algorithm != "auto" and plan.dp > 1
    return plan.algorithm_reduces_all if named else facts.transport.exchanges


def _reduction(facts: RankFacts, unit: UnitLayout, *, replicas: bool) -> dict[CommKey, CommCount]:
    """One reduction of a unit's gradients to the owners of their ranges, or of these ranges over replicas."""
    plan, covers = facts.plan, _covers_replicas(facts)
    numel, scatter = unit.range_numel if replicas else unit.numel, not (replicas or covers)
    axes: Axes = facts.roles.states() if scatter else facts.roles.replicas()
    sizes: dict[str, list[int]]  # of messages, by operation
    if plan.powersgd_rank is not None:  # two thin factors
        axes, rank = facts.roles.gradient_sum(), plan.powersgd_rank
        factors = Factors.of_unit(unit, rank)
        sizes = {"all-reduce": [factors.left_bytes, SUM_BYTES * factors.right_numel]}
    elif compresses(plan):  # codes: to the owners, and back where all ranks need all
        axes = axes if replicas or scatter else facts.roles.gradient_sum()
        ranks = facts.grid.degree(*axes)
        messages = [
            ranks * num * BLOCK_BYTES[plan.reduce] for num in message_blocks(blocks_per_rank(numel, ranks))
        ]
        sizes = dict.fromkeys(("all-to-all", "all-gather")[: 1 if scatter else 2], messages)
    elif plan.algorithm != "auto" and plan.dp > 1:
        size = 2 if rounds_to_bf16(plan) else MASTER_BYTES[plan.dtype]
        sizes = {"send": [], "receive": []}
        for move in chain.from_iterable(reduction_steps(facts, numel, *axes, scatter=scatter)):
            sizes["send" if isinstance(move, Send) else "receive"].append((move.stop - move.start) * size)
    else:
        wide = MASTER_BYTES[plan.dtype] if replicas else facts.transport.grad_itemsize
        op = "all-reduce" if replicas else "exchange" if covers else "reduce-scatter"
        sizes = {op: [numel * (2 if rounds_to_bf16(plan) else wide)]}
    return sum_traffic(facts.calls(op, of_op, *axes, channel="reductions") for op, of_op in sizes.items())


def reduction_steps(facts: RankFacts, numel: int, *axes: str, scatter: bool) -> Steps:
    """This rank's steps of the plan's algorithm, for a reduction over these axes."""
    ranks = facts.grid.group(facts.rank, *axes)
    if len(ranks) == 1:
        return []
    make = reduce_scatter_steps if scatter else all_reduce_steps
    hosts = _hosts(ranks, facts.transport.host_size) if facts.plan.algorithm == "two-level" else None
    return make(facts.plan.algorithm, ranks.index(facts.rank), len(ranks), numel, hosts)


def scratch_bytes(facts: RankFacts) -> int:
    """Bytes of received data not yet added that a named algorithm buffers, over all stages of the rank."""
    plan = facts.plan
    if plan.algorithm == "auto" or plan.dp == 1 or compresses(plan):
        return 0
    size, total = 2 if rounds_to_bf16(plan) else MASTER_BYTES[plan.dtype], 0
    for stage in facts.own.values():
        largest = max((unit.numel for unit in stage.layout.units if unit.trains), default=0)
        owned = largest if plan.algorithm_reduces_all else largest // plan.shard_degree
        for axes, numel, scatter in (
            (facts.roles.states(), largest, True),
            (facts.roles.replicas(), owned, False),
        ):
            total += size * scratch_numel(reduction_steps(facts, numel, *axes, scatter=scatter))
    return total


def _hosts(ranks: Sequence[int], host_size: int) -> Hosts:
    by_host: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        by_host.setdefault(rank // host_size, []).append(index)
    return list(by_host.values())


# --- between stages, and once a step


def stages_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Activations to the next stage, gradients to the previous one."""
    messages = []
    rank_of, here, last = facts.schedule.rank_of, facts.pp_coord, len(facts.stages) - 1
    for kind, stage, _ in facts.actions:
        for boundary in (stage, stage - 1):  # a boundary is named by the stage before it
            if kind is Kind.W or not 0 <= boundary < last or rank_of[boundary] == rank_of[boundary + 1]:
                continue
            is_forward, before, after = kind is Kind.F, rank_of[boundary], rank_of[boundary + 1]
            source, target = (before, after) if is_forward else (after, before)
            content = "activations" if is_forward else "gradients"
            of_boundary = facts.stages[boundary]
            sizes = [size for size in (of_boundary.output if is_forward else of_boundary.gradient) if size]
            channel = f"{content} from stage rank {source} to {target}"
            messages.append(
                facts.calls("send" if source == here else "receive", sizes, STAGES, channel=channel)
            )
    return sum_traffic(messages)


def per_step_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Once per step: loss, targets, step count, late gradients; the norm; buffers that forward changes."""
    loss, norm = 6 * 8, (1 + 2 * facts.grid.degree(STAGES)) * 8
    roles = facts.roles
    calls = [facts.calls("all-reduce", [norm], *roles.one_copy, channel="reductions")]
    if roles.has_islands:
        calls.append(facts.calls("all-reduce", [loss], *roles.step))
    elif facts.grid.num_ranks > 1:
        calls.append({CommKey((), "", "all-reduce"): CommCount(1, loss)})
    buffers = [size for stage in facts.own.values() for size in stage.buffers]
    calls.append(facts.calls("broadcast", buffers, *roles.same_stage))
    return sum_traffic(calls)


def exchange_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Communication of one exchange of weights between islands, of all its parts: changes, their drift,
    buffers of floating-point numbers, and the new weights inside an island. Empty without local steps."""
    plan, roles = facts.plan, facts.roles
    if not roles.has_islands:
        return {}
    sizes: dict[str, list[int]] = {"all-reduce": [], "all-to-all": [], "all-gather": []}
    for stage in facts.own.values():
        sizes["all-reduce"] += stage.buffers
        for unit in (unit for unit in stage.layout.units if unit.trains):
            if plan.exchange == "fp32":
                sizes["all-reduce"].append(unit.range_numel * MASTER_BYTES[plan.dtype])
            else:
                islands, codes = plan.num_islands, BLOCK_BYTES[plan.exchange]
                messages = message_blocks(blocks_per_rank(unit.range_numel, islands))
                for op in ("all-to-all", "all-gather"):
                    sizes[op] += [islands * num * codes for num in messages]
    drifts = [2 * 8] * plan.exchange_parts
    sizes["all-reduce"] += drifts
    calls = [facts.calls(op, of_op, *REPLICAS, channel="reductions") for op, of_op in sizes.items()]
    calls.append(facts.calls("all-reduce", drifts, *roles.one_copy, channel="reductions"))
    for stage in facts.own.values():
        gathered = [unit.numel * COMPUTE_BYTES[plan.dtype] for unit in stage.layout.units]
        if facts.transport.shares:  # before and after new weights are written
            barriers = [0, 0] * plan.exchange_parts
            calls.append(facts.calls("barrier", barriers, *roles.states(), channel="gathers"))
        elif plan.zero < 3:
            gathered *= plan.exchange_parts
            calls.append(facts.calls("all-gather", gathered, *roles.states(), channel="gathers"))
    return sum_traffic(calls)


def ring_bytes(traffic: Traffic, grid: Grid) -> int:
    """Bytes that leave a rank if every collective runs in a ring, the minimum. Received bytes are counted on
    their sender."""
    return round(math.fsum(_sent_bytes(key, count, grid) for key, count in traffic.items()))


def _sent_bytes(key: CommKey, count: CommCount, grid: Grid) -> float:
    ranks = grid.degree(*key.axes) if key.axes else grid.num_ranks
    share = (ranks - 1) / ranks
    times = {"all-reduce": 2 * share, "exchange": ranks - 1, "send": 1.0, "receive": 0.0}
    return count.num_bytes * times.get(key.op, share)
