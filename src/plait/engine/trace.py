"""What the ranks of a pipeline really did in some steps, collected on the first of them.

[Note: one clock]
Ranks of one host read the same clock. Those of another host read another one, and count from a moment at
which all ranks had met: how far apart they left that meeting (a message's time, or as long as a rank was
kept from its core) is how far their times are off. So a host's ranks count from the moment at which the first
of them had met the others, and keep their order to the nanosecond.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.comm import Group, hosts_of, receive, send
from plait.errors import RunError
from plait.plan.schedule import Schedule, Span, Timeline
from plait.plan.schedule.trace import write_trace


@dataclass(frozen=True)
class _Step:
    """Of this rank, on its clock. `barrier_s`: the moment at which all ranks had met."""

    spans: Sequence[Span]
    barrier_s: float


class Trace:
    """Spans of this rank, by step. See [Note: one clock]."""

    def __init__(self, schedule: Schedule, pipeline: Group, device: torch.device) -> None:
        self._schedule = schedule
        self._pipeline = pipeline
        self._device = device
        self._steps: dict[int, _Step] = {}

    def add(self, step: int, spans: Sequence[Span], barrier_s: float) -> None:
        self._steps[step] = _Step(spans, barrier_s)

    def write(self, path: Path, *, is_first: bool) -> None:
        """Every rank calls it; `is_first`, the first of all, writes what its pipeline did. Raises
        RunError."""
        steps = self.timelines()
        if not is_first:
            return
        if not steps:
            raise RunError("there is nothing to trace", given="no step since the trace began")
        try:
            write_trace(path, steps)
        except OSError as error:
            raise RunError("the trace cannot be written", given=f"{path}: {error.strerror}") from error

    def timelines(self) -> Mapping[int, Timeline]:
        """By step, on the first rank of the pipeline; elsewhere nothing. Every rank calls it."""
        hosts = hosts_of(self._pipeline, self._device)
        leader = {rank: ranks[0] for ranks in hosts for rank in ranks}
        found = {step: self._collected(of_step, leader) for step, of_step in self._steps.items()}
        return {step: timeline for step, timeline in found.items() if timeline is not None}

    def _collected(self, step: _Step, leader: Mapping[int, int]) -> Timeline | None:
        group, rows = self._pipeline, [(step.barrier_s, 0.0), *((s.start, s.end) for s in step.spans)]
        mine = torch.tensor(rows, dtype=torch.float64, device=self._device)
        if group.rank:
            send(mine, group, 0)
            return None
        times = [mine.tolist()]
        for rank in range(1, group.size):
            theirs = mine.new_empty((1 + len(self._schedule.ranks[rank]), 2))
            receive(theirs, group, rank)
            times.append(theirs.tolist())
        ranks = []
        for rank, ((_, *spans), actions) in enumerate(zip(times, self._schedule.ranks, strict=True)):
            zero_s = times[leader[rank]][0][0]
            pairs = zip(actions, spans, strict=True)
            ranks.append([Span(action, start - zero_s, end - zero_s) for action, (start, end) in pairs])
        return Timeline.from_spans(self._schedule, ranks)
