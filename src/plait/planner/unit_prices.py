"""Seconds of the collectives of a plan's units, by the events of `plan/events.py`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from plait.plan import Plan
from plait.plan.axes import Axes, UnitKind
from plait.plan.compression import Factors
from plait.plan.events import Collective, During, TransportFacts, UnitMessages, UnitSizes, unit_events
from plait.plan.grid import Grid
from plait.plan.layout import UnitLayout
from plait.plan.memory import MASTER_BYTES
from plait.plan.quantized import FORMATS
from plait.planner.communication import Group, Links, collective_s
from plait.planner.space import with_defaults


def unit_prices(plan: Plan, links: Links) -> "UnitPrices":
    """The prices of a plan, which its stages and its ranks share, and plans that differ in what is computed
    only."""
    return _unit_prices(_without_computation(plan), links)


_without_computation = with_defaults(
    "schedule", "chunks", "stages", "sp", "cp_method", "recompute", "compile"
)


@lru_cache(maxsize=1 << 12)
def _unit_prices(plan: Plan, links: Links) -> "UnitPrices":
    return UnitPrices(plan, links)


class UnitPrices:
    """Seconds of the collectives of a plan's units, on devices that share no memory."""

    def __init__(self, plan: Plan, links: Links) -> None:
        self._plan = plan if plan.algorithm == "auto" else replace(plan, algorithm="auto")
        self._links, self._groups = links, dict[Axes, Group]()
        self._messages = {kind: messages_of(self._plan, kind) for kind in UnitKind}
        self._rank = plan.powersgd_rank
        of_kinds = self._messages.items()
        self._shards = {kind: of.grid.degree(*of.roles.states(kind)) for kind, of in of_kinds}
        self._seconds: dict[tuple[object, ...], float] = {}
        covers_replicas = self._messages[UnitKind.DENSE].covers_replicas
        events = unit_events(self._plan, covers_replicas=covers_replicas)
        # No unit of the planner has partial sums.
        self.events = tuple(event for event in events if event.collective is not Collective.PARTIAL_SUM)
        of_micros = During.PASSES, During.BACKWARDS
        self.of_micros = tuple(event for event in self.events if event.during in of_micros)

    def seconds(
        self,
        collective: Collective,
        units: Sequence[UnitLayout],
        *,
        sends_tensors: bool = False,
        rank_s: float = 0.0,
    ) -> float:
        """Seconds of a call for each of these units, or for each of their tensors. `rank_s`: of the host, for
        each rank in the list that a gather fills."""
        if self._plan.ep == 1 and units[-1].trains:  # of a stage with frozen units, the last one is
            return self._seconds_of_kind(collective, units, sends_tensors, rank_s)
        by_kind: dict[tuple[UnitKind, str], list[UnitLayout]] = {}
        for unit in units:
            if unit.trains or self._moves_frozen(collective):
                by_kind.setdefault((unit.kind, unit.format), []).append(unit)
        return sum([self._seconds_of_kind(collective, of, sends_tensors, rank_s) for of in by_kind.values()])

    def _moves_frozen(self, collective: Collective) -> bool:
        return self._plan.zero == 3 and collective is Collective.GATHER

    def _seconds_of_kind(
        self, collective: Collective, units: Sequence[UnitLayout], sends_tensors: bool, rank_s: float
    ) -> float:
        rank, kind, number = self._rank, units[0].kind, len(units)
        if sends_tensors:
            number = sum(len(unit.params) for unit in units)
        each = sum([unit.numel for unit in units]) / number
        factors = (0.0, 0.0)
        if rank is not None:
            left, right = Factors.sizes_of(units, rank)
            factors = left / number, right / number
        form = units[0].format
        key = collective, kind, each, factors, form
        if key not in self._seconds:
            codes = FORMATS[form].num_bytes(int(each)) if form else 0
            sizes = UnitSizes(each, each // self._shards[kind], (), factors, codes)
            self._seconds[key] = self._once(collective, kind, sizes)
        listed_s = rank_s * self._shards[kind] if collective is Collective.GATHER else 0.0
        return number * (self._seconds[key] + listed_s)

    def _once(self, collective: Collective, of_kind: UnitKind, sizes: UnitSizes) -> float:
        total = 0.0
        for op, axes, calls in self._messages[of_kind].of(collective, sizes):
            kind, group = _KINDS.get((collective, op), op), self._group(axes)
            if group.degree > 1:
                for num_bytes in calls:
                    total += collective_s(kind, self._links, group, num_bytes)
        return total

    def _group(self, axes: Axes) -> Group:
        if axes not in self._groups:
            grid = self._messages[UnitKind.DENSE].grid
            self._groups[axes] = Group(
                grid.degree(*axes), grid.stride(axes[-1]) if axes else 1, self._plan.num_ranks
            )
        return self._groups[axes]


_KINDS = {
    (Collective.GATHER, "all-gather"): "unshard",
    (Collective.REDUCE, "reduce-scatter"): "scattered sum",
}


def messages_of(plan: Plan, kind: UnitKind = UnitKind.DENSE) -> UnitMessages:
    """Return the messages of the plan's units of a kind, on devices that share no memory."""
    itemsize = MASTER_BYTES[plan.dtype]
    transport = TransportFacts(itemsize, shares=False, exchanges=False, host_size=plan.num_ranks)
    return UnitMessages(plan, Grid.from_plan(plan), transport, kind=kind)
