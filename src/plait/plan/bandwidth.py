"""What collectives cost: bandwidths by the definitions of nccl-tests, and a line through measured times.

[Note: one line through ten sizes]
A verb's time is taken to be t = latency + S/B. Sizes span six orders of magnitude, and 10 % of a small
message's time are as wrong as 10 % of a large one's, so what is made small is the error relative to the
time: the sum of ((latency + S/B) / t - 1)^2, least squares with weights 1/t. A size at which the machine did
something else (a cache outgrown, a neighbour's minute) must not bend the line: errors beyond 1.345 times
their usual size count linearly, not squared (Huber 1964, with 95 % efficiency for normal errors; by
reweighting). Neither parameter can be negative; where the best line has one that is, it is 0 and the other
is fitted alone.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# Bytes that the busiest direction of a link carries, by bytes of the whole tensor, on p ranks.
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
VERBS = tuple(_BUS_FACTORS)


def algorithm_bandwidth(num_bytes: int, seconds: float) -> float:
    """Bytes per second of the whole tensor: for a reduce-scatter or all-gather `num_bytes` is p pieces."""
    return num_bytes / seconds


def bus_bandwidth(verb: str, num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Bytes per second on a link, which no algorithm can have above the link's own: comparable across verbs
    and numbers of ranks."""
    return _BUS_FACTORS[verb](num_ranks) * algorithm_bandwidth(num_bytes, seconds)


@dataclass(frozen=True, slots=True)
class Line:
    """t = latency_s + num_bytes / bytes_per_s. `error`: by what part of t it is off, the points' median."""

    latency_s: float
    bytes_per_s: float  # infinite where the size makes no difference
    error: float

    def time_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def fit(points: Iterable[tuple[int, float]]) -> Line | None:
    """The line through (bytes, seconds). None for a single size above 0, through which every line goes.

    See [Note: one line through ten sizes].
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
        usual = max(_NORMAL * statistics.median(errors), 1e-9)
        weights = [min(1.0, _HUBER * usual / error) if error else 1.0 for error in errors]
    return Line(latency, 1.0 / per_byte if per_byte else math.inf, statistics.median(errors))


_REWEIGHTINGS = 30
_HUBER = 1.345
_NORMAL = 1.4826  # from a median absolute error to the standard deviation of a normal one


def _solve(points: Sequence[tuple[int, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds per byte, neither below 0, of the least weighted squares of relative errors."""
    roots = [math.sqrt(weight) for weight in weights]
    ones = [root / seconds for root, (_, seconds) in zip(roots, points, strict=True)]
    sizes = [root * size / seconds for root, (size, seconds) in zip(roots, points, strict=True)]
    # Orthogonal columns instead of normal equations, which would square the condition number.
    slant = _dot(ones, sizes) / _dot(ones, ones)
    rest = [size - slant * one for size, one in zip(sizes, ones, strict=True)]
    if _dot(rest, rest) <= 1e-24 * _dot(sizes, sizes):
        return _dot(ones, roots) / _dot(ones, ones), 0.0
    per_byte = _dot(rest, roots) / _dot(rest, rest)
    latency = _dot(ones, roots) / _dot(ones, ones) - slant * per_byte
    if latency < 0:
        return 0.0, _dot(sizes, roots) / _dot(sizes, sizes)
    if per_byte < 0:
        return _dot(ones, roots) / _dot(ones, ones), 0.0
    return latency, per_byte


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
