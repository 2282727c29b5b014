"""Sentences about a search's answer: what the cluster, the batch, the memory and the sequence have to do with
it."""

from collections.abc import Iterator
from dataclasses import replace

from plait.plan import format_bytes
from plait.planner.best_first import Field, Search
from plait.planner.bounds import EstimateCache
from plait.planner.cluster import Cluster
from plait.planner.memory import peak_memory
from plait.planner.ranked_plan import RankedPlan
from plait.planner.search import HEADROOM, Objective, SearchResult
from plait.planner.space import Space, read_pins
from plait.planner.step_estimate import StepEstimate
from plait.tables import counted

_LITTLE_LONGER = 1.5  # times the best step: half of the devices would take twice as long if all were busy
_BUSY = _LITTLE_LONGER / 2  # of the step: with more, half of the devices take longer than that
_STEPS = 3000  # of the search for a plan of half of the devices


def advice(
    found: SearchResult,
    cluster: Cluster,
    pins: str = "",
    *,
    headroom: float = HEADROOM,
    objective: Objective = "time",
) -> Iterator[str]:
    """Yield what the best plan says about `cluster`, of which it may use all devices, and about the work."""
    first = found.best[0]
    batch = f"{counted(first.work.batch, 'sequence')} a step"
    unused = cluster.num_devices - first.cluster.num_devices
    if unused:
        why = "divides the batch" if objective == "time" else "is as good as this one"
        yield f"{unused:,} devices stay unused: with {batch}, no plan of all {cluster.num_devices:,} {why}."
    elif objective == "time" and (half := _half(first, pins, headroom)) is not None:
        yield (
            f"The cluster is large for {batch}: {half.plan.num_ranks:,} devices take "
            f"{half.step_s / first.estimate.step_s:.2f} times as long, with {half.plan}"
        )
    if first.plan.offload != "none":
        capacity = first.cluster.device.memory_bytes * (1 - headroom)
        kept = replace(first.plan, offload="none")
        lacks = peak_memory(first.model, kept, first.cluster, first.work, first.software)[1] - capacity
        yield f"Without offload={first.plan.offload}, the first plan lacks {format_bytes(int(lacks))}."
    without_cp = next((family for family in found.families if family.name == "cp=1"), None)
    if without_cp is not None:
        yield f"Sequences of {first.work.sequence:,} tokens are for cp. Without it: {without_cp.reason}"


def _half(first: RankedPlan, pins: str, headroom: float) -> StepEstimate | None:
    """Return a plan of half of the domains that takes little longer, if devices wait for much of a step."""
    cluster, estimate = first.cluster, first.estimate
    computes = estimate.parts["compute"] + estimate.parts["recompute"]
    unit = cluster.domain_size // cluster.host_size
    if cluster.num_hosts < 2 * unit or computes > _BUSY * estimate.step_s:
        return None
    half = replace(cluster, num_hosts=cluster.num_hosts // unit // 2 * unit)
    space = Space.of(first.model, half, first.work, read_pins(pins))
    cache = EstimateCache(first.model, half, first.work, first.software)
    limit_s = _LITTLE_LONGER * estimate.step_s
    search = Search(most_steps=_STEPS)
    at = Field(half, space, cache, limit_s=limit_s, headroom=headroom)
    exact = next((each for _, each in search.fastest([at])), None)
    seen = search.least[1]
    return cache.estimate(seen) if exact is None and seen is not None else exact
