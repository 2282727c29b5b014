"""What the ranks of a pipeline really did in some steps, collected on the first of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from plait.comm import Group, receive, send
from plait.errors import RunError
from plait.plan.schedule import Schedule, Span, Timeline
from plait.plan.schedule.trace import write_trace


class Trace:
    """Spans of this rank, by step. Counted from a moment at which all ranks had met."""

    def __init__(self, schedule: Schedule, pipeline: Group, device: torch.device) -> None:
        self._schedule = schedule
        self._pipeline = pipeline
        self._device = device
        self._steps: dict[int, Sequence[Span]] = {}

    def add(self, step: int, spans: Sequence[Span], met_s: float) -> None:
        """`met_s`: that moment, on the clock of `spans`."""
        self._steps[step] = [Span(span.action, span.start - met_s, span.end - met_s) for span in spans]

    def write(self, path: Path, *, is_first: bool) -> None:
        """Every rank calls it; who `is_first` of all writes what its pipeline did. Raises RunError."""
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
        """By step, on the first rank of the pipeline; elsewhere of this rank alone. Every rank calls it."""
        return {step: self._collected(spans) for step, spans in self._steps.items()}

    def _collected(self, spans: Sequence[Span]) -> Timeline:
        """On the pipeline's first rank, with the spans of all its ranks."""
        group = self._pipeline
        mine = torch.tensor(
            [[span.start, span.end] for span in spans], dtype=torch.float64, device=self._device
        )
        ranks = [spans]
        if group.rank:
            send(mine, group, 0)
            return Timeline.of(self._schedule, ranks)
        for rank in range(1, group.size):
            actions = self._schedule.ranks[rank]
            times = mine.new_empty((len(actions), 2))
            receive(times, group, rank)
            ranks.append([Span(a, *time) for a, time in zip(actions, times.tolist(), strict=True)])
        return Timeline.of(self._schedule, ranks)
