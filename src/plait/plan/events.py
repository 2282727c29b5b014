"""The communication of a step, as one list of events of a rank: which collectives and messages there are,
when, how often, and of how many bytes. `plait explain` sums the list, and the planner prices it.

Events are those of steps from the second one on, with finite gradients. The first step communicates more:
ranks agree on orders and compare their batches.

[Note: facts from a dry run]
The communication inside layers, the order in which a stage uses its units and the sizes of its outputs
follow from the model's own code, which these functions do not know: they take them as `StageFacts`, from one
micro-batch that the same code ran on meta (`plait/estimate/dry_run.py`), or from the sizes of a model
(`plait/planner/traffic.py`). Everything else follows from the plan, the schedule and the layout.

[Note: bytes of parameter servers]
N elements are pushed at p bytes and pulled at q bytes by each of w workers; S servers hold N / S each.

  process                   sends                receives
  worker                    N p                  N q
  dedicated server          w N / S q            w N / S p
  colocated (both roles)    (w-1)/w N (p + q)    (w-1)/w N (p + q)
  ring, zero=1              (w-1)/w N (p + q)    (w-1)/w N (p + q)

Under local steps, what is pushed is a change of weights, and what is pulled are master weights: once in H
steps, so these are 1 / H of a step.

A replicated server sends the sum of N / S gradients, m bytes each, to its replica on the next server, and
receives as many; and it has all that a server has twice.

On one host none of it is sent: processes map each other's memory, and the same bytes pass through it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

from plait.plan.axes import EXPERTS, FEATURES, REPLICAS, STAGES, Axes, Roles, UnitKind
from plait.plan.collectives import Hosts, Send, Steps, all_reduce_steps, reduce_scatter_steps, scratch_numel
from plait.plan.comm_log import CommCount, CommKey, Traffic, sum_traffic
from plait.plan.compression import (
    BLOCK,
    BLOCK_BYTES,
    SUM_BYTES,
    Factors,
    blocks_per_rank,
    compresses,
    message_blocks,
    reduces_over_all,
    rounds_to_bf16,
)
from plait.plan.grid import Grid
from plait.plan.layout import Layout, UnitLayout
from plait.plan.memory import COMPUTE_BYTES, MASTER_BYTES
from plait.plan.plan import Plan
from plait.plan.prefetch import ExecOrder, planned_gathers
from plait.plan.schedule.action import Action, Kind, Schedule
from plait.plan.schedule.load import forwards_only
from plait.plan.servers import top_share

STRANDS = ("layers", "parameters", "gradients", "stages", "step")
EXCHANGE = "exchange"  # of weights between islands: a strand of its own, not of every step


class During(Enum):
    """Computation at the same time."""

    PASSES = auto()  # every forward; calls in excess of the number of micro-batches are in backwards
    BACKWARDS = auto()  # of every micro-batch
    LAST_BACKWARD = auto()
    NEXT_FORWARD = auto()  # the first one after the update


class Event(NamedTuple):
    """Calls of one operation by a rank: `times` in a step, each time as many, of as many bytes, as `once`."""

    strand: str
    key: CommKey
    once: CommCount
    times: int = 1


# --- facts


@dataclass(frozen=True)
class StageFacts:
    """Facts of one stage at one coordinate of the tp grid.

    traffic     of one micro-batch's forward and backward, inside layers
    exec_order  order of use of the units, by their blocks; None: unknown
    output      bytes of each tensor sent to the next stage
    gradient    bytes of each gradient that comes back for them
    buffers     bytes of each buffer that is broadcast from the first data rank
    totals      numbers that are summed with the loss of a step: of the model's routers
    counting    traffic of a forward that counts for losses of routers: see `Plan.counts_first`
    counted     bytes that the last stage sums after these
    """

    layout: Layout
    traffic: Traffic = field(default_factory=dict)
    exec_order: ExecOrder[str] | None = None
    output: tuple[int, ...] = ()
    gradient: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    totals: int = 0
    counting: Traffic = field(default_factory=dict)
    counted: int = 0


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

    @cached_property
    def messages(self) -> "dict[UnitKind, UnitMessages]":
        return {
            kind: UnitMessages(self.plan, self.grid, self.transport, self.rank, kind) for kind in UnitKind
        }

    @cached_property
    def actions(self) -> Sequence[Action]:
        """Forwards that count for losses of routers, and the schedule's actions."""
        first = [forwards_only(self.schedule, self.plan.micro)] if self.plan.counts_first else []
        return [action for each in (*first, self.schedule) for action in each.ranks[self.pp_coord]]

    @cached_property
    def own(self) -> dict[int, StageFacts]:
        """The rank's own stages."""
        return {stage: self.stages[stage] for stage in self.schedule.stages_of(self.pp_coord)}

    def calls(
        self, strand: str, op: str, sizes: Iterable[int], *axes: str, channel: str = "", times: int = 1
    ) -> Iterator[Event]:
        """Yield the event of one call per size, in bytes; nothing for a group of one rank."""
        sizes = list(sizes)
        if self.grid.degree(*axes) > 1 and sizes:
            key = CommKey(self.grid.used(*axes), channel, op)
            yield Event(strand, key, CommCount(len(sizes), sum(sizes)), times)


