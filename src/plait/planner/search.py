"""The best plans of a cluster, by time, money or energy, or on the fewest devices that meet a deadline."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, get_args

from plait.errors import ConfigError, PlanError
from plait.plan import Plan, format_bytes
from plait.planner.best_first import Field, Search, SearchCounts
from plait.planner.bounds import EstimateCache
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape
from plait.planner.plan_families import PlanFamily, rejected_families
from plait.planner.ranked_plan import SECONDS_PER_DAY, RankedPlan
from plait.planner.space import (
    DEFAULT_PRECISION,
    Space,
    adapter_error,
    experts_error,
    nearest_batch,
    no_plan_error,
    read_pins,
)
from plait.planner.step_estimate import TYPICAL_ERROR, Software, StepEstimate, Workload
from plait.planner.workload import PLAIT

Objective = Literal["time", "cost", "energy"]
HEADROOM = 0.05
MOST_NEAR = 2  # times as many plans as are asked for, with those that are as fast within the typical error
_degrees = attrgetter("pp", "dp", "cp", "ep")  # the ranks of tp follow
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
MOST_LARGER = 64  # times the devices, to which the search for memory goes


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    best      the best plans, the first is the answer
    near      the next ones, as far as the planner's typical error is more than what they are slower
    field     the first plan's, with the estimates of its plans
    families  plans that are not among them because of one of their values, with the reason
    counts    plans of the search
    is_complete  False if its time was over: there may be better plans
    """

    best: tuple[RankedPlan, ...]
    near: tuple[RankedPlan, ...]
    field: Field
    families: tuple[PlanFamily, ...]
    counts: SearchCounts
    is_complete: bool = True

    def is_near_tie(self, ranked: RankedPlan) -> bool:
        """True if the interval of its time, or of its device-hours on another cluster, overlaps with the
        first plan's."""
        first = self.best[0]
        own, least = ranked.cluster.num_devices, first.cluster.num_devices
        return own * ranked.estimate.low_s <= least * first.estimate.high_s


