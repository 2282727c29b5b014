"""Seconds of the collectives of a plan's units, by the events of `plan/events.py`."""

from dataclasses import replace
from functools import lru_cache

from plait.plan import Plan
from plait.plan.axes import Axes, UnitKind
from plait.plan.compression import Factors
from plait.plan.events import Collective, During, TransportFacts, UnitMessages, UnitSizes, unit_events
from plait.plan.grid import Grid
from plait.plan.layout import Layout
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
        self._of_layouts: dict[tuple[object, ...], float] = {}
        covers_replicas = self._messages[UnitKind.DENSE].covers_replicas
        events = unit_events(self._plan, covers_replicas=covers_replicas)
        # No unit of the planner has partial sums.
        self.events = tuple(event for event in events if event.collective is not Collective.PARTIAL_SUM)
        of_micros = During.PASSES, During.BACKWARDS
        self.of_micros = tuple(event for event in self.events if event.during in of_micros)

    def seconds(
        self, collective: Collective, layout: Layout, *, sends_tensors: bool = False, rank_s: float = 0.0
    ) -> float:
        """Seconds of a call for each of these units, or for each of their tensors. `rank_s`: of the host, for
        each rank in the list that a gather fills."""
        key = collective, layout.totals, sends_tensors, rank_s
        seconds = self._of_layouts.get(key)
        if seconds is None or self._rank is not None:
            groups: dict[tuple[UnitKind, str], tuple[int, int]] = {}
            for kind, form, trains, *counts, numel, tensors in layout.totals:
                if trains or (self._plan.zero == 3 and collective is Collective.GATHER):
                    number, before = groups.get((kind, form), (0, 0))
                    groups[kind, form] = number + (tensors if sends_tensors else counts[0]), before + numel
            seconds = 0.0
            for (kind, form), (number, numel) in groups.items():
                listed_s = rank_s * self._shards[kind] if collective is Collective.GATHER else 0.0
                seconds += self._seconds_of(collective, layout, kind, form, number, numel) + number * listed_s
            self._of_layouts[key] = seconds
        return seconds

    def _seconds_of(
        self, collective: Collective, layout: Layout, kind: UnitKind, form: str, number: int, numel: int
    ) -> float:
        """Seconds of `number` calls for units of a kind and format, with equal parts of their elements."""
        each, factors = numel / number, (0.0, 0.0)
        if self._rank is not None:
            units = [unit for unit in layout.units if (unit.kind, unit.format) == (kind, form)]
            left, right = Factors.sizes_of(units, self._rank)
            factors = left / number, right / number
        key = collective, kind, each, factors, form
        if key not in self._seconds:
            codes = FORMATS[form].num_bytes(int(each)) if form else 0
            sizes = UnitSizes(each, each // self._shards[kind], (), factors, codes)
            self._seconds[key] = self._once(collective, kind, sizes)
        return number * self._seconds[key]

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
