"""Traces: when the ranks of a pipeline really did what, as a file, and what a clock can learn from it.

The file is JSON of Chrome's trace events, which ui.perfetto.dev and chrome://tracing open: a process for
every rank, a slice for every action. What Chrome's format has no place for stands under `plait`.

[Note: what a trace tells about transfers]
A consumer starts when its rank is free and its input is there. So from its producer's end to its start
passes the transfer, or longer: it may have waited for other things too. Every gap is an upper bound; the
least one over all micro-batches, steps and both directions is the best of them. A clock that runs with it
holds nobody up longer than he was seen to wait. Gaps below zero are two hosts' clocks that differ, and count
as none. Between stages on one rank nothing travels.
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
from plait.fileio import write_text
from plait.plan.schedule.action import Action, B, F, Kind, Schedule
from plait.plan.schedule.simulate import Durations, Span, Timeline

_FORMAT = "plait trace 1"
_CATEGORIES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight"}
_KINDS = {category: kind for kind, category in _CATEGORIES.items()}
_PER_US = 8  # Viewers cut times to whole ns: eighths of a us are exact for them, and no slices overlap.


def write_trace(path: Path, steps: Mapping[int, Timeline]) -> None:
    """Writes the timelines, by number of the step, all of one schedule. The file is whole or not there.

    In the file a step begins where the one before it ends: the time between them is no pipeline's. A
    timeline's spans may count from any moment. Raises OSError.
    """
    schedules = {timeline.schedule for timeline in steps.values()}
    assert len(schedules) == 1, f"a trace is of one schedule, not of {len(schedules)}"
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
    """An event of the file: its times are seconds from the file's zero."""

    step: int
    rank: int
    span: Span


def read_trace(path: Path) -> dict[int, Timeline]:
    """The timelines of `write_trace`, by number of the step, each from its first action's start.

    Raises DataError for a file that is missing, no trace, or not the whole of one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError("the trace cannot be read", given=f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"it is no JSON: {error}") from error
    about = found.get("plait") if isinstance(found, dict) else None
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise _invalid(path, f"its `plait` has no format {_FORMAT!r}")
    try:
        schedule = Schedule.parse(str(about.get("schedule")), name=str(about.get("name")))
    except ScheduleError as error:
        raise _invalid(path, f"its schedule: {error.fact}, {error.given}") from error
    events = found.get("traceEvents")
    if not isinstance(events, list):
        raise _invalid(path, "`traceEvents` is not a list")
    steps: dict[int, list[_Slice]] = defaultdict(list)
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") == "X":
            found_slice = _slice(path, number, event)
            steps[found_slice.step].append(found_slice)
    if not steps or len(steps) != about.get("steps"):
        raise _invalid(path, f"it has {len(steps)} steps of {about.get('steps')}")
    return {step: _timeline(path, schedule, slices) for step, slices in sorted(steps.items())}


def _slice(path: Path, number: int, event: Any) -> _Slice:
    """Raises DataError for an event that is none of ours."""
    try:
        args = event["args"]
        action = Action(_KINDS[event["cat"]], args["stage"], args["micro"])
        whole = (action.stage, action.micro, args["step"], event["pid"])
        start_us, us = float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _invalid(path, f"event {number} is no action") from error
    if not (all(type(value) is int for value in whole) and math.isfinite(start_us) and 0 <= us < math.inf):
        raise _invalid(path, f"event {number} is no action: its numbers cannot be")
    span = Span(action, start_us / 1e6, (start_us + us) / 1e6)
    return _Slice(args["step"], event["pid"], span)


def _timeline(path: Path, schedule: Schedule, slices: list[_Slice]) -> Timeline:
    """A step's, its actions in the schedule's order. Raises DataError unless they are the schedule's."""
    spans = {(found.rank, found.span.action): found.span for found in slices}
    scheduled = set(schedule)
    if len(spans) != len(slices) or spans.keys() != scheduled:
        step = slices[0].step
        raise _invalid(path, f"step {step} has not every action of its schedule once, on its rank")
    first = min(span.start for span in spans.values())

    def moved(rank: int, action: Action) -> Span:
        span = spans[rank, action]
        return Span(action, span.start - first, span.end - first)

    return Timeline.from_spans(
        schedule, [[moved(rank, a) for a in actions] for rank, actions in enumerate(schedule.ranks)]
    )


def _invalid(path: Path, what: str) -> DataError:
    return DataError(
        "this is no whole trace of a pipeline",
        given=f"{path}: {what}",
        expected="a file that a run with pipeline stages has written",
    )


def durations_of(timelines: Iterable[Timeline]) -> Durations:
    """What a clock needs to run such steps again: medians of each stage's actions, least gaps as transfers.

    Of a whole backward nobody has seen the halves: it all counts as `backward`, and `weight` is zero, unless
    the stage has split backwards too, whose `weight` is then taken off it. The timelines, at least one, are
    of one schedule. See [Note: what a trace tells about transfers].
    """
    timelines = list(timelines)
    schedule = timelines[0].schedule
    lengths: dict[tuple[Kind, bool, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in (span for spans in timeline.ranks for span in spans):
            kind, stage, micro = span.action
            whole = kind is Kind.B and (stage, micro) not in schedule.split
            lengths[kind, whole, stage].append(span.end - span.start)
    forward, backward, weight = [], [], []
    for stage in range(schedule.num_stages):
        forward.append(_median(lengths[Kind.F, False, stage]))
        weight.append(_median(lengths[Kind.W, False, stage]))
        first_halves = [max(length - weight[stage], 0.0) for length in lengths[Kind.B, True, stage]]
        backward.append(_median(lengths[Kind.B, False, stage] + first_halves))
    return Durations(tuple(forward), tuple(backward), tuple(weight), _transfers(schedule, timelines))


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _transfers(schedule: Schedule, timelines: list[Timeline]) -> tuple[float, ...]:
    """See [Note: what a trace tells about transfers]."""
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
