"""The best plans of a cluster, without pricing most of them.

[Note: search in order of a lower bound]
Plans are decided level by level (`space.Decided`). A heap holds partly decided plans by a lower bound of
the time of all plans that they lead to, and priced plans by their time (best-first search, A*). Plans leave
the heap in order of time: the first priced one is the best, the k-th the k-th best, and what is still in
the heap is no faster. The result is the same as of an exhaustive search as long as no bound exceeds the value
that it bounds, which a test checks. A plan is dropped as soon as a lower bound of its memory exceeds the
device's. The memory of a complete plan is computed before its time.

The same search in order of memory finds the least that a set of plans needs.

A search of a part of the plans continues from the heap of a search that has stopped, and need not drop again
the plans that this one dropped.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any

from plait.plan import Plan
from plait.planner.bounds import EstimateCache
from plait.planner.cluster import Cluster
from plait.planner.space import DECIDED_AT, Decided, Space
from plait.planner.step_estimate import StepEstimate

_ROUNDING = 1 - 1e-9  # a bound may exceed an equal value by rounding
_REPORT_EVERY = 256  # plans
_CLOCK_EVERY = 64  # plans: reading the clock takes as long as some bounds


@dataclass
class SearchCounts:
    """Plans of a search, complete or not: bounded, dropped because of memory, and priced."""

    bounded: int = 0
    too_large: int = 0
    priced: int = 0


@dataclass(frozen=True)
class Field:
    """A cluster, its plans and their prices.

    weight     what is minimized, per second of a step: dollars, joules, or 1
    limit_s    slower plans are dropped
    headroom   part of a device's memory that plans leave free
    """

    cluster: Cluster
    space: Space
    estimates: EstimateCache
    weight: float = 1.0
    limit_s: float = math.inf
    headroom: float = 0.0

    @property
    def capacity_bytes(self) -> float:
        return self.cluster.device.memory_bytes * (1 - self.headroom)


# Bound or value, 1 for a value, what orders equal ones, the number of the plan's field, the plan, its level.
_Entry = tuple[float, int, Any, int, Plan, Decided]


@dataclass
class Search:
    """A search over one or several clusters. See [Note: search in order of a lower bound].

    report        called now and then with the counts
    most_steps    plans taken from the heap, after which it gives up
    end_s         of the process's time, after which it gives up too
    enough        a complete plan with this value or less ends it
    most          value above which it ends
    reached       value up to which there is no other plan than those found
    is_exhausted  there is no other plan at all
    gave_up       the search has ended before it has found all
    least         the least value of a complete plan, and the plan, which may not have been yielded
    heap          what is left; a search that is given one begins with it
    found         what was yielded
    fields        the plans' fields
    fold          of plans with the same value, only the best is yielded
    folded        the others, as far as they were reached
    """

    counts: SearchCounts = field(default_factory=SearchCounts)
    report: Callable[[SearchCounts], None] = lambda _: None
    most_steps: int | None = None
    end_s: float = math.inf
    enough: float = -math.inf
    most: float = math.inf
    reached: float = 0.0
    is_exhausted: bool = False
    gave_up: bool = False
    least: tuple[float, Plan | None] = (math.inf, None)
    heap: list[_Entry] | None = None
    found: list[_Entry] = field(default_factory=list)
    fields: Sequence[Field] = ()
    fold: Callable[[Plan], object] | None = None
    folded: list[_Entry] = field(default_factory=list)
    _ties: Iterator[int] = field(default_factory=count)

    def within(self, at: Field, most_steps: int) -> "Search":
        """Return a search by the same value of the part of a cluster's plans that `at.space` allows, which
        begins where this one has stopped."""
        is_of = [each.cluster is at.cluster for each in self.fields]
        kept = [entry for entry in (*self.found, *self.folded, *(self.heap or ())) if is_of[entry[3]]]
        for key, values in at.space.only.items():
            level, value_of = DECIDED_AT[key], attrgetter(key)
            kept = [entry for entry in kept if entry[5] < level or value_of(entry[4]) in values]
        heapq.heapify(kept)
        best = min((entry for entry in kept if entry[1]), default=None)
        least = (math.inf, None) if best is None else (best[0], best[4])
        fields = [at] * len(self.fields)
        return Search(
            report=self.report,
            most_steps=most_steps,
            end_s=self.end_s,
            least=least,
            heap=kept,
            fields=fields,
            _ties=self._ties,
        )

    def fastest(self, fields: Sequence[Field] = ()) -> Iterator[tuple[Field, StepEstimate]]:
        """Yield the plans that fit into memory, the best first."""

        def bound(at: Field, plan: Plan, decided: Decided) -> float:
            seconds = at.estimates.least_seconds(plan, decided)
            return seconds * at.weight if seconds <= at.limit_s else math.inf

        def is_possible(at: Field, plan: Plan, decided: Decided) -> bool:
            fits = at.estimates.least_bytes(plan, decided) <= at.capacity_bytes
            self.counts.too_large += not fits
            return fits

        def value(at: Field, plan: Plan) -> float:
            of_plan = (at.estimates.first_rank_bytes, at.estimates.memory_bytes)
            if any(num_bytes(plan) > at.capacity_bytes for num_bytes in of_plan):
                self.counts.too_large += 1
                return math.inf
            self.counts.priced += 1
            seconds = at.estimates.estimate(plan).step_s
            return seconds * at.weight if seconds <= at.limit_s else math.inf

        for at, plan, _ in self._ascending(fields, bound, value, is_possible):
            yield at, at.estimates.estimate(plan)

    def smallest(self, at: Field) -> tuple[Plan, float] | None:
        """Return the plan that needs the least memory, and its bytes; None if there are no plans."""
        found = self._ascending(
            [at],
            lambda at, plan, decided: at.estimates.least_bytes(plan, decided),
            lambda at, plan: at.estimates.memory_bytes(plan),
        )
        return next(((plan, num_bytes) for _, plan, num_bytes in found), None)

    def _ascending(
        self,
        fields: Sequence[Field],
        bound: Callable[[Field, Plan, Decided], float],
        value: Callable[[Field, Plan], float],
        is_possible: Callable[[Field, Plan, Decided], bool] = lambda *_: True,
    ) -> Iterator[tuple[Field, Plan, float]]:
        """Yield complete plans in order of their value; equal ones by their text."""
        if self.heap is None:
            nothing = Plan(), Decided.NOTHING
            self.fields = fields
            self.heap = [(0.0, 0, next(self._ties), number, *nothing) for number in range(len(fields))]
        heap, seen = self.heap, set[object]()
        for step in count():
            self.is_exhausted = not heap
            self.gave_up = self.gave_up or bool(heap and step == self.most_steps)
            if not heap or self.gave_up:
                return
            entry = heapq.heappop(heap)
            least, is_exact, _, number, plan, decided = entry
            at, self.reached = self.fields[number], least
            if least > self.most:
                heapq.heappush(heap, entry)
                return
            kind = (number, self.fold(plan)) if self.fold and decided else None
            if kind in seen:
                self.folded.append(entry)
            elif is_exact:
                self.found.append(entry)
                if kind:
                    seen.add(kind)
                yield at, plan, least
            elif decided and not is_possible(at, plan, decided):
                continue
            elif decided is Decided.ALL:
                exact = value(at, plan)
                self.least = min(self.least, (exact, plan), key=lambda each: each[0])
                if exact <= self.enough:
                    return
                if math.isfinite(exact):
                    heapq.heappush(heap, (exact, 1, (number, str(plan)), number, plan, decided))
            else:
                level = Decided(decided + 1)
                for child in at.space.expand(plan, decided):
                    self._count()
                    if self.counts.bounded % _CLOCK_EVERY == 0 and time.process_time() > self.end_s:
                        self.gave_up = True
                        return
                    child_least = max(least, bound(at, child, level) * _ROUNDING)
                    if math.isfinite(child_least):
                        heapq.heappush(heap, (child_least, 0, next(self._ties), number, child, level))

    def _count(self) -> None:
        self.counts.bounded += 1
        if self.counts.bounded % _REPORT_EVERY == 0:
            self.report(self.counts)
