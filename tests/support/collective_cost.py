"""Costs of collectives that only tests need: a two-level all-reduce, a tree broadcast."""

from collections.abc import Sequence

from plait.plan.cost_model import Link, cost_s


def two_level_cost_s(hosts: Sequence[int], num_bytes: float, inside: Link, between: Link) -> float:
    """Seconds of a two-level all-reduce; `hosts`: the number of ranks on each."""
    largest = max(hosts)
    if len(set(hosts)) == 1:
        within, crossing = cost_s("ring", largest, num_bytes, inside), num_bytes / largest
    else:
        within, crossing = cost_s("tree", largest, num_bytes, inside), num_bytes
    return within + cost_s("ring", len(hosts), crossing, between)


def tree_broadcast_s(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of a broadcast by a binomial tree: half of its all-reduce, without the additions."""
    return cost_s("tree", num_ranks, num_bytes, Link(link.latency_s, link.bytes_per_s)) / 2
