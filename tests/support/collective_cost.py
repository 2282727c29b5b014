"""Seconds of collective algorithms, of which `plan/cost_model.py` has the formulas."""

from collections.abc import Sequence

from plait.plan.cost_model import Link, algorithm_s


def cost_s(algorithm: str, num_ranks: int, num_bytes: float, link: Link, *, scatter: bool = False) -> float:
    """Seconds of an all-reduce, or with `scatter` a reduce-scatter, of `num_bytes` on every rank."""
    collective = "reduce-scatter" if scatter else "all-reduce"
    found = algorithm_s(collective, algorithm, num_ranks, num_bytes, link)
    assert found is not None, f"no formula for {algorithm}"
    return found


def two_level_cost_s(hosts: Sequence[int], num_bytes: float, inside: Link, between: Link) -> float:
    """Seconds of a two-level all-reduce; `hosts`: the number of ranks on each."""
    largest = max(hosts)
    if len(set(hosts)) == 1:
        within, crossing = cost_s("ring", largest, num_bytes, inside), num_bytes / largest
    else:
        within, crossing = cost_s("tree", largest, num_bytes, inside), num_bytes
    return within + cost_s("ring", len(hosts), crossing, between)


def tree_broadcast_s(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of a broadcast by a binomial tree."""
    found = algorithm_s("broadcast", "tree", num_ranks, num_bytes, link)
    assert found is not None
    return found
