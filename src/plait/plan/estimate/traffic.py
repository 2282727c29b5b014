"""What one rank will say in a step, foretold: the lines and numbers that its ledger will have.

One function per strand, of one step as it is from the second one on; the first says more: ranks agree on
orders, and compare what they were given. Of a step whose gradients are finite.

[Note: what cannot be decided here]
What layers say to each other on the grid, in which order a stage uses its units, and what it hands on follow
from a model's own code, which these functions do not know: `StageFacts` has it, from one micro-batch that the
same code ran on meta (`dry.py`). All else follows from the plan, the schedule and the layout.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plait.plan.collectives import Hosts, Send, Steps, all_reduce_steps, reduce_scatter_steps, scratch_numel
from plait.plan.comm_log import CommCount, CommKey, Traffic, sum_traffic
from plait.plan.compression import (
    BLOCK_BYTES,
    SUM_BYTES,
    blocks_per_rank,
    compresses,
    factor_bytes,
    matrices,
    reduces_over_all,
)
from plait.plan.estimate.memory import COMPUTE_BYTES, MASTER_BYTES
from plait.plan.grid import AXES, Grid
from plait.plan.layout import Layout, UnitLayout
from plait.plan.plan import Plan
from plait.plan.prefetch import ExecOrder, planned_gathers
from plait.plan.schedule.action import Action, Kind, Schedule


@dataclass(frozen=True)
class StageFacts:
    """What is known of one stage on one place of the grid.

    said      by one micro-batch's forward and backward, to the grid
    uses      of units, by their blocks
    output    bytes of each tensor that is handed to the next stage
    gradient  bytes of each that comes back for them
    buffers   bytes of each buffer that follows the first data rank's
    """

    layout: Layout
    said: Traffic = field(default_factory=dict)
    uses: ExecOrder[str] = field(default_factory=lambda: ExecOrder((), ()))
    output: tuple[int, ...] = ()
    gradient: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransportFacts:
    """What the transport decides, as far as bytes depend on it.

    incoming_bytes  of an element of a whole gradient
    shares          the ranks along `shard` have one memory for parameters
    exchanges       replicas send each other whole gradients
    host_size       ranks per host
    """

    grad_itemsize: int
    shares: bool
    exchanges: bool
    host_size: int


@dataclass(frozen=True)
class RankFacts:
    """A rank. `stages`: all of the pipeline's, at this rank's place of the grid. `shared`: units that several
    stages have, with those stages."""

    plan: Plan
    grid: Grid
    rank: int
    schedule: Schedule
    stages: Sequence[StageFacts]
    shared: Mapping[str, Sequence[int]]
    terms: TransportFacts

    @cached_property
    def place(self) -> int:
        """On `pp`."""
        return self.grid.coord(self.rank)["pp"]

    @property
    def actions(self) -> Sequence[Action]:
        return self.schedule.ranks[self.place]

    @cached_property
    def own(self) -> dict[int, StageFacts]:
        """The rank's own stages."""
        return {stage: self.stages[stage] for stage in self.schedule.stages_of(self.place)}

    def line(self, verb: str, *axes: str, lane: str = "") -> CommKey:
        return CommKey(tuple(a for a in AXES if a in axes and self.grid.degree(a) > 1), lane, verb)

    def said(self, verb: str, sizes: Iterable[int], *axes: str, lane: str = "") -> dict[CommKey, CommCount]:
        """Calls of a verb with tensors of these bytes; a lone rank says nothing."""
        found = list(sizes)
        if self.grid.degree(*axes) == 1 or not found:
            return {}
        return {self.line(verb, *axes, lane=lane): CommCount(len(found), sum(found))}


def step_traffic(facts: RankFacts) -> dict[str, dict[CommKey, CommCount]]:
    """By strand: all that the rank says in a step."""
    found = {
        "layers": layers_traffic(facts),
        "parameters": parameters_traffic(facts),
        "gradients": gradients_traffic(facts),
        "stages": stages_traffic(facts),
        "step": per_step_traffic(facts),
    }
    return {strand: traffic for strand, traffic in found.items() if traffic}


