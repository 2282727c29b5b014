"""What ranks say to each other: how often, and how many bytes, by axis, lane and verb.

The same values are foretold from a plan and counted while it runs, so that one can be held against the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class CommKey:
    """What calls are counted together.

    axes    of the grid, outermost first, along which the group's ranks differ (none of degree 1); nothing:
            the group of all ranks of the job
    lane    of the group: what has connections of its own
    verb    all-reduce, all-gather, reduce-scatter, exchange, broadcast, send, receive, ...
    """

    axes: tuple[str, ...]
    channel: str
    op: str

    def __str__(self) -> str:
        lane = f" ({self.channel})" if self.channel else ""
        return f"{self.op} over {' x '.join(self.axes) or 'all ranks'}{lane}"


@dataclass(frozen=True)
class CommCount:
    """Calls of one rank and the bytes of their tensors: of a gather or a scatter, of the whole tensor."""

    count: int = 0
    num_bytes: int = 0

    def __add__(self, other: "CommCount") -> "CommCount":
        return CommCount(self.count + other.count, self.num_bytes + other.num_bytes)

    def __sub__(self, other: "CommCount") -> "CommCount":
        return CommCount(self.count - other.count, self.num_bytes - other.num_bytes)

    def __mul__(self, times: int) -> "CommCount":
        return CommCount(self.count * times, self.num_bytes * times)


Traffic = Mapping[CommKey, CommCount]  # all that one rank says in some time; what it does not say has no line


def sum_traffic(parts: Iterable[Traffic]) -> dict[CommKey, CommCount]:
    """All of them together, in the order of their lines."""
    found: dict[CommKey, CommCount] = {}
    for part in parts:
        for line, tally in part.items():
            found[line] = found.get(line, CommCount()) + tally
    return {line: found[line] for line in sorted(found)}


def subtract_traffic(earlier: Traffic, later: Traffic) -> dict[CommKey, CommCount]:
    """What has been said since."""
    found = {line: tally - earlier.get(line, CommCount()) for line, tally in later.items()}
    return {line: tally for line, tally in sorted(found.items()) if tally.count}


def to_rows(traffic: Traffic) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "axes": list(line.axes),
            "lane": line.channel,
            "verb": line.op,
            "calls": tally.count,
            "bytes": tally.num_bytes,
        }
        for line, tally in traffic.items()
    ]


def from_rows(rows: Iterable[Mapping[str, Any]]) -> dict[CommKey, CommCount]:
    """What `to_rows` gave. Raises KeyError, TypeError or ValueError for what it did not."""
    return {
        CommKey(tuple(row["axes"]), str(row["lane"]), str(row["verb"])): CommCount(
            int(row["calls"]), int(row["bytes"])
        )
        for row in rows
    }
