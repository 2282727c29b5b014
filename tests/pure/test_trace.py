"""Traces of pipelines: slices in viewers, reading back, durations for the clock, errors."""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DataError
from plait.plan.schedule import (
    B,
    Durations,
    F,
    Schedule,
    Span,
    Timeline,
    W,
    make_schedule,
    simulate,
)
from plait.plan.schedule.trace import durations_of, read_trace, write_trace

EIGHTH_S = 1.25e-7  # times in files are rounded to this


def durations(rng: random.Random, num_stages: int) -> Durations:
    def some(number: int) -> tuple[float, ...]:
        return tuple(rng.uniform(1e-3, 9e-3) for _ in range(number))

    return Durations(some(num_stages), some(num_stages), some(num_stages), some(num_stages - 1))


def steps_of(schedule: Schedule, *numbers: int) -> dict[int, Timeline]:
    return {step: simulate(schedule, durations(random.Random(step), schedule.num_stages)) for step in numbers}


def moved(timeline: Timeline, seconds: float) -> Timeline:
    return Timeline.from_spans(
        timeline.schedule,
        [[Span(s.action, s.start + seconds, s.end + seconds) for s in spans] for spans in timeline.ranks],
    )


def assert_same(found: Timeline, expected: Timeline) -> None:
    assert found.schedule == expected.schedule
    for ours, theirs in zip(found.ranks, expected.ranks, strict=True):
        assert [span.action for span in ours] == [span.action for span in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert (one.start, one.end) == pytest.approx((other.start, other.end), abs=EIGHTH_S, rel=0)


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 4), ("zbv", 2), ("interleaved", 2), ("inference", 3), ("gpipe", 1)]
)
def test_timelines_read_back_from_each_steps_first_action_on(tmp_path: Path, name: str, ranks: int) -> None:
    steps = steps_of(make_schedule(name, ranks, 6), 12, 3)
    write_trace(tmp_path / "trace.json", {12: moved(steps[12], 1234.5), 3: moved(steps[3], -7.0)})
    found = read_trace(tmp_path / "trace.json")
    assert list(found) == [3, 12]
    for step, timeline in found.items():
        assert_same(timeline, steps[step])


def test_a_viewer_finds_a_process_per_rank_and_a_slice_per_action(tmp_path: Path) -> None:
    schedule = Schedule.from_actions("two", [[F(0, 0), B(0, 0), W(0, 0)], [F(1, 0), B(1, 0)]])
    spans = [
        [Span(F(0, 0), 2.0, 2.5), Span(B(0, 0), 4.0, 4.25), Span(W(0, 0), 4.25, 4.5)],
        [Span(F(1, 0), 2.5, 3.0), Span(B(1, 0), 3.0, 4.0)],
    ]
    write_trace(tmp_path / "trace.json", {5: Timeline.from_spans(schedule, spans)})
    found = json.loads((tmp_path / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["pid"], e["ts"], e["dur"]) for e in slices] == [
        ("F0.0", "forward", 0, 0, 5e5),
        ("B0.0", "backward", 0, 2e6, 2.5e5),
        ("W0.0", "weight", 0, 2.25e6, 2.5e5),
        ("F1.0", "forward", 1, 5e5, 5e5),
        ("B1.0", "backward", 1, 1e6, 1e6),
    ]
    assert slices[3]["args"] == {"stage": 1, "micro": 0, "step": 5}
    assert found["plait"] == {
        "format": "plait trace 1",
        "name": "two",
        "schedule": str(schedule),
        "ranks": 2,
        "steps": 1,
    }


def test_slices_of_a_rank_do_not_overlap_when_a_viewer_cuts_times_to_nanoseconds(tmp_path: Path) -> None:
    steps = steps_of(make_schedule("1f1b", 3, 24), *range(8))
    write_trace(tmp_path / "trace.json", steps)
    events: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            start_ns = int(event["ts"] * 1000.0)
            events[event["pid"]].append((start_ns, start_ns + int(event["dur"] * 1000.0)))
    for rank in range(3):
        assert len(events[rank]) == 8 * 48
        for (_, end), (start, _) in zip(events[rank], events[rank][1:], strict=False):
            assert end <= start


