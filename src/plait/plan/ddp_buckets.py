"""Assignment of gradients to the buckets of DistributedDataParallel (Li et al., 2006.15704, 3.2.3).

A bucket closes when it has reached its limit, so it may overshoot; the next one of its kind takes the next
limit, and the last limit repeats. Same algorithm as torch's function, which the tests compare with.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GradSpec:
    """The properties of a parameter's gradient that decide its bucket."""

    nbytes: int
    kind: Hashable  # dtype and device, the same for all of a bucket
    alone: bool = False  # a sparse gradient has a bucket of its own
    unlimited: bool = False  # its bucket holds all of its kind


def assign_buckets(
    grads: Sequence[GradSpec], limits: Sequence[int], order: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the gradient indices of each bucket, filled in `order`.

    Buckets are in the order in which they close; those that never reach their limit come last. `limits`:
    bytes of the first bucket of each kind, of its second, and so on.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    buckets: list[tuple[int, ...]] = []
    for index in order:
        grad = grads[index]
        if grad.alone:
            buckets.append((index,))
            continue
        kind = grad.kind
        open_buckets.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + grad.nbytes
        if not grad.unlimited and sizes[kind] >= limits[min(num_closed.get(kind, 0), len(limits) - 1)]:
            buckets.append(tuple(open_buckets.pop(kind)))
            num_closed[kind] = num_closed.get(kind, 0) + 1
            sizes[kind] = 0
    return buckets + [tuple(bucket) for bucket in open_buckets.values()]
