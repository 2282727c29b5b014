"""Ranks that take longer for their own work than the others, who wait for them: named while the run goes
on.

[Note: a rank's own work]
In a synchronous job a step takes as long on every rank. What a rank does of it by itself is the rest: its
seconds, less those that its training thread was in communications (`comm/clock.py`). Reading data is part
of it. Ranks are compared with those of their own stage: what stages have to compute differs by the plan.
Compared is the median over some steps: one slow step is noise.
"""

import socket
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from plait.comm import World, all_gather, broadcast
from plait.plan import Grid, Plan

_WORTH = 0.05  # of a step: what a rank is slower by, to be worth a word
_NAME_BYTES = 64


class Stragglers:
    """Measures steps, and compares the ranks every so many. Every rank calls it alike.

    Ranks on CUDA devices are not compared: see `comm/clock.py`.
    """

    def __init__(
        self, world: World, plan: Plan, every: int, factor: float, note: Callable[[str], object]
    ) -> None:
        """`every`: steps; 0 is never. `factor`: of the median of the others, from which on a rank is slow.
        `note`: told, on every rank."""
        self._world = world
        self._every = every if world.device.type == "cpu" and world.size > 1 else 0
        self._factor = factor
        self._note = note
        grid = Grid.from_plan(plan)
        self._stages = [grid.coord(rank)["pp"] for rank in range(world.size)]
        self._slow: set[int] = set()  # have been named
        self._seconds: list[tuple[float, float]] = []  # of each step: of own work, and whole
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """A step begins."""
        self._began = (time.perf_counter(), self._world.clock.seconds)

    def end(self, step: int) -> None:
        """The step is done, and with it `step` of them."""
        if not self._every:
            return
        whole_s = time.perf_counter() - self._began[0]
        self._seconds.append((whole_s - (self._world.clock.seconds - self._began[1]), whole_s))
        if step % self._every == 0:
            self._compare()
            self._seconds.clear()

    def _compare(self) -> None:
        world = self._world
        mine = torch.tensor([median(each) for each in zip(*self._seconds, strict=True)], dtype=torch.float64)
        rows = torch.empty(2 * world.size, dtype=torch.float64)
        all_gather(rows, mine, world.group, label="seconds of own work")
        own_s, whole_s = rows.view(-1, 2).T.tolist()
        found = slow_ranks(own_s, self._stages, self._factor, _WORTH * median(whole_s))
        for rank, usual_s in found.items():
            if rank not in self._slow:
                self._note(
                    f"rank {rank} (host {self._host_of(rank)}) takes {own_s[rank] / usual_s:.1f}x as long as "
                    f"the others: {own_s[rank]:.3g} s of own work a step, the median is {usual_s:.3g} s"
                )
        self._slow = set(found)

    def _host_of(self, rank: int) -> str:
        name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
        if rank == self._world.rank:
            said = socket.gethostname().encode()[:_NAME_BYTES]
            name[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        broadcast(name, self._world.group, rank)
        return bytes(name.tolist()).rstrip(b"\0").decode(errors="replace")


def slow_ranks(
    own_s: Sequence[float], stages: Sequence[int], factor: float, least_s: float
) -> dict[int, float]:
    """The ranks that take more than `factor` times the median of the others of their stage, and `least_s`
    more than it; with that median."""
    found = {}
    for rank, seconds in enumerate(own_s):
        others = [
            other for number, other in enumerate(own_s) if number != rank and stages[number] == stages[rank]
        ]
        usual_s = median(others) if others else seconds
        if seconds > factor * usual_s and seconds > usual_s + least_s:
            found[rank] = usual_s
    return found