def search(
    model: ModelShape,
    cluster: Cluster,
    work: Workload,
    *,
    objective: Objective = "time",
    top: int = 10,
    pins: str = "",
    tokens: float | None = None,
    deadline_days: float | None = None,
    software: Software = PLAIT,
    headroom: float = HEADROOM,
    wide: bool = False,
    seconds: float = 60.0,
    report: Callable[[SearchCounts], None] = lambda _: None,
) -> SearchResult:
    """Find the `top` best plans for a cluster, one for each pp, tp, cp and ep, and those that are near.

    objective      `time` of a step on all devices; or `cost` (dollars) or `energy` of the training, for which
                   parts of the cluster are considered too, as for `time` if no plan divides the batch
    pins           values that all plans have, such as `tp=8 zero=3`
    tokens         of the complete training
    deadline_days  longest training. With `objective="time"`, the fewest hosts that meet it are chosen
    headroom       part of a device's memory that the plans leave free
    wide           more chunks and policies of recomputation, see space.py [Note: searched keys]
    seconds        of processor time, after which the search gives what it has found
    report         called now and then during the search

    Raises PlanError if no plan exists, fits into memory or meets the deadline; ConfigError for an objective.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(
            "unknown objective",
            given=f"{objective}",
            expected=", ".join(OBJECTIVES),
            hint=next(iter(OBJECTIVES)),
        )
    limit_s = math.inf if deadline_days is None else _limit_s(deadline_days, tokens, work)
    pinned = _checked_pins(pins, model, cluster)
    end_s = time.process_time() + seconds

    def field(of: Cluster) -> Field:
        space = replace(Space.of(model, of, work, pinned), is_wide=wide)
        cache = EstimateCache(model, of, work, software)
        return Field(of, space, cache, _weight(objective, of), limit_s, headroom)

    fields = [field(of) for of in parts(cluster)]
    counts, found, ranked = SearchCounts(), Search(), list[tuple[Field, StepEstimate]]()
    for group in _groups(fields, objective, has_deadline=deadline_days is not None):
        found = Search(counts, report, end_s=end_s, fold=_degrees)
        ranked = _ranked(found, group, top)
        if ranked or found.gave_up:
            break
    if not ranked:
        if found.gave_up:
            raise _no_time(seconds, counts)
        raise _nothing(replace(fields[-1], limit_s=math.inf), work, tokens, deadline_days, software)
    families = rejected_families(ranked[0][0], [each for at, each in ranked if at is ranked[0][0]], found)
    plans = tuple(RankedPlan(estimate, model, at.cluster, work, tokens, software) for at, estimate in ranked)
    return SearchResult(plans[:top], plans[top:], ranked[0][0], tuple(families), counts, not found.gave_up)


def _ranked(found: Search, fields: list[Field], top: int) -> list[tuple[Field, StepEstimate]]:
    """Return the `top` best plans, and the next ones that the planner cannot tell from the first."""
    plans = found.fastest(fields)
    ranked = list(islice(plans, top))
    if ranked:
        at, first = ranked[0]
        found.most = (1 + TYPICAL_ERROR) * at.weight * first.step_s
        ranked += islice(plans, (MOST_NEAR - 1) * top)
    return ranked


def _groups(fields: list[Field], objective: Objective, *, has_deadline: bool) -> list[list[Field]]:
    """Return the parts of a cluster that are searched together, in turn until a plan is found."""
    if objective != "time":
        return [fields]
    if has_deadline:
        return [[each] for each in fields]
    # Parts only if no plan of all devices divides the batch.
    is_divided = nearest_batch(fields[-1].space) is None
    return [[each] for each in (fields[-1:] if is_divided else reversed(fields))]


def _checked_pins(text: str, model: ModelShape, cluster: Cluster) -> dict[str, Any]:
    pins = read_pins(text)
    grid = Plan(tp=pins.get("tp", "1"))
    base = pins.get("base", "none")
    for error in (experts_error(model, pins.get("ep", 1)), adapter_error(model, grid, base)):
        if error is not None:
            raise error
    cluster.device.check_precision(pins.get("precision", DEFAULT_PRECISION))
    return pins


def _no_time(seconds: float, counts: SearchCounts) -> PlanError:
    return PlanError(
        "the search has found no plan yet",
        given=f"{seconds:g} s of processor time, {counts.bounded:,} plans and parts of plans considered",
        expected="fewer plans, or more time",
        hint=f'--pin "tp=8 pp=8", or --seconds {10 * seconds:g}',
    )


def parts(cluster: Cluster) -> list[Cluster]:
    """Return the cluster with 1, 2, 3, 4, 6, 8, 12, ... of its domains of hosts, and with all."""
    unit = cluster.domain_size // cluster.host_size
    num_units = cluster.num_hosts // unit
    sizes = {num_units} | {size for n in range(num_units.bit_length()) for size in (2**n, 3 * 2**n)}
    return [replace(cluster, num_hosts=unit * size) for size in sorted(sizes) if size <= num_units]


def _weight(objective: Objective, cluster: Cluster) -> float:
    if objective == "cost":
        return cluster.num_devices * cluster.device.dollars_per_hour / 3600
    return cluster.num_devices * cluster.device.watts if objective == "energy" else 1.0


def _limit_s(deadline_days: float, tokens: float | None, work: Workload) -> float:
    """The longest step with which the training meets the deadline."""
    if tokens is None:
        raise ConfigError(
            "a deadline needs the number of tokens of the training",
            given=f"deadline={deadline_days:g} days",
            expected="tokens next to a deadline",
            hint="--tokens 1T",
        )
    return deadline_days * SECONDS_PER_DAY * work.tokens / tokens


def _nothing(
    at: Field, work: Workload, tokens: float | None, deadline_days: float | None, software: Software
) -> PlanError:
    """The reason why a search of an entire cluster found no plan."""
    found = Search()
    least = found.smallest(at)
    if least is None:
        return no_plan_error(at.space)
    plan, num_bytes = least
    if num_bytes <= at.capacity_bytes:
        assert tokens is not None, "a plan fits, but none was found"
        assert deadline_days is not None, "a plan fits, but none was found"
        estimate = next(found.fastest([at]))[1]
        days = RankedPlan(estimate, at.space.model, at.cluster, work, tokens).days
        return PlanError(
            "no plan meets the deadline",
            given=f"{deadline_days:g} days for {tokens:.3g} tokens on {at.cluster}",
            expected=f"at least {days:,.1f} days: {estimate.plan}",
            hint="a larger cluster, or fewer tokens",
        )
    return PlanError(
        f"no plan fits into the memory of {at.cluster.device.name}",
        given=f"{plan} needs the least: {format_bytes(int(num_bytes))} on the fullest rank",
        expected=f"at most {format_bytes(int(at.capacity_bytes))}",
        hint=_what_fits(at, work, software),
    )


def _what_fits(at: Field, work: Workload, software: Software) -> str:
    """Return hints that would make a plan fit: without a pin, or with more devices."""
    model, pins = at.space.model, dict(at.space.pins)

    def fits(pins: dict[str, Any], times: int) -> bool:
        cluster = replace(at.cluster, num_hosts=times * at.cluster.num_hosts)
        space = Space.of(model, cluster, work, pins)
        least = Search().smallest(Field(cluster, space, EstimateCache(model, cluster, work, software)))
        return least is not None and least[1] <= at.capacity_bytes

    hints = [f"no --pin {key}" for key in pins if fits({k: v for k, v in pins.items() if k != key}, times=1)]
    times = 2
    while times <= MOST_LARGER and not fits(pins, times):
        times *= 2
    if times <= MOST_LARGER:
        hints.append(f"{times * at.cluster.num_devices:,} devices")
    if work.sequence > 1:
        hints.append("shorter sequences")
    return " or ".join(hints)