def layers_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Inside of layers that are cut on the grid: the same for each micro-batch."""
    micros = facts.plan.micro
    return sum_traffic({line: t * micros for line, t in stage.said.items()} for stage in facts.own.values())


# --- parameters


def parameters_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Parameters on their way to where they are used."""
    plan, found = facts.plan, []
    size = COMPUTE_BYTES[plan.precision]
    for number, stage in facts.own.items():
        units = stage.layout.units
        if facts.terms.shares:
            barriers = [0] if any(unit.trains for unit in units) else []
            found.append(facts.said("barrier", barriers, "shard", lane="gathers"))
        elif plan.zero == 3:
            passes = [a.kind is Kind.B for a in facts.actions if a.stage == number and a.kind is not Kind.W]
            used = planned_gathers(stage.uses, passes, plan.prefetch, keeps=plan.reshard == "step")
            of_block: dict[str, list[int]] = {unit.block: [] for unit in units}
            for unit in units:
                of_block[unit.block].append(unit.numel * size)
            sizes = [one for block in used for one in of_block[block]]
            found.append(facts.said("all-gather", sizes, "shard", lane="gathers"))
        else:
            sizes = [unit.numel * size for unit in units if unit.trains]
            found.append(facts.said("all-gather", sizes, "shard", lane="gathers"))
    return sum_traffic(found)


# --- gradients


