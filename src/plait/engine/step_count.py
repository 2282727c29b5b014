"""Check that all ranks are in the same step.

[Note: ranks in different steps]
If a step raises an error on one rank alone, and the program catches it and continues, that rank's next step
communicates with the other ranks' current one: with equal shapes every collective succeeds, and from then on
batches, counters and schedules are one step apart. So each rank counts the steps that it has begun, also
those that failed. Count and squared count are summed over ranks in the all-reduce of the loss, at no cost:
n counts are equal if and only if n times the sum of their squares is the square of their sum.
"""

import torch

from plait.comm import Group, all_gather
from plait.errors import CheckpointError, RunError
from plait.parallel.zero.state_io import StateReader

_MODULUS = 2**12  # so that float64 sums are exact for 2 ** 14 ranks


class StepCount:
    """The steps that this rank has begun since the engine was created or has loaded a state."""

    def __init__(self) -> None:
        self._begun = 0

    def begin(self) -> None:
        self._begun += 1

    def reset(self) -> None:
        """Start again, on all ranks."""
        self._begun = 0

    def terms(self) -> tuple[float, float]:
        """Return what is to be summed over ranks for `check`."""
        count = self._begun % _MODULUS
        return float(count), float(count**2)

    def check(self, total: float, of_squares: float, world: Group, device: torch.device) -> None:
        """Raise RunError, on all ranks, unless all have begun as many steps. Collective if they have not."""
        if of_squares * world.size == total**2:
            return
        counts = torch.empty(world.size, dtype=torch.int64, device=device)
        all_gather(counts, torch.tensor([self._begun], device=device), world, label="steps begun")
        of_ranks = counts.tolist()
        other = next(rank for rank, count in enumerate(of_ranks) if count != of_ranks[0])
        raise RunError(
            "the ranks are in different steps: this step has combined their batches",
            given=f"rank 0 is in its step {of_ranks[0]}, rank {other} in its step {of_ranks[other]}",
            expected="as many calls of engine.step on all ranks, also of calls that raise an error",
            hint="let a rank exit if its step raises an error; engine.load on all ranks resets the count",
        )


def read_count(source: StateReader, key: str) -> int:
    """Read a counter of an engine. Raises CheckpointError."""
    value = source.read_full(key).item()
    if not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise CheckpointError(
            "this is not the state of an engine",
            given=f"{key} = {value}",
            expected="a count",
            hint="engine.load with another checkpoint",
        )
    return int(value)
