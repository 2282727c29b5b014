"""The ledger: what a rank has said to others, by axis, lane and verb."""

import threading

from plait.plan.traffic import Line, Tally, Traffic


class Ledger:
    """Counts calls of the verbs. One per world; any thread may write into it."""

    def __init__(self) -> None:
        self._tallies: dict[Line, list[int]] = {}
        self._lock = threading.Lock()  # sums are ended by threads of their own

    def note(self, line: Line, num_bytes: int) -> None:
        """Adds one call, of a tensor of so many bytes."""
        with self._lock:
            tally = self._tallies.setdefault(line, [0, 0])
            tally[0] += 1
            tally[1] += num_bytes

    def read(self) -> Traffic:
        """All so far; `plan.traffic.between` tells what came between two readings."""
        with self._lock:
            return {line: Tally(*tally) for line, tally in self._tallies.items()}
