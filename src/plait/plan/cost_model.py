"""Cost arithmetic: FLOPs of a training step, seconds of a communication.

Bandwidths follow the definitions of nccl-tests; a latency-bandwidth line is fitted to measured times.

[Note: robust relative fit]
A collective's time is modelled as t = latency + S/B. Sizes span six orders of magnitude, and an error of
10 % is as bad for a small message as for a large one, so the fit minimizes the relative error: the sum of
((latency + S/B) / t - 1)^2, least squares with weights 1/t. Outliers (a cache limit, another process on the
machine) must not distort the line: errors beyond 1.345 times the usual size count linearly, not squared
(Huber 1964, 95 % efficiency for normal errors; by iterative reweighting). Neither parameter can be negative:
if the best line has a negative one, it is set to 0 and the other is fitted alone.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plait.plan.collectives import is_power_of_two, scatters

# Bytes on the busiest direction of a link per byte of the full tensor, on p ranks.
# nccl-tests, doc/PERFORMANCE.md; gather and scatter as in its gather.cu and scatter.cu.
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda p: 2 * (p - 1) / p,
    "reduce-scatter": lambda p: (p - 1) / p,
    "all-gather": lambda p: (p - 1) / p,
    "broadcast": lambda _: 1.0,
    "reduce": lambda _: 1.0,
    "scatter": lambda p: (p - 1) / p,
    "gather": lambda p: (p - 1) / p,
    "all-to-all": lambda p: (p - 1) / p,
    "barrier": lambda _: 0.0,
    "send-receive": lambda _: 1.0,
}
TRANSPORTS = ("auto", "host", "gloo", "nccl")
COLLECTIVES = tuple(_BUS_FACTORS)
FIGURE_PARAMETERS = 60_000_000  # whose all-reduces by size of a call are drawn: 2006.15704, figure 2


def algorithm_bandwidth(num_bytes: int, seconds: float) -> float:
    """Bytes per second of the full tensor: for a reduce-scatter or all-gather, `num_bytes` is that of p
    shards."""
    return num_bytes / seconds


def bus_bandwidth(op: str, num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Bytes per second on a link, bounded by the link's own bandwidth for every algorithm: comparable across
    operations and numbers of ranks."""
    return _BUS_FACTORS[op](num_ranks) * algorithm_bandwidth(num_bytes, seconds)


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """t = latency_s + num_bytes / bytes_per_s. `error`: median relative error over the points."""

    latency_s: float
    bytes_per_s: float  # infinite if the time does not depend on the size
    error: float

    def time_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def fit(points: Iterable[tuple[int, float]]) -> LatencyFit | None:
    """Fit (bytes, seconds) points. None for a single size above 0, which does not determine a line.

    See [Note: robust relative fit].
    """
    points = list(points)
    assert all(seconds > 0 for _, seconds in points), "a time of 0"
    sizes = {num_bytes for num_bytes, _ in points}
    if not sizes or (len(sizes) == 1 and sizes != {0}):
        return None
    weights = [1.0] * len(points)
    for _ in range(_REWEIGHTINGS):
        latency, per_byte = _solve(points, weights)
        errors = [abs((latency + size * per_byte) / seconds - 1.0) for size, seconds in points]
        scale = max(_NORMAL * statistics.median(errors), 1e-9)
        weights = [min(1.0, _HUBER * scale / error) if error else 1.0 for error in errors]
    return LatencyFit(latency, 1.0 / per_byte if per_byte else math.inf, statistics.median(errors))


_REWEIGHTINGS = 30
_HUBER = 1.345
_NORMAL = 1.4826  # from a median absolute error to the standard deviation of a normal one


