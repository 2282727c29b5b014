"""Trace files of measured pipeline steps, and the durations that a simulation takes from them.

The file is JSON of Chrome's trace events, which ui.perfetto.dev and chrome://tracing open: a process per
rank, a slice per action. Data outside Chrome's format is under `plait`.

[Note: transfer times from a trace]
A consumer starts when its rank is free and its input has arrived. So the gap between its producer's end
and its start is the transfer time or more: it may have waited for other things too. Every gap is an upper
bound; the smallest over all micro-batches, steps and both directions is the best one. A simulation with it
delays no action longer than was measured. Negative gaps count as zero: clocks of hosts differ, and on CPUs an
unsplit backward sends its input's gradient before it ends (parallel/pipeline/executor.py), so that a
simulation of its complete span is up to 4 % too long. Between stages of one rank there is no transfer.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from plait.errors import DataError, ScheduleError
from plait.fileio import read_json, write_text
from plait.plan.schedule.action import Action, B, F, Kind, Schedule
from plait.plan.schedule.simulate import Durations, Span, Timeline

_FORMAT = "plait trace 1"
_CATEGORIES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight"}
_KINDS = {category: kind for kind, category in _CATEGORIES.items()}
_PER_US = 8  # Viewers truncate times to ns: eighths of a us are exact, so no slices overlap.


def write_trace(path: Path, steps: Mapping[int, Timeline]) -> None:
    """Write the timelines, by step number, all of one schedule. Atomic.

    In the file a step begins where the previous one ends: the time between steps is not shown. The spans of a
    timeline may count from any moment. Raises OSError.
    """
    schedules = {timeline.schedule for timeline in steps.values()}
    assert len(schedules) == 1, f"timelines of {len(schedules)} schedules"
    schedule = schedules.pop()
    events: list[dict[str, Any]] = []
    for rank in range(schedule.num_ranks):
        named = {"ph": "M", "pid": rank, "tid": 0}
        events.append({"name": "process_name", **named, "args": {"name": f"rank {rank}"}})
        events.append({"name": "process_sort_index", **named, "args": {"sort_index": rank}})
    begin_s = 0.0
    for step, timeline in sorted(steps.items()):
        events += _slices(step, timeline, begin_s)
        begin_s += timeline.total
    about = {
        "format": _FORMAT,
        "name": schedule.name,
        "schedule": str(schedule),
        "ranks": schedule.num_ranks,
        "steps": len(steps),
    }
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "plait": about}, allow_nan=False)
    write_text(path, text)


def _slices(step: int, timeline: Timeline, begin_s: float) -> Iterator[dict[str, Any]]:
    first = min((span.start for spans in timeline.ranks for span in spans), default=0.0)
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            start, end = (round((begin_s + s - first) * 1e6 * _PER_US) for s in (span.start, span.end))
            yield {
                "name": str(span.action),
                "cat": _CATEGORIES[span.action.kind],
                "ph": "X",
                "ts": start / _PER_US,
                "dur": (end - start) / _PER_US,
                "pid": rank,
                "tid": 0,
                "args": {"stage": span.action.stage, "micro": span.action.micro, "step": step},
            }


@dataclass(frozen=True)
class _Slice:
    """An event of the file; its times are seconds from the file's zero."""

    step: int
    rank: int
    span: Span