def step_events(facts: RankFacts) -> Iterator[Event]:
    """Yield the communication of the rank in a step."""
    for stage in facts.own.values():  # inside sharded layers: the same for every micro-batch
        for key, count in stage.traffic.items():
            yield Event("layers", key, count, facts.plan.micro)
        for key, count in stage.counting.items():
            yield Event("layers", key, count, facts.plan.micro)
        counted = [stage.counted] if stage.counted else []  # once
        yield from facts.calls("layers", "all-reduce", counted, *facts.roles.gradient_sum())
    yield from _unit_events_of_rank(facts)
    yield from _boundary_events(facts)
    yield from _per_step_events(facts)


def step_traffic(facts: RankFacts) -> dict[str, dict[CommKey, CommCount]]:
    """Return the sums of the events of a step, by strand."""
    events = list(step_events(facts))
    sums = {strand: sum_events(event for event in events if event.strand == strand) for strand in STRANDS}
    return {strand: traffic for strand, traffic in sums.items() if traffic}


def exchange_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Return the sums of the events of an exchange. Empty without local steps."""
    return sum_events(exchange_events(facts))


def sum_events(events: Iterable[Event]) -> dict[CommKey, CommCount]:
    """Return the calls and bytes of these events, by group and operation."""
    return sum_traffic({event.key: event.once * event.times} for event in events)


# --- parameters and gradients


class Collective(Enum):
    """A collective for one unit, with the channel of its messages."""

    GATHER = "gathers"  # of parameters, over ranks that shard their states
    PARTIAL_SUM = "gradients"  # of gradients that are partial sums on several columns
    REDUCE = "reductions"  # of gradients, to the owners of their ranges
    SUM_RANGES = "reductions of ranges"  # over replicas
    __hash__ = object.__hash__  # Enum's is slow Python

    @property
    def channel(self) -> str:
        return self.value.partition(" ")[0]


class UnitEvent(NamedTuple):
    """A collective of a unit, its calls in a step, and when they are."""

    collective: Collective
    calls: int
    during: During


def unit_events(
    plan: Plan, *, trains: bool = True, gathers: int | None = None, covers_replicas: bool = False
) -> tuple[UnitEvent, ...]:
    """Return the collectives of a unit in a step.

    trains           its parameters are trained
    gathers          number of gathers; None: one per pass, although a unit may stay unsharded between two
    covers_replicas  the reduction to owners is over replicas too
    """
    if gathers is None:
        per_pass = 1 if plan.reshard == "step" else 2 * plan.micro
        gathers = per_pass if plan.zero == 3 else int(trains)
    micros = plan.micro if trains and not plan.accumulates_full else 0
    return _unit_events(plan.zero, gathers, trains, micros, covers_replicas or plan.local_steps > 0)


@cache  # a search asks for few of them, and often
def _unit_events(
    zero: int, gathers: int, trains: bool, micros: int, owners_only: bool
) -> tuple[UnitEvent, ...]:
    """`micros`: number of micro-batches after each of which gradients are reduced; 0: once a step."""
    events = []
    if gathers and zero:
        during = During.PASSES if zero == 3 else During.NEXT_FORWARD
        events.append(UnitEvent(Collective.GATHER, gathers, during))
    if trains:
        times = (micros, During.BACKWARDS) if micros else (1, During.LAST_BACKWARD)
        events += [UnitEvent(Collective.PARTIAL_SUM, *times), UnitEvent(Collective.REDUCE, *times)]
        if not owners_only:
            events.append(UnitEvent(Collective.SUM_RANGES, 1, During.LAST_BACKWARD))
    return tuple(events)


class UnitSizes(NamedTuple):
    """Elements of a unit: of all of it, of a rank's range, and of ranges that are partial sums on several
    columns. `factors`: bytes of the first message of PowerSGD, and elements of the second. `codes`: bytes of
    all of it, if it is quantized."""

    numel: float
    owned: float
    partial: tuple[int, ...] = ()
    factors: tuple[float, float] = (0, 0)
    codes: int = 0

    @classmethod
    def of(cls, unit: UnitLayout, plan: Plan) -> "UnitSizes":
        partial = tuple(stop - start for sharers, start, stop in unit.partial if len(sharers) > 1)
        codes = unit.num_bytes(unit.numel, 0)
        return cls(unit.numel, unit.range_numel, partial, Factors.sizes_of([unit], plan.powersgd_rank), codes)


Message = tuple[str, Axes, Sequence[float]]  # operation, ranks, and bytes of every call


@dataclass(frozen=True)
class UnitMessages:
    """Messages of the collectives of units of a kind, on rank `rank` of a plan."""

    plan: Plan
    grid: Grid
    transport: TransportFacts
    rank: int = 0
    kind: UnitKind = UnitKind.DENSE

    @cached_property
    def roles(self) -> Roles:
        return Roles.from_plan(self.plan)

    # A search asks for the messages of many units of one plan.
    @cached_property
    def _states(self) -> Axes:
        return self.roles.states(self.kind)

    @cached_property
    def _replicas(self) -> Axes:
        return self.roles.replicas(self.kind)

    @cached_property
    def _compresses(self) -> bool:
        return compresses(self.plan)

    @cached_property
    def covers_replicas(self) -> bool:
        """True if a unit's first reduction is over replicas too."""
        if self._compresses:
            return reduces_over_all(self.plan)
        return self.plan.algorithm_reduces_all if self.is_named else self.transport.exchanges

    @cached_property
    def is_named(self) -> bool:
        """True if the plan, and not the transport, decides the algorithm of reductions."""
        return self.plan.algorithm != "auto" and self.plan.token_ranks > 1

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of an element of a sum that is sent."""
        return 2 if rounds_to_bf16(self.plan) else MASTER_BYTES[self.plan.dtype]

    def of(self, collective: Collective, sizes: UnitSizes) -> list[Message]:
        """Return the messages of one call for a unit."""
        plan = self.plan
        if collective is Collective.GATHER:
            return [("all-gather", self._states, [sizes.codes or sizes.numel * COMPUTE_BYTES[plan.dtype]])]
        if collective is Collective.PARTIAL_SUM:  # in float32 at least
            itemsize = max(self.transport.grad_itemsize, SUM_BYTES)
            return [("all-reduce", (FEATURES,), [numel * itemsize for numel in sizes.partial])]
        replicas = collective is Collective.SUM_RANGES
        scatters = not (replicas or self.covers_replicas)
        axes = self._states if scatters else self._replicas
        numel = sizes.owned if replicas else sizes.numel
        if self._compresses and plan.powersgd_rank is not None:  # two thin factors
            left_bytes, right_numel = sizes.factors
            return [("all-reduce", self.roles.gradient_sum(), [left_bytes, SUM_BYTES * right_numel])]
        if self._compresses:
            return self._codes(numel, axes if replicas or scatters else self.roles.gradient_sum(), scatters)
        if self.is_named:
            moves = list(chain.from_iterable(self.steps(int(numel), axes, scatters=scatters)))
            by_op = {
                op: [(m.stop - m.start) * self.sent_bytes for m in moves if isinstance(m, Send) is sends]
                for op, sends in (("send", True), ("receive", False))
            }
            return [(op, axes, of_op) for op, of_op in by_op.items()]
        itemsize = self.sent_bytes if replicas or rounds_to_bf16(plan) else self.transport.grad_itemsize
        op = "all-reduce" if replicas else "exchange" if self.covers_replicas else "reduce-scatter"
        return [(op, axes, [numel * itemsize])]

    def _codes(self, numel: float, axes: Axes, scatters: bool) -> list[Message]:
        """Codes to the owners, and back where all ranks need all."""
        ranks = self.grid.degree(*axes)
        sizes = _code_messages(numel, ranks, self.plan.reduce)
        return [(op, axes, sizes) for op in ("all-to-all", "all-gather")[: 1 if scatters else 2]]

    def steps(self, numel: int, axes: Axes, *, scatters: bool) -> Steps:
        """This rank's steps of the plan's algorithm, for a reduction over these axes."""
        ranks = self.grid.group(self.rank, *axes)
        if len(ranks) == 1:
            return []
        make = reduce_scatter_steps if scatters else all_reduce_steps
        hosts = _hosts(ranks, self.transport.host_size) if self.plan.algorithm == "two-level" else None
        return make(self.plan.algorithm, ranks.index(self.rank), len(ranks), numel, hosts)


def _code_messages(numel: float, ranks: int, codes: str) -> list[int]:
    return [ranks * num * BLOCK_BYTES[codes] for num in message_blocks(blocks_per_rank(round(numel), ranks))]


def _unit_events_of_rank(facts: RankFacts) -> Iterator[Event]:
    """Yield all-gathers of parameters, or a barrier before they are used in shared memory; reductions of
    gradients to the owners of their ranges, between replicas of those, and between stages."""
    for number, stage in facts.own.items():
        gathers = _gathers(facts, number)
        for unit in stage.layout.units:
            of_unit = facts.messages[unit.kind]
            each = None if gathers is None else gathers[unit.block]
            sizes = UnitSizes.of(unit, facts.plan)
            for collective, times, _ in unit_events(
                facts.plan, trains=unit.trains, gathers=each, covers_replicas=of_unit.covers_replicas
            ):
                strand = "parameters" if collective is Collective.GATHER else "gradients"
                for op, axes, of_call in of_unit.of(collective, sizes):
                    counted = [int(size) for size in of_call]
                    channel = collective.channel
                    yield from facts.calls(strand, op, counted, *axes, channel=channel, times=times)
        if facts.transport.shares and any(unit.trains for unit in stage.layout.units):
            yield from facts.calls("parameters", "barrier", [0], *facts.roles.states(), channel="gathers")
    master = MASTER_BYTES[facts.plan.dtype]
    for name, stages in facts.shared.items():
        units = [unit for s in stages if s in facts.own for unit in facts.stages[s].layout.units]
        sizes_of = [unit.range_numel * master for unit in units if unit.name == name and unit.trains]
        if len({facts.schedule.rank_of[stage] for stage in stages}) > 1:
            yield from facts.calls("gradients", "all-reduce", sizes_of[:1], STAGES, channel="shared")


def _gathers(facts: RankFacts, number: int) -> Counter[str] | None:
    """Gathers of a stage's blocks, if the order of their use is known or none are gathered."""
    plan, order = facts.plan, facts.stages[number].exec_order
    if facts.transport.shares:
        return Counter()
    if plan.zero < 3 or order is None:
        return None
    passes = [a.kind is Kind.B for a in facts.actions if a.stage == number and a.kind is not Kind.W]
    keeps, counting = plan.reshard == "step", plan.micro * plan.counts_first
    return Counter(planned_gathers(order, passes, plan.prefetch, keeps=keeps, counting=counting))