def _solve(points: Sequence[tuple[int, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds per byte, both at least 0, by weighted least squares of relative errors."""
    roots = [math.sqrt(weight) for weight in weights]
    ones = [root / seconds for root, (_, seconds) in zip(roots, points, strict=True)]
    sizes = [root * size / seconds for root, (size, seconds) in zip(roots, points, strict=True)]
    # Orthogonal columns instead of normal equations, which would square the condition number.
    slope = _dot(ones, sizes) / _dot(ones, ones)
    residual = [size - slope * one for size, one in zip(sizes, ones, strict=True)]
    if _dot(residual, residual) <= 1e-24 * _dot(sizes, sizes):
        return _dot(ones, roots) / _dot(ones, ones), 0.0
    per_byte = _dot(residual, roots) / _dot(residual, residual)
    latency = _dot(ones, roots) / _dot(ones, ones) - slope * per_byte
    if latency < 0:
        return 0.0, _dot(sizes, roots) / _dot(sizes, sizes)
    if per_byte < 0:
        return _dot(ones, roots) / _dot(ones, ones), 0.0
    return latency, per_byte


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def training_flops_per_token(
    *, matmul_parameters: int, num_layers: int, attention_width: int, sequence: int, causal: bool = True
) -> float:
    """FLOPs of forward and backward for one token of a decoder.

    6 per parameter used in a matrix product (2 forward, 4 backward; not the embedding look-up, but the head),
    and for attention 12 x layers x width x sequence for scores and values, halved if `causal`: a token
    then attends to half the sequence on average. Recomputation is not counted: this is model FLOPs, not
    hardware FLOPs (MFU, not HFU; Chowdhery et al. 2204.02311, appendix B, who count attention in full).
    """
    per_attention = 6.0 if causal else 12.0
    return 6.0 * matmul_parameters + per_attention * num_layers * attention_width * sequence


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of a message: `latency_s` plus its bytes over `bytes_per_s`; a rank sends and receives at the same
    time.

    `reduce_s_per_byte`: cost of adding received data.
    """

    latency_s: float
    bytes_per_s: float
    reduce_s_per_byte: float = 0.0

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


# Gloo's messages between hosts. Their product is what matters to the number of segments, as a square root.
TCP_LINK = Link(5e-4, 1e9)


def chain_broadcast_s(num_ranks: int, num_bytes: float, segments: int, link: Link) -> float:
    """Seconds of a chain broadcast in segments."""
    if num_ranks == 1:
        return 0.0
    return (num_ranks - 2 + segments) * link.message_s(num_bytes / segments)


def algorithm_s(
    collective: str, algorithm: str, num_ranks: int, num_bytes: float, link: Link, segments: int = 1
) -> float | None:
    """Seconds of a collective by one of the algorithms of `plan/collectives.py`, whose docstrings have the
    formulas. None for two levels, whose links differ."""
    if algorithm == "chain":
        return chain_broadcast_s(num_ranks, num_bytes, segments, link)
    if algorithm == "two-level":
        return None
    reduce_s, mirror_s = _halves_s(algorithm, num_ranks, num_bytes, link)
    if collective == "reduce-scatter" and scatters(algorithm, num_ranks):
        return reduce_s
    return mirror_s if collective in ("all-gather", "broadcast") else reduce_s + mirror_s


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


def gloo_broadcast_s(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of Gloo's broadcast: a binomial tree, in which the messages to all children of a rank share its
    link: k(k+1)/2 times that of one message for 2^k ranks."""
    subtrees = [min(1 << bit, num_ranks - (1 << bit)) for bit in range((num_ranks - 1).bit_length())]
    below_s = max((gloo_broadcast_s(size, num_bytes, link) for size in subtrees), default=0.0)
    return len(subtrees) * link.message_s(num_bytes) + below_s


def chain_segments(num_bytes: int, num_ranks: int, link: Link) -> int | None:
    """Number of segments of a chain that broadcasts faster than Gloo does; None if none does."""
    segments = best_segments(num_bytes, num_ranks, link.latency_s, link.bytes_per_s)
    chain_s = chain_broadcast_s(num_ranks, num_bytes, segments, link)
    return segments if chain_s < gloo_broadcast_s(num_ranks, num_bytes, link) else None


def best_segments(num_bytes: int, num_ranks: int, latency_s: float, bandwidth: float) -> int:
    """Number of segments of the fastest chain broadcast: sqrt((p-2) N / (alpha B)).

    From 1 to `num_bytes`; one for two ranks, where segments gain nothing.
    """
    if num_ranks < 3 or num_bytes < 2:
        return 1
    if latency_s == 0:
        return num_bytes
    # The time is convex in S: the best integer is next to the root of its derivative.
    ideal = math.floor(math.sqrt((num_ranks - 2) * num_bytes / (latency_s * bandwidth)))
    near = {min(max(number, 1), num_bytes) for number in (ideal, ideal + 1)}
    hops = num_ranks - 2
    return min(sorted(near), key=lambda s: (hops + s) * (latency_s + num_bytes / s / bandwidth))
