"""Communication between ranks: number of calls and bytes, by axis, channel and operation.

The same types hold the estimate of a plan and the counts of a run, so the two can be compared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class CommKey:
    """The calls that are counted together.

    axes      grid axes, outermost first, along which the group's ranks differ (none of degree 1); (): the
              group of all ranks of the job
    channel   channel of the group: traffic with connections of its own
    op        all-reduce, all-gather, reduce-scatter, exchange, broadcast, send, receive, ...
    """

    axes: tuple[str, ...]
    channel: str
    op: str

    def __str__(self) -> str:
        channel = f" ({self.channel})" if self.channel else ""
        return f"{self.op} over {' x '.join(self.axes) or 'all ranks'}{channel}"


@dataclass(frozen=True)
class CommCount:
    """Calls of one rank and the bytes of their tensors: for gathers and scatters, of the full tensor."""

    count: int = 0
    num_bytes: int = 0

    def __add__(self, other: "CommCount") -> "CommCount":
        return CommCount(self.count + other.count, self.num_bytes + other.num_bytes)

    def __sub__(self, other: "CommCount") -> "CommCount":
        return CommCount(self.count - other.count, self.num_bytes - other.num_bytes)

    def __mul__(self, times: int) -> "CommCount":
        return CommCount(self.count * times, self.num_bytes * times)


Traffic = Mapping[CommKey, CommCount]  # of one rank over some time; keys without calls are absent


def sum_traffic(parts: Iterable[Traffic]) -> dict[CommKey, CommCount]:
    """Return the sum, sorted by key."""
    total: dict[CommKey, CommCount] = {}
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, CommCount()) + count
    return {key: total[key] for key in sorted(total)}


def subtract_traffic(earlier: Traffic, later: Traffic) -> dict[CommKey, CommCount]:
    """Return the traffic since `earlier`."""
    since = {key: count - earlier.get(key, CommCount()) for key, count in later.items()}
    return {key: count for key, count in sorted(since.items()) if count.count}


def to_rows(traffic: Traffic) -> list[dict[str, Any]]:
    """Return rows for JSON."""
    return [
        {
            "axes": list(key.axes),
            "lane": key.channel,
            "verb": key.op,
            "calls": count.count,
            "bytes": count.num_bytes,
        }
        for key, count in traffic.items()
    ]


def from_rows(rows: Iterable[Mapping[str, Any]]) -> dict[CommKey, CommCount]:
    """Return the traffic of `to_rows`. Raises KeyError, TypeError or ValueError for malformed rows."""
    return {
        CommKey(tuple(row["axes"]), str(row["lane"]), str(row["verb"])): CommCount(
            int(row["calls"]), int(row["bytes"])
        )
        for row in rows
    }