@given(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zbv"]), st.integers(1, 4), st.integers(1, 8), st.randoms())
def test_the_clock_learns_the_durations_it_was_given(
    name: str, ranks: int, micros: int, rng: random.Random
) -> None:
    schedule = make_schedule(name, ranks, micros)
    given_ = durations(rng, schedule.num_stages)
    timeline = simulate(schedule, given_)
    found = durations_of([timeline])
    assert found.forward == pytest.approx(given_.forward)
    for stage in range(schedule.num_stages):
        splits = sum((stage, micro) in schedule.split for micro in range(micros))
        halves = (given_.backward[stage], given_.weight[stage])
        expected = halves if splits else (sum(halves), 0.0)
        assert (found.backward[stage], found.weight[stage]) == pytest.approx(expected)
    for stage, (transfer, seen) in enumerate(zip(given_.transfer, found.transfer, strict=True)):
        alone = schedule.rank_of[stage] == schedule.rank_of[stage + 1]
        assert seen == pytest.approx(0.0 if alone else transfer)
    assert simulate(schedule, found).total == pytest.approx(timeline.total)


def test_over_steps_actions_are_medians_and_transfers_the_least() -> None:
    schedule = make_schedule("zb-h1", 2, 4)
    steps = [
        simulate(
            schedule,
            Durations.uniform(2, forward=1 * t, backward=2 * t, weight=3 * t, transfer=0.5 * t),
        )
        for t in (9.0, 1.0, 2.0)
    ]
    found = durations_of(steps)
    assert (found.forward, found.backward, found.weight) == ((2.0,) * 2, (4.0,) * 2, (6.0,) * 2)
    assert found.transfer == pytest.approx((0.5,))


def test_a_full_backward_among_split_ones_counts_without_the_weights_half() -> None:
    schedule = Schedule.from_actions("mixed", [[F(0, 0), F(0, 1), B(0, 0), W(0, 0), B(0, 1)]])
    ends = [1.0, 2.0, 3.0, 5.0, 8.5]
    spans = [Span(a, end0, end) for a, end0, end in zip(schedule.ranks[0], [0.0, *ends], ends, strict=False)]
    found = durations_of([Timeline.from_spans(schedule, [spans])])
    assert found == Durations((1.0,), (1.25,), (2.0,), ())  # of 1 and 3.5 - 2


def test_a_gap_below_zero_is_no_transfer() -> None:
    schedule = Schedule.from_actions("skewed", [[F(0, 0)], [F(1, 0)]])
    spans = [[Span(F(0, 0), 0.0, 1.0)], [Span(F(1, 0), 0.75, 2.0)]]
    assert durations_of([Timeline.from_spans(schedule, spans)]).transfer == (0.0,)


def _event(found: dict[str, Any], **changes: Any) -> None:
    """Changes the last event."""
    found["traceEvents"][-1] |= changes


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda found: found.pop("plait"), "no format 'plait trace 1'"),
        (lambda found: found["plait"].update(format="plait trace 9"), "no format"),
        (lambda found: found["plait"].update(schedule="rank 0: F0"), "its schedule: invalid action"),
        (lambda found: found["plait"].update(schedule=None), "its schedule: a schedule needs one line"),
        (lambda found: found.update(traceEvents={}), "`traceEvents` is not a list"),
        (lambda found: found.update(traceEvents=[]), "it has 0 steps of 2"),
        (lambda found: found["plait"].update(steps=3), "it has 2 steps of 3"),
        (lambda found: found["traceEvents"].pop(), "step 1 does not have every action"),
        (
            lambda found: found["traceEvents"].append(found["traceEvents"][-1]),
            "step 1 does not have every action",
        ),
        (lambda found: found["traceEvents"].append(7), "event 36 is not an action"),
        (lambda found: _event(found, pid=0), "step 1 does not have every action"),
        (lambda found: _event(found, pid=True), "event 35 is not an action"),
        (lambda found: _event(found, cat="nap"), "event 35 is not an action"),
        (lambda found: _event(found, cat=[]), "event 35 is not an action"),
        (lambda found: _event(found, args=None), "event 35 is not an action"),
        (lambda found: _event(found, ts="soon"), "event 35 is not an action"),
        (lambda found: _event(found, ts=float("nan")), "event 35 is not an action"),
        (lambda found: _event(found, ts=10**400), "an integer of more than 64 bits"),
        (lambda found: _event(found, dur=-1.0), "event 35 is not an action"),
        (
            lambda found: _event(found, args={"stage": [1], "micro": 0, "step": 0}),
            "event 35 is not an action",
        ),
    ],
)
def test_a_damaged_trace_is_an_error(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], says: str
) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, steps_of(make_schedule("1f1b", 2, 4), 0, 1))
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match="not a complete pipeline trace") as raised:
        read_trace(path)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1, 2]", "no format"), ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("\udcff", "not JSON")],
)
def test_a_file_that_is_no_trace_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError) as raised:
        read_trace(path)
    assert says in str(raised.value)


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read") as raised:
        read_trace(tmp_path / "trace.json")
    assert "No such file" in str(raised.value)


def test_a_trace_of_two_schedules_is_refused(tmp_path: Path) -> None:
    steps = {rank: simulate(make_schedule("1f1b", rank, 2), Durations.uniform(rank)) for rank in (1, 2)}
    with pytest.raises(AssertionError, match="timelines of 2 schedules"):
        write_trace(tmp_path / "trace.json", steps)
    assert not list(tmp_path.iterdir())