def read_trace(path: Path) -> dict[int, Timeline]:
    """Read the timelines of `write_trace`, by step number, each from its first action's start.

    Raises DataError for a file that is missing, not a trace, or incomplete.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise DataError(
            "the trace cannot be read",
            given=f"{path}: {error.strerror}",
            expected="a file that engine.write_trace or run.trace has written",
            hint="--set run.trace=FILE when training",
        ) from error
    except ValueError as error:
        raise _invalid(path, f"not JSON: {error}") from error
    about = content.get("plait") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise _invalid(path, f"no format {_FORMAT!r} under `plait`")
    try:
        schedule = Schedule.parse(str(about.get("schedule")), name=str(about.get("name")))
    except ScheduleError as error:
        raise _invalid(path, f"its schedule: {error.fact}, {error.given}") from error
    events = content.get("traceEvents")
    if not isinstance(events, list):
        raise _invalid(path, "`traceEvents` is not a list")
    steps: dict[int, list[_Slice]] = defaultdict(list)
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") == "X":
            event_slice = _slice(path, number, event)
            steps[event_slice.step].append(event_slice)
    if not steps or len(steps) != about.get("steps"):
        raise _invalid(path, f"it has {len(steps)} steps of {about.get('steps')}")
    return {step: _timeline(path, schedule, slices) for step, slices in sorted(steps.items())}


def _slice(path: Path, number: int, event: Any) -> _Slice:
    """Raises DataError for an event that is not an action."""
    try:
        args = event["args"]
        action = Action(_KINDS[event["cat"]], args["stage"], args["micro"])
        integers = (action.stage, action.micro, args["step"], event["pid"])
        start_us, us = float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _invalid(path, f"event {number} is not an action") from error
    if not (all(type(value) is int for value in integers) and math.isfinite(start_us) and 0 <= us < math.inf):
        raise _invalid(path, f"event {number} is not an action: numbers out of range")
    span = Span(action, start_us / 1e6, (start_us + us) / 1e6)
    return _Slice(args["step"], event["pid"], span)


def _timeline(path: Path, schedule: Schedule, slices: list[_Slice]) -> Timeline:
    """The timeline of a step. Raises DataError unless its actions are the schedule's."""
    spans = {(event.rank, event.span.action): event.span for event in slices}
    scheduled = set(schedule)
    if len(spans) != len(slices) or spans.keys() != scheduled:
        step = slices[0].step
        raise _invalid(path, f"step {step} does not have every action of its schedule once, on its rank")
    first = min(span.start for span in spans.values())

    def moved(rank: int, action: Action) -> Span:
        span = spans[rank, action]
        return Span(action, span.start - first, span.end - first)

    return Timeline.from_spans(
        schedule, [[moved(rank, a) for a in actions] for rank, actions in enumerate(schedule.ranks)]
    )


def _invalid(path: Path, problem: str) -> DataError:
    return DataError(
        "not a complete pipeline trace",
        given=f"{path}: {problem}",
        expected="a trace file of a run with pipeline stages",
        hint="write it again: --set run.trace=FILE when training, or engine.write_trace",
    )


def durations_of(timelines: Iterable[Timeline]) -> Durations:
    """Durations for simulating such steps: medians of each stage's actions, smallest gaps as transfers.

    The parts of an unsplit backward are not measured: all of it counts as `backward`, and `weight` is zero,
    unless the stage has split backwards too, whose `weight` is then subtracted. At least one timeline, all of
    one schedule. See [Note: transfer times from a trace].
    """
    timelines = list(timelines)
    schedule = timelines[0].schedule
    lengths: dict[tuple[Kind, bool, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in (span for spans in timeline.ranks for span in spans):
            kind, stage, micro = span.action
            unsplit = kind is Kind.B and (stage, micro) not in schedule.split
            lengths[kind, unsplit, stage].append(span.end - span.start)
    forward, backward, weight = [], [], []
    for stage in range(schedule.num_stages):
        forward.append(_median(lengths[Kind.F, False, stage]))
        weight.append(_median(lengths[Kind.W, False, stage]))
        input_parts = [max(length - weight[stage], 0.0) for length in lengths[Kind.B, True, stage]]
        backward.append(_median(lengths[Kind.B, False, stage] + input_parts))
    return Durations(tuple(forward), tuple(backward), tuple(weight), _transfers(schedule, timelines))


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _transfers(schedule: Schedule, timelines: list[Timeline]) -> tuple[float, ...]:
    """See [Note: transfer times from a trace]."""
    least = [math.inf] * max(schedule.num_stages - 1, 0)
    for timeline in timelines:
        spans = {span.action: span for rank in timeline.ranks for span in rank}
        for stage in range(len(least)):
            for micro in range(schedule.num_micros):
                for producer, consumer in (
                    (F(stage, micro), F(stage + 1, micro)),
                    (B(stage + 1, micro), B(stage, micro)),
                ):
                    if producer in spans and consumer in spans:
                        least[stage] = min(least[stage], spans[consumer].start - spans[producer].end)
    ranks = schedule.rank_of
    return tuple(
        0.0 if ranks.get(stage) == ranks.get(stage + 1) or math.isinf(gap) else max(gap, 0.0)
        for stage, gap in enumerate(least)
    )
