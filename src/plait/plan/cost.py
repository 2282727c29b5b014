"""Cost arithmetic: FLOPs of a training step, seconds of a communication."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.plan.collectives import is_power_of_two, scatters


def training_flops_per_token(
    *, matmul_parameters: int, num_layers: int, attention_width: int, sequence: int
) -> float:
    """FLOPs of forward and backward for one token of a causal decoder.

    6 per parameter that takes part in a matrix product (2 forward, 4 backward; the embedding look-up
    takes part in none, the head does), and for attention 12 x layers x width x sequence for scores and
    values, halved because a causal token sees half the sequence on average. Recompute is not counted:
    this is the model's work, not the hardware's (MFU, not HFU; Chowdhery et al. 2204.02311, appendix B,
    who count attention in full).
    """
    return 6.0 * matmul_parameters + 6.0 * num_layers * attention_width * sequence


@dataclass(frozen=True)
class Link:
    """What a message costs: `latency_s`, and its bytes over `bytes_per_s`; a rank sends and receives at once.

    `reduce_s_per_byte`: of adding what has been received.
    """

    latency_s: float
    bytes_per_s: float
    reduce_s_per_byte: float = 0.0

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def cost_s(algorithm: str, num_ranks: int, num_bytes: float, link: Link, *, scatter: bool = False) -> float:
    """Seconds of an all-reduce, or with `scatter` a reduce-scatter, of `num_bytes` on every rank.

    The formulas stand at the algorithms in `plan/collectives.py`; the two-level one needs two links.
    """
    there, back = _halves_s(algorithm, num_ranks, num_bytes, link)
    return there if scatter and scatters(algorithm, num_ranks) else there + back


def two_level_cost_s(hosts: Sequence[int], num_bytes: float, inside: Link, between: Link) -> float:
    """Seconds of a two-level all-reduce; `hosts`: the number of ranks on each."""
    largest = max(hosts)
    if len(set(hosts)) == 1:
        within, crossing = cost_s("ring", largest, num_bytes, inside), num_bytes / largest
    else:
        within, crossing = cost_s("tree", largest, num_bytes, inside), num_bytes
    return within + cost_s("ring", len(hosts), crossing, between)


def _halves_s(algorithm: str, num_ranks: int, num_bytes: float, link: Link) -> tuple[float, float]:
    """Of the half that reduces, and of its mirror."""
    most = 1 << (num_ranks.bit_length() - 1)
    folded = num_bytes if algorithm == "halving" and not is_power_of_two(num_ranks) else 0
    ranks = most if algorithm == "halving" else num_ranks
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


def tree_broadcast_s(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of a broadcast by a binomial tree."""
    return _halves_s("tree", num_ranks, num_bytes, link)[1]


def chain_broadcast_s(num_ranks: int, num_bytes: float, segments: int, link: Link) -> float:
    """Seconds of a broadcast from rank to rank in segments."""
    if num_ranks == 1:
        return 0.0
    return (num_ranks - 2 + segments) * link.message_s(num_bytes / segments)


def best_segments(num_bytes: int, num_ranks: int, latency_s: float, bandwidth: float) -> int:
    """Into how many segments a chain broadcast is cut for the least time: sqrt((p-2) N / (alpha B)).

    From 1 to `num_bytes`; one for two ranks, where a segment gains nothing.
    """
    if num_ranks < 3 or num_bytes < 2:
        return 1
    if latency_s == 0:
        return num_bytes
    link = Link(latency_s, bandwidth)
    # The time is convex in S: the best whole number is next to the root of its derivative.
    ideal = math.floor(math.sqrt((num_ranks - 2) * num_bytes / (latency_s * bandwidth)))
    near = {min(max(number, 1), num_bytes) for number in (ideal, ideal + 1)}
    return min(sorted(near), key=lambda segments: chain_broadcast_s(num_ranks, num_bytes, segments, link))
