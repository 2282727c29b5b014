"""Measured timelines of a pipeline's steps, collected on its first rank.

[Note: clock alignment]
Ranks of one host share a clock. Clocks of other hosts differ, so times count from a barrier of all ranks:
the error is the spread in leaving it (a message's time, or a delay by the scheduler). All ranks of a host
count from the moment at which its first rank left the barrier, so their order is exact to the nanosecond.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.comm import Group, ranks_by_host, receive, send
from plait.errors import RunError
from plait.fileio import WRITABLE, disk_hint
from plait.plan.schedule import Schedule, Span, Timeline
from plait.plan.schedule.trace import write_trace


@dataclass(frozen=True)
class _Step:
    """This rank's spans, on its clock. `barrier_s`: when it left the barrier."""

    spans: Sequence[Span]
    barrier_s: float


class Trace:
    """Spans of this rank, by step. See [Note: clock alignment]."""

    def __init__(self, schedule: Schedule, pipeline: Group, device: torch.device) -> None:
        self._schedule = schedule
        self._pipeline = pipeline
        self._device = device
        self._steps: dict[int, _Step] = {}

    def add(self, step: int, spans: Sequence[Span], barrier_s: float) -> None:
        self._steps[step] = _Step(spans, barrier_s)

    def write(self, path: Path, *, is_first: bool) -> None:
        """Every rank calls it; `is_first`, the first rank of the job, writes its pipeline's timelines. Raises
        RunError."""
        steps = self.timelines()
        if not is_first:
            return
        if not steps:
            raise RunError(
                "there is no trace",
                given="no step since start_trace",
                expected="steps between start_trace and write_trace",
                hint="engine.start_trace() before them",
            )
        try:
            write_trace(path, steps)
        except OSError as error:
            raise RunError(
                "the trace cannot be written",
                given=f"{path}: {error.strerror}",
                expected=WRITABLE,
                hint=disk_hint(path),
            ) from error

    def timelines(self) -> Mapping[int, Timeline]:
        """Timelines by step, on the first rank of the pipeline; elsewhere empty. Every rank calls it."""
        hosts = ranks_by_host(self._pipeline, self._device)
        leader = {rank: ranks[0] for ranks in hosts for rank in ranks}
        timelines = {step: self._gather(of_step, leader) for step, of_step in self._steps.items()}
        return {step: timeline for step, timeline in timelines.items() if timeline is not None}

    def _gather(self, step: _Step, leader: Mapping[int, int]) -> Timeline | None:
        group, rows = self._pipeline, [(step.barrier_s, 0.0), *((s.start, s.end) for s in step.spans)]
        own = torch.tensor(rows, dtype=torch.float64, device=self._device)
        if group.rank:
            send(own, group, 0)
            return None
        times = [own.tolist()]
        for rank in range(1, group.size):
            received = own.new_empty((1 + len(self._schedule.ranks[rank]), 2))
            receive(received, group, rank)
            times.append(received.tolist())
        ranks = []
        for rank, ((_, *spans), actions) in enumerate(zip(times, self._schedule.ranks, strict=True)):
            zero_s = times[leader[rank]][0][0]
            pairs = zip(actions, spans, strict=True)
            ranks.append([Span(action, start - zero_s, end - zero_s) for action, (start, end) in pairs])
        return Timeline.from_spans(self._schedule, ranks)