def gradients_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Gradients on their way to the owners of their ranges, and between copies of those."""
    plan, found = facts.plan, []
    sums = _reduction_traffic(facts)
    for stage in facts.own.values():
        units = [unit for unit in stage.layout.units if unit.trains]
        for unit in units:
            once = sum_traffic([_partial_grads(facts, unit), sums.first(unit)])
            times = 1 if plan.accumulates_full else plan.micro
            found.append({line: tally * times for line, tally in once.items()})
            if not sums.at_once:
                found.append(sums.between(unit))
        if _votes_on_late_grads(facts):
            found.append(facts.said("all-reduce", [4 * len(units)], "replicate", "shard"))
    master = MASTER_BYTES[plan.precision]
    for name, stages in facts.shared.items():
        held = [unit for s in stages if s in facts.own for unit in facts.stages[s].layout.units]
        sizes = [unit.range_numel * master for unit in held if unit.name == name and unit.trains]
        if len({facts.schedule.rank_of[stage] for stage in stages}) > 1:
            found.append(facts.said("all-reduce", sizes[:1], "pp", lane="shared"))
    return sum_traffic(found)


def _partial_grads(facts: RankFacts, unit: UnitLayout) -> dict[CommKey, CommCount]:
    """Of pieces whose gradient several columns have a part of, in float32 at least."""
    size = max(facts.terms.grad_itemsize, SUM_BYTES)
    sizes = [(stop - start) * size for sharers, start, stop in unit.partial if len(sharers) > 1]
    return facts.said("all-reduce", sizes, "col", lane="gradients")


def _votes_on_late_grads(facts: RankFacts) -> bool:
    """Whether ranks vote on late gradients; see [Note: late gradients] in `parallel/reduce.py`."""
    plan = facts.plan
    stays = plan.zero < 3 or facts.terms.shares or (plan.shard_degree == 1 and plan.offload != "cpu")
    return not (stays or plan.reshard == "step" or plan.keeps_full_grads)


@dataclass(frozen=True)
class _DefaultTraffic:
    """Gradients that travel as they are, or rounded."""

    facts: RankFacts

    @property
    def at_once(self) -> bool:
        return self.facts.terms.exchanges

    def first(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        sizes = [unit.numel * self._size(self.facts.terms.grad_itemsize)]
        if self.at_once:
            return self.facts.said("exchange", sizes, "replicate", lane="reductions")
        return self.facts.said("reduce-scatter", sizes, "shard", lane="reductions")

    def between(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        size = self._size(MASTER_BYTES[self.facts.plan.precision])
        return self.facts.said("all-reduce", [unit.range_numel * size], "replicate", lane="reductions")

    def _size(self, wide: int) -> int:
        return 2 if _rounds(self.facts.plan) else wide


@dataclass(frozen=True)
class _CompressedTraffic:
    """Gradients that travel in codes: to the owners, and where all need all, back."""

    facts: RankFacts

    @property
    def at_once(self) -> bool:
        return reduces_over_all(self.facts.plan)

    def first(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        axes = ("replicate", "shard") if self.at_once else ("shard",)
        return self._sum(unit.numel, axes, scattered=not self.at_once)

    def between(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        return self._sum(unit.range_numel, ("replicate",), scattered=False)

    def _sum(self, numel: int, axes: tuple[str, ...], *, scattered: bool) -> dict[CommKey, CommCount]:
        ranks = self.facts.grid.degree(*axes)
        size = ranks * blocks_per_rank(numel, ranks) * BLOCK_BYTES[self.facts.plan.reduce]
        verbs = ["all-to-all"] if scattered else ["all-to-all", "all-gather"]
        return sum_traffic(self.facts.said(verb, [size], *axes, lane="reductions") for verb in verbs)


@dataclass(frozen=True)
class _PowerSGDTraffic:
    """Gradients that travel as two thin factors."""

    facts: RankFacts
    at_once: bool = True

    def first(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        rank = self.facts.plan.powersgd_rank
        assert rank is not None, "factors without a rank"
        right = SUM_BYTES * rank * sum(matrix.columns for matrix in matrices(unit, rank))
        sizes = [factor_bytes(unit, rank), right]
        return self.facts.said("all-reduce", sizes, "replicate", "shard", lane="reductions")

    def between(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        raise AssertionError(f"replicas have the sum of {unit.name} already")


@dataclass(frozen=True)
class _AlgorithmTraffic:
    """Gradients that are added up by a named algorithm, in sends and receives."""

    facts: RankFacts

    @property
    def at_once(self) -> bool:
        return self.facts.plan.algorithm_reduces_all

    def first(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        return self._moves(unit.numel, "replicate" if self.at_once else "shard", scatter=not self.at_once)

    def between(self, unit: UnitLayout) -> dict[CommKey, CommCount]:
        return self._moves(unit.range_numel, "replicate", scatter=False)

    def _moves(self, numel: int, axis: str, *, scatter: bool) -> dict[CommKey, CommCount]:
        plan = self.facts.plan
        size = 2 if _rounds(plan) else MASTER_BYTES[plan.precision]
        moves = [move for step in reduction_steps(self.facts, numel, axis, scatter=scatter) for move in step]
        given = [(m.stop - m.start) * size for m in moves if isinstance(m, Send)]
        taken = [(m.stop - m.start) * size for m in moves if not isinstance(m, Send)]
        say = self.facts.said
        return sum_traffic(
            say(v, s, axis, lane="reductions") for v, s in (("send", given), ("receive", taken))
        )


def reduction_steps(facts: RankFacts, numel: int, axis: str, *, scatter: bool) -> Steps:
    """This rank's, of the plan's algorithm, in a sum over an axis."""
    ranks = facts.grid.group(facts.rank, axis)
    if len(ranks) == 1:
        return []
    make = reduce_scatter_steps if scatter else all_reduce_steps
    hosts = _hosts(ranks, facts.terms.host_size) if facts.plan.algorithm == "two-level" else None
    return make(facts.plan.algorithm, ranks.index(facts.rank), len(ranks), numel, hosts)


def scratch_bytes(facts: RankFacts) -> int:
    """What a named algorithm holds for what it has received and not yet added, on all stages of the rank."""
    plan = facts.plan
    if plan.algorithm == "auto" or plan.dp == 1 or compresses(plan):
        return 0
    size, most = 2 if _rounds(plan) else MASTER_BYTES[plan.precision], 0
    for stage in facts.own.values():
        largest = max((unit.numel for unit in stage.layout.units if unit.trains), default=0)
        ranged = largest if plan.algorithm_reduces_all else largest // plan.shard_degree
        for axis, numel, scatter in (("shard", largest, True), ("replicate", ranged, False)):
            most += size * scratch_numel(reduction_steps(facts, numel, axis, scatter=scatter))
    return most


def _hosts(ranks: Sequence[int], host_size: int) -> Hosts:
    by_host: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        by_host.setdefault(rank // host_size, []).append(place)
    return list(by_host.values())


def _rounds(plan: Plan) -> bool:
    return plan.reduce == "bf16" and plan.dp > 1


def _reduction_traffic(
    facts: RankFacts,
) -> _DefaultTraffic | _CompressedTraffic | _PowerSGDTraffic | _AlgorithmTraffic:
    plan = facts.plan
    if compresses(plan):
        return _CompressedTraffic(facts) if plan.powersgd_rank is None else _PowerSGDTraffic(facts)
    if plan.algorithm != "auto" and plan.dp > 1:
        return _AlgorithmTraffic(facts)
    return _DefaultTraffic(facts)


# --- between stages, and once a step


def stages_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """Activations on to the next stage, gradients back to the one before."""
    found = []
    rank_of, here, last = facts.schedule.rank_of, facts.place, len(facts.stages) - 1
    for kind, stage, _ in facts.actions:
        if kind is Kind.F and stage < last:
            found.append(_message(facts, "activations", here, rank_of[stage + 1], facts.stages[stage].output))
        if kind is Kind.F and stage:
            sizes = facts.stages[stage - 1].output
            found.append(_message(facts, "activations", rank_of[stage - 1], here, sizes))
        if kind is Kind.B and stage:
            sizes = facts.stages[stage - 1].gradient
            found.append(_message(facts, "gradients", here, rank_of[stage - 1], sizes))
        if kind is Kind.B and stage < last:
            found.append(_message(facts, "gradients", rank_of[stage + 1], here, facts.stages[stage].gradient))
    return sum_traffic(found)


def _message(
    facts: RankFacts, what: str, source: int, target: int, sizes: Sequence[int]
) -> dict[CommKey, CommCount]:
    if source == target:
        return {}
    verb = "send" if source == facts.place else "receive"
    lane = f"{what} from stage rank {source} to {target}"
    return facts.said(verb, [size for size in sizes if size], "pp", lane=lane)


def per_step_traffic(facts: RankFacts) -> dict[CommKey, CommCount]:
    """What all agree on in a step: loss and targets, the gradient's norm, what forward has changed."""
    loss, norm = 3 * 8, (1 + 2 * facts.grid.degree("pp")) * 8
    found = [facts.said("all-reduce", [norm], "pp", "shard", "row", "col", lane="reductions")]
    if facts.grid.num_ranks > 1:
        found.append({CommKey((), "", "all-reduce"): CommCount(1, loss)})
    buffers = [size for stage in facts.own.values() for size in stage.buffers]
    found.append(facts.said("broadcast", buffers, "replicate", "shard", "row", "col"))
    return sum_traffic(found)


def ring_bytes(traffic: Traffic, grid: Grid) -> int:
    """What leaves a rank where each collective goes round a ring: the least that there is. What it receives
    has left another rank."""
    return round(math.fsum(_sent_bytes(line, tally, grid) for line, tally in traffic.items()))


def _sent_bytes(line: CommKey, tally: CommCount, grid: Grid) -> float:
    ranks = grid.degree(*line.axes) if line.axes else grid.num_ranks
    share = (ranks - 1) / ranks
    times = {"all-reduce": 2 * share, "exchange": ranks - 1, "send": 1.0, "receive": 0.0}
    return tally.num_bytes * times.get(line.op, share)
