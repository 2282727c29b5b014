"""Report stragglers: ranks whose own work takes longer than that of the others, which wait for them.

[Note: own work of a rank]
In a synchronous job a step takes equally long on all ranks. A rank's own work is the step without the time
that its training thread spent in communication (`comm/stats.py`). Reading data is part of it. Ranks are
compared within their pipeline stage, as the plan gives stages different work. The median over several steps
is compared, because a single slow step is noise.

On a CUDA device, a rank's own work is the time of its stream without waits, by events (`comm/stats.py`). They
are read a step later: its only wait for the device, for the loss, is then after them, so that none is added.
Two events per communication are up to some ms of the host's time, so only a few steps before each comparison
are measured.
"""

import socket
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from plait.comm import DeviceWaits, World, all_gather, broadcast_text
from plait.plan import Grid, Plan
from plait.plan.axes import STAGES

_MIN_FRACTION = 0.05  # of a step: smaller delays are not reported
_NUM_MEASURED = 5  # steps on a CUDA device before a comparison


class Stragglers:
    """Measures steps, and compares the ranks at intervals. Every rank makes the same calls."""

    def __init__(
        self, world: World, plan: Plan, every: int, factor: float, log: Callable[[str], object]
    ) -> None:
        """
        every   steps between comparisons; 0 means never
        factor  of the median of the other ranks, above which a rank is slow
        log     called on every rank
        """
        self._world = world
        self._every = every if world.size > 1 else 0
        self._factor = factor
        self._log = log
        grid = Grid.from_plan(plan)
        self._stages = [grid.coord(rank)[STAGES] for rank in range(world.size)]
        self._slow: set[int] = set()  # already reported
        self._seconds: list[tuple[float, float]] = []  # per step: own work, full step
        self._start_s = (0.0, 0.0)
        self._measured: DeviceWaits | None = None  # the last step, if it was measured on a CUDA device

    def begin(self, step: int) -> None:
        """Start measuring a step, before which `step` steps are done."""
        self._start_s = (time.perf_counter(), self._world.clock.seconds)
        if self._every and self._world.device.type == "cuda" and -(step + 1) % self._every <= _NUM_MEASURED:
            self._world.clock.device_waits = DeviceWaits()

    def end(self, step: int) -> None:
        """Record the step, after which `step` steps are done, and compare the ranks if it is time."""
        if not self._every:
            return
        if self._world.device.type == "cuda":
            self._end_on_device()
        else:
            step_s = time.perf_counter() - self._start_s[0]
            self._seconds.append((step_s - (self._world.clock.seconds - self._start_s[1]), step_s))
        if step % self._every == 0 and self._seconds:
            self._compare()
            self._seconds.clear()

    def _end_on_device(self) -> None:
        """Read the step before this one, which the device has passed, if it was measured."""
        if self._measured is not None:
            self._seconds.append(self._measured.seconds())
        clock = self._world.clock
        self._measured, clock.device_waits = clock.device_waits, None
        if self._measured is not None:
            self._measured.end()

    def _compare(self) -> None:
        world = self._world
        medians = [median(each) for each in zip(*self._seconds, strict=True)]
        row = torch.tensor(medians, dtype=torch.float64, device=world.device)
        rows = torch.empty(2 * world.size, dtype=torch.float64, device=world.device)
        all_gather(rows, row, world.group, label="seconds of own work")
        own_s, step_s = rows.view(-1, 2).T.tolist()
        slow = slow_ranks(own_s, self._stages, self._factor, _MIN_FRACTION * median(step_s))
        for rank, median_s in slow.items():
            if rank not in self._slow:
                host = broadcast_text(rank, socket.gethostname(), world.group, world.device)
                self._log(
                    f"rank {rank} (host {host}) is a straggler: {own_s[rank]:.3g} s of own work per step, "
                    f"{own_s[rank] / median_s:.1f}x the others' median ({median_s:.3g} s)"
                )
        self._slow = set(slow)


def slow_ranks(
    own_s: Sequence[float], stages: Sequence[int], factor: float, min_delay_s: float
) -> dict[int, float]:
    """Return slow ranks, with the median of the others of their stage.

    Slow means more than `factor` times that median, and more than `min_delay_s` above it.
    """
    slow = {}
    for rank, seconds in enumerate(own_s):
        others = [
            other for number, other in enumerate(own_s) if number != rank and stages[number] == stages[rank]
        ]
        median_s = median(others) if others else seconds
        if seconds > factor * median_s and seconds > median_s + min_delay_s:
            slow[rank] = median_s
    return slow
