"""The clock of schedules: starts and ends, idle time, bytes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.plan.schedule import (
    Action,
    B,
    Durations,
    F,
    Kind,
    Schedule,
    Timeline,
    W,
    make_schedule,
    peak_activation_bytes,
    simulate,
)
from support.schedules import Executor, random_schedule


def spans(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    return {span.action: (span.start, span.end) for rank in timeline.ranks for span in rank}


def test_a_small_pipeline_by_hand() -> None:
    schedule = Schedule.parse("rank 0: F0.0 F0.1 B0.0 W0.0 B0.1\nrank 1: F1.0 B1.0 F1.1 B1.1")
    durations = Durations(forward=(1, 2), backward=(3, 4), weight=(5, 6), transfer=(0.5,))
    timeline = simulate(schedule, durations)
    assert spans(timeline) == {
        F(0, 0): (0, 1),
        F(0, 1): (1, 2),
        F(1, 0): (1.5, 3.5),
        B(1, 0): (3.5, 13.5),  # whole: 4 + 6
        F(1, 1): (13.5, 15.5),
        B(0, 0): (14, 17),  # the input's gradient, when it has travelled
        W(0, 0): (17, 22),
        B(1, 1): (15.5, 25.5),
        B(0, 1): (26, 34),
    }
    assert timeline.total == 34
    assert (timeline.busy(0), timeline.idle(0)) == (18, 16)
    assert timeline.busy(1) == 24
    assert timeline.bubble_fraction == pytest.approx((16 + 10) / 68)


def test_between_stages_of_one_rank_nothing_travels() -> None:
    durations = Durations.uniform(2, weight=0, transfer=100)
    assert simulate(Schedule.parse("rank 0: F0.0 F1.0 B1.0 B0.0"), durations).total == 4
    apart = Schedule.parse("rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0")
    assert simulate(apart, durations).total == 204


@st.composite
def timed(draw: st.DrawFn) -> tuple[Schedule, Durations]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    ranks, micros, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    schedule = random_schedule(rng, ranks, micros, chunks)
    stages = ranks * chunks
    whole = [tuple(rng.randrange(1, 9) for _ in range(stages)) for _ in range(3)]
    return schedule, Durations(*whole, tuple(rng.randrange(9) for _ in range(stages - 1)))


@given(timed())
def test_every_action_begins_as_soon_as_its_rank_and_its_input_let_it(
    case: tuple[Schedule, Durations],
) -> None:
    schedule, durations = case
    timeline = simulate(schedule, durations)
    when = spans(timeline)
    for rank, row in enumerate(timeline.ranks):
        assert tuple(span.action for span in row) == schedule.ranks[rank]
        free = 0.0
        for (kind, stage, micro), start, end in row:
            lets = [free]
            if kind is Kind.F and stage:
                travels = durations.transfer[stage - 1] * (stage - 1 not in schedule.stages_of(rank))
                lets.append(when[F(stage - 1, micro)][1] + travels)
            if kind is Kind.B and stage + 1 < schedule.num_stages:
                travels = durations.transfer[stage] * (stage + 1 not in schedule.stages_of(rank))
                lets.append(when[B(stage + 1, micro)][1] + travels)
            if kind is not Kind.F:
                lets.append(when[F(stage, micro)][1])
            assert start == max(lets)
            takes = {Kind.F: durations.forward, Kind.B: durations.backward, Kind.W: durations.weight}
            more = durations.weight[stage] if kind is Kind.B and W(stage, micro) not in when else 0
            assert end - start == takes[kind][stage] + more
            free = end
    assert timeline.total >= max(timeline.busy(rank) for rank in range(schedule.num_ranks))
    assert timeline.total == max(end for _, end in when.values())


def peak_bytes(schedule: Schedule, sizes: list[int]) -> tuple[int | None, ...]:
    """By rank, if a micro-batch keeps `sizes` by stage until its last gradient."""
    kept = {stage: (size, size) for stage, size in enumerate(sizes)}
    return tuple(peak_activation_bytes(schedule, rank, kept) for rank in range(schedule.num_ranks))


@given(timed(), st.integers(0, 2**32))
def test_bytes_are_held_from_a_forward_until_its_last_gradient(
    case: tuple[Schedule, Durations], seed: int
) -> None:
    schedule, durations = case
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 100) for _ in range(schedule.num_stages)]
    when = spans(simulate(schedule, durations))
    for rank, peak in enumerate(peak_bytes(schedule, sizes)):
        lives = [
            (when[action][0], when.get(W(*action[1:]), when[B(*action[1:])])[1], sizes[action.stage])
            for action in schedule.ranks[rank]
            if action.kind is Kind.F
        ]
        assert peak == max(sum(size for a, b, size in lives if a <= at < b) for at, _, _ in lives)
    assert peak_bytes(schedule, [1] * schedule.num_stages) == tuple(Executor(schedule).run().in_flight)


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_ranks() -> None:
    assert peak_bytes(make_schedule("gpipe", 2, 8), [100, 10]) == (800, 80)
    assert peak_bytes(make_schedule("1f1b", 2, 8), [100, 10]) == (200, 10)
    assert peak_bytes(make_schedule("inference", 2, 8), [100, 10]) == (100, 10)


def test_durations_of_other_stages_and_schedules_that_hang_are_refused() -> None:
    with pytest.raises(ScheduleError, match="durations do not match the number of stages") as error:
        simulate(make_schedule("gpipe", 2, 2), Durations.uniform(3))
    assert "expected: one for each of 2 stages, and 1 transfers" in str(error.value)
    with pytest.raises(ScheduleError, match="comes before an action it depends on"):
        simulate(Schedule.parse("rank 0: B0.0 F0.0"), Durations.uniform(1))


def test_a_schedule_of_many_actions_is_timed_by_the_same_law() -> None:
    schedule = make_schedule("interleaved", 16, 64, 2)
    timeline = simulate(schedule, Durations.uniform(32, forward=0.5, backward=0.5, weight=0.5))
    assert timeline.bubble_fraction == pytest.approx(15 / (2 * 64 + 15))