def scratch_bytes(facts: RankFacts) -> int:
    """Bytes of received data not yet added that a named algorithm buffers, over all stages of the rank."""
    plan, of_unit = facts.plan, facts.messages[UnitKind.DENSE]
    if not of_unit.is_named or compresses(plan):
        return 0
    total = 0
    for stage in facts.own.values():
        largest = max((unit.numel for unit in stage.layout.units if unit.trains), default=0)
        owned = largest if plan.algorithm_reduces_all else largest // plan.shard_degree
        total += scratch_numel(of_unit.steps(largest, facts.roles.states(), scatters=True))
        total += scratch_numel(of_unit.steps(owned, facts.roles.replicas(), scatters=False))
    return total * of_unit.sent_bytes


def _hosts(ranks: Sequence[int], host_size: int) -> Hosts:
    by_host: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        by_host.setdefault(rank // host_size, []).append(index)
    return list(by_host.values())


# --- between stages, and once a step


def _boundary_events(facts: RankFacts) -> Iterator[Event]:
    """Yield activations to the next stage, gradients to the previous one."""
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
            op = "send" if source == here else "receive"
            yield from facts.calls("stages", op, sizes, STAGES, channel=channel)


def _per_step_events(facts: RankFacts) -> Iterator[Event]:
    """Yield what is sent once: loss, targets, step count, late gradients, totals of routers; the norm;
    buffers that forward changes; and under a capacity shapes."""
    loss, norm = (6 + facts.stages[0].totals) * 8, (1 + 2 * facts.grid.degree(STAGES)) * 8
    roles = facts.roles
    yield from facts.calls("step", "all-reduce", [norm], *roles.one_copy, channel="reductions")
    if roles.has_islands:
        yield from facts.calls("step", "all-reduce", [loss], *roles.step)
    elif facts.grid.num_ranks > 1:
        yield Event("step", CommKey((), "", "all-reduce"), CommCount(1, loss))
    buffers = [size for stage in facts.own.values() for size in stage.buffers]
    yield from facts.calls("step", "broadcast", buffers, *roles.same_stage)
    if facts.plan.capacity != "none":  # shapes of micro-batches
        sizes = [8 * (1 + facts.plan.micro) * facts.plan.ep]
        yield from facts.calls("step", "all-gather", sizes, *EXPERTS)


def exchange_events(facts: RankFacts) -> Iterator[Event]:
    """Yield the communication of one exchange of weights between islands, of all its parts: changes, their
    drift, buffers of floating-point numbers, and the new weights inside an island."""
    plan, roles = facts.plan, facts.roles
    if not roles.has_islands:
        return
    for stage in facts.own.values():
        trained = [unit.range_numel for unit in stage.layout.units if unit.trains]
        by_op: dict[str, list[int]] = {"all-reduce": list(stage.buffers)}
        if plan.exchange == "fp32":
            by_op["all-reduce"] += [numel * MASTER_BYTES[plan.dtype] for numel in trained]
        else:
            of_units = (_code_messages(numel, plan.num_islands, plan.exchange) for numel in trained)
            codes = list(chain.from_iterable(of_units))
            by_op |= {"all-to-all": codes, "all-gather": codes}
        for op, sizes in by_op.items():
            yield from facts.calls(EXCHANGE, op, sizes, *REPLICAS, channel="reductions")
    drifts = [2 * 8] * plan.exchange_parts
    for axes in (REPLICAS, roles.one_copy):
        yield from facts.calls(EXCHANGE, "all-reduce", drifts, *axes, channel="reductions")
    for stage in facts.own.values():
        itemsize = COMPUTE_BYTES[plan.dtype]
        op, sizes = "all-gather", [unit.num_bytes(unit.numel, itemsize) for unit in stage.layout.units]
        if facts.transport.shares:  # before and after new weights are written
            op, sizes = "barrier", [0, 0]
        elif plan.zero == 3:
            continue
        times = plan.exchange_parts
        yield from facts.calls(EXCHANGE, op, sizes, *roles.states(), channel="gathers", times=times)


def ring_bytes(traffic: Traffic, grid: Grid) -> int:
    """Bytes that leave a rank if every collective runs in a ring, the minimum. Received bytes are counted on
    their sender."""
    return round(math.fsum(_sent_bytes(key, count, grid) for key, count in traffic.items()))


def _sent_bytes(key: CommKey, count: CommCount, grid: Grid) -> float:
    ranks = grid.degree(*key.axes) if key.axes else grid.num_ranks
    share = (ranks - 1) / ranks
    alone = {"send": 1.0, "receive": 0.0, "messages": 1.0}
    times = {"all-reduce": 2 * share, "exchange": ranks - 1, **alone}
    return count.num_bytes * times.get(key.op, share)


# --- parameter servers

_NUMBER_BYTES = 4  # of an element that is sent by itself


@dataclass(frozen=True)
class ServerTraffic:
    """Bytes of a step, as (sent, received). See [Note: bytes of parameter servers].

    worker   of a worker; with colocated servers, of a process, which is both
    server   of a dedicated server, without its replica
    replica  of a server, for replicas
    ring     of a rank of `zero=1` over the workers
    """

    worker: tuple[int, int]
    server: tuple[int, int] | None
    ring: tuple[int, int]
    replica: tuple[int, int] = (0, 0)


def server_traffic(plan: Plan, numel: int) -> ServerTraffic:
    """`numel`: trained elements of the model. Pushes that leave out zeros are smaller."""
    push, pull = numel * _push_bytes(plan), float(numel * COMPUTE_BYTES[plan.dtype])
    full, share = float(numel * MASTER_BYTES[plan.dtype]), (plan.dp - 1) / plan.dp
    reduced = full if top_share(plan.reduce) or plan.local_steps else push  # no ring sends parts or changes
    ring = round(share * (reduced + pull))
    if plan.local_steps:
        push, pull, full = (num_bytes / plan.local_steps for num_bytes in (push, full, full))
    if plan.server == "colocated":
        both = round(share * (push + pull))
        return ServerTraffic((both, both), None, (ring, ring))
    each = plan.dp / plan.num_servers
    copied = round(full / plan.servers) if plan.server == "replicated" else 0
    server = (round(each * pull), round(each * push))
    return ServerTraffic((round(push), round(pull)), server, (ring, ring), (copied, copied))


def _push_bytes(plan: Plan) -> float:
    """Bytes per element of a push."""
    if share := top_share(plan.push_format):
        return share * (MASTER_BYTES[plan.dtype] + _NUMBER_BYTES)
    codes = BLOCK_BYTES.get(plan.push_format)
    return MASTER_BYTES[plan.dtype] if codes is None else codes / BLOCK
