"""Seconds of collective algorithms, by the formulas in the docstrings of `plan/collectives.py`."""

import math
from collections.abc import Sequence

from plait.plan.collectives import is_power_of_two, scatters
from plait.plan.cost_model import Link


def cost_s(algorithm: str, num_ranks: int, num_bytes: float, link: Link, *, scatter: bool = False) -> float:
    """Seconds of an all-reduce, or with `scatter` a reduce-scatter, of `num_bytes` on every rank.

    The formulas are documented with the algorithms in `plan/collectives.py`; not for the two-level algorithm.
    """
    reduce_s, mirror_s = _halves_s(algorithm, num_ranks, num_bytes, link)
    return reduce_s if scatter and scatters(algorithm, num_ranks) else reduce_s + mirror_s


def _halves_s(algorithm: str, num_ranks: int, num_bytes: float, link: Link) -> tuple[float, float]:
    """Seconds of the reducing half and of its mirror."""
    power = 1 << (num_ranks.bit_length() - 1)
    folded = num_bytes if algorithm == "halving" and not is_power_of_two(num_ranks) else 0
    ranks = power if algorithm == "halving" else num_ranks
    if algorithm in ("ring", "halving"):
        messages = ranks - 1 if algorithm == "ring" else int(math.log2(ranks))
        bytes_moved = (ranks - 1) / ranks * num_bytes + folded
        messages += 1 if folded else 0
    else:
        assert algorithm in ("naive", "tree"), f"no formula for {algorithm}"
        messages = ranks - 1 if algorithm == "naive" else (ranks - 1).bit_length()
        bytes_moved = float(messages * num_bytes)
    moved_s = messages * link.latency_s + bytes_moved / link.bytes_per_s
    return moved_s + bytes_moved * link.reduce_s_per_byte, moved_s


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
