"""Metrics of a run with parameter servers: what they have counted in some steps."""

from collections.abc import Mapping
from typing import Any


class ServerMetrics:
    """Turns the servers' counts so far into values of an interval of steps.

    pushes_per_s       pushes that became part of an update, of all workers
    dropped_pushes     those that came too late, under `backup`
    waited_s           worker 0's time of waiting for other workers
    moved_bytes        sent and received over connections, by rank; what is in shared memory is not sent
    staleness          updates by the number of updates between the read and the push that they are of
    worker_clocks      (time, worker, clock) of the steps that workers have ended
    """

    def __init__(self, counts: Mapping[str, Any]) -> None:
        """`counts`: `Engine.server_counts()` before the first interval."""
        self._before = counts

    def since(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The values since the last call."""
        before, self._before = self._before, counts
        seconds = counts["seconds"] - before["seconds"]
        pairs = zip(counts["moved_bytes"], before["moved_bytes"], strict=True)
        return {
            "pushes_per_s": (counts["taken"] - before["taken"]) / max(seconds, 1e-9),
            "dropped_pushes": counts["dropped"] - before["dropped"],
            "waited_s": counts["waited_s"] - before["waited_s"],
            "moved_bytes": [_difference(now, then) for now, then in pairs],
            "staleness": _difference(counts["staleness"], before["staleness"]),
            "worker_clocks": counts["ends"],
        }


def _difference(now: list[int], before: list[int]) -> list[int]:
    return [max(new - old, 0) for new, old in zip(now, before, strict=True)]  # a replica counts from zero
