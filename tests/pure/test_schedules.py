"""Schedules of all small pipelines: their bubbles, held micro-batches and texts."""

import random
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError, ScheduleError
from plait.plan import Plan
from plait.plan.key_conflicts import SCHEDULES
from plait.plan.schedule import (
    GENERATORS,
    B,
    Durations,
    F,
    Kind,
    Schedule,
    ScheduleNeeds,
    Timeline,
    action,
    check,
    make_schedule,
    simulate,
)
from support.schedules import random_schedule

RANKS, MICROS, CHUNKS = range(1, 9), range(1, 25), range(1, 5)


def runs(name: str, chunks: int = 0) -> Iterator[tuple[int, int, ScheduleNeeds, Timeline]]:
    """(P, M, what it needs, when it does what) of all small pipelines, if F, B and W take 1 each."""
    for ranks in RANKS:
        for micros in MICROS:
            schedule = make_schedule(name, ranks, micros, chunks)
            checked = check(schedule)
            assert len(schedule.stages_of(0)) == (chunks or GENERATORS[name].chunks)
            yield ranks, micros, checked, simulate(schedule, Durations.uniform(schedule.num_stages))


def loop_bubble(ranks: int, micros: int, chunks: int) -> int:
    """How long each rank idles, in chunks' forwards and backwards.

    With fewer micro-batches than ranks, each chunk's round through the others is longer than the work.
    """
    return chunks * max(0, ranks - micros) + min(ranks, micros) - 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_filling_and_draining_the_pipe(name: str) -> None:
    for ranks, micros, _, timeline in runs(name):
        assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (micros + ranks - 1))


def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_to_come_and_gpipe_all() -> None:
    for ranks, micros, checked, _ in runs("1f1b"):
        assert checked.in_flight == tuple(min(ranks - stage, micros) for stage in range(ranks))
        assert set(checked.buffers) <= {0, 1}
    for ranks, micros, checked, _ in runs("gpipe"):
        assert checked.in_flight == (micros,) * ranks


@pytest.mark.parametrize("chunks", CHUNKS)
def test_interleaving_divides_the_bubble_by_the_chunks_and_holds_a_group_for_each(chunks: int) -> None:
    for ranks, micros, checked, timeline in runs("interleaved", chunks):
        idle = 3 * loop_bubble(ranks, micros, chunks)
        assert [timeline.idle(rank) for rank in range(ranks)] == [idle] * ranks
        assert timeline.total <= 3 * chunks * (micros + ranks - 1)  # 1F1B's
        if micros >= ranks:  # not only multiples
            bubble = (ranks - 1) / (chunks * micros + ranks - 1)
            assert timeline.bubble_fraction == pytest.approx(bubble)
        group = -(-micros // max(1, micros // ranks))  # the largest
        assert micros % ranks or group == ranks
        ahead = [2 * (ranks - 1 - rank) if chunks > 1 else ranks - 1 - rank for rank in range(ranks)]
        most = [min(more + (chunks - 1) * group + 1, chunks * micros) for more in ahead]
        assert list(checked.in_flight) == most


@pytest.mark.parametrize("chunks", CHUNKS)
def test_breadth_first_has_interleavings_bubble_and_finishes_a_stage_before_the_next(chunks: int) -> None:
    for ranks, micros, checked, timeline in runs("bfs", chunks):
        assert all(timeline.idle(rank) == 3 * loop_bubble(ranks, micros, chunks) for rank in range(ranks))
        assert checked.in_flight == (chunks * micros,) * ranks
        for actions in timeline.schedule.ranks:
            turns = [(action.kind, action.stage) for action in actions]
            assert len(set(turns)) == 1 + sum(a != b for a, b in pairwise(turns))


def test_chunks_make_1f1b_interleaved_and_gpipe_breadth_first() -> None:
    for ranks, micros, chunks in ((2, 5, 2), (4, 8, 3), (3, 2, 2)):
        for plain, looped in (("1f1b", "interleaved"), ("gpipe", "bfs")):
            assert make_schedule(plain, ranks, micros, chunks).ranks == (
                make_schedule(looped, ranks, micros, chunks).ranks
            )
            assert make_schedule(looped, ranks, micros, 1).ranks == make_schedule(plain, ranks, micros).ranks


def test_zb_h1_has_a_third_of_1f1bs_bubble_in_1f1bs_memory() -> None:
    for (ranks, micros, checked, timeline), (_, _, plain, whole) in zip(
        runs("zb-h1"), runs("1f1b"), strict=True
    ):
        bubble = timeline.total - 3 * micros
        assert bubble == ranks - 1 + max(0, ranks - micros)  # fewer micro-batches cannot fill the drain
        assert bubble <= whole.total - 3 * micros
        if micros >= ranks:
            assert 3 * bubble == whole.total - 3 * micros
        assert max(checked.in_flight) == max(plain.in_flight) == min(ranks, micros)


def test_zbv_waits_for_nothing_but_the_first_forward() -> None:
    for ranks, micros, checked, timeline in runs("zbv"):
        bubble = timeline.total - 6 * micros
        if micros >= 2 * ranks - 1:
            assert bubble == ranks - 1
            assert all(spans[-1].end - spans[0].start == 6 * micros for spans in timeline.ranks)
        fewer = max(ranks - 1, 4 * (ranks - 1) - 2 * (micros - 1))
        assert fewer <= bubble <= fewer + 1
        assert max(checked.in_flight) == 2 * min(ranks, micros)
        assert set(checked.buffers) <= {0, 1}


def test_dualpipev_has_zbvs_bubble_and_one_more_in_flight() -> None:
    for ranks, micros, checked, timeline in runs("dualpipev"):
        assert timeline.total - 6 * micros == max(ranks - 1, 5 * (ranks - 1) - 2 * (micros - 1))
        assert max(checked.in_flight) == min(2 * ranks + 1, 2 * micros)
        assert set(checked.buffers) <= {0, 1}


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_a_v_has_the_first_and_the_last_stage_on_the_first_rank(name: str) -> None:
    for ranks in RANKS:
        schedule = make_schedule(name, ranks, 3)
        assert [schedule.stages_of(rank) for rank in range(ranks)] == [
            (rank, 2 * ranks - 1 - rank) for rank in range(ranks)
        ]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_inference_is_forwards_that_hold_nothing(chunks: int) -> None:
    for ranks, micros, checked, timeline in runs("inference", chunks):
        assert {action.kind for _, action in timeline.schedule} == {Kind.F}
        assert timeline.total - chunks * micros == loop_bubble(ranks, micros, chunks)
        assert checked.in_flight == (1,) * ranks


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_zero_bubble_schedules_split_every_backward(name: str) -> None:
    schedule = make_schedule(name, 3, 7)
    assert len(schedule.split) == schedule.num_stages * 7


@pytest.mark.quick
def test_a_small_schedule_is_the_one_in_the_books() -> None:
    text = "rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nrank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    assert str(make_schedule("1f1b", 2, 3)) == text


@given(st.sampled_from([*GENERATORS, "random"]), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32))
def test_text_and_csv_read_back(name: str, ranks: int, micros: int, seed: int) -> None:
    if name == "random":
        schedule = random_schedule(random.Random(seed), ranks, micros, chunks=2)
    else:
        schedule = make_schedule(name, ranks, micros)
    assert Schedule.parse(str(schedule), schedule.name) == schedule
    assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule


def test_a_table_may_have_comments_and_idle_cells() -> None:
    expected = Schedule.from_actions("given", [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]])
    assert Schedule.parse("# two ranks\n\nrank 0: F0.0 B0.0  # first\n rank 1: F1.0 B1.0") == expected
    assert Schedule.from_csv("F0.0,,,B0.0\n,F1.0, B1.0 ,\n") == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank 0: F0.0 X0.0", "given   : 'X0.0'"),
        ("rank 0: F0.0 B0", "given   : 'B0'"),
        (f"rank 0: F0.{'1' * 5000}", "given   : 'F0.1111"),
        (f"rank 0: F{'1' * 5000}.0", "given   : 'F1111"),
        (f"rank {'0' * 5000}: F0.0", "expected: rank 0: F0.0 ..."),
        ("rank 1: F0.0", "expected: rank 0: F0.0 ..."),
        ("F0.0 B0.0", "expected: rank 0: F0.0 ..."),
    ],
)
def test_text_that_is_no_schedule_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    assert says in error.value.message()


def test_numbers_and_names_that_cannot_be_are_refused() -> None:
    for arguments, says in (
        (("zb-h2", 2, 4), "try     : zb-h1"),
        (("gpipe", 0, 4), "a schedule cannot have 0 ranks"),
        (("gpipe", 2, 0), "a schedule cannot have 0 micros"),
        (("zbv", 2, 4, 3), "2 stages per rank"),
        (("zb-h1", 2, 4, 2), "schedule=interleaved chunks=2"),
    ):
        with pytest.raises(ScheduleError) as error:
            make_schedule(*arguments)
        assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "ranks", "micros"),
    [("1f1b", 99_999_999, 8), ("gpipe", 100_000, 100_000), ("zbv", 1000, 1), ("bfs", 1, 10**12)],
)
def test_a_schedule_too_large_to_validate_is_refused_at_once(name: str, ranks: int, micros: int) -> None:
    with pytest.raises(ScheduleError, match="too large"):
        make_schedule(name, ranks, micros)
    assert make_schedule("1f1b", 64, 2048).num_ranks == 64


def test_a_large_schedule_is_validated_in_linear_time() -> None:
    begun_s = time.process_time()
    check(make_schedule("gpipe", 1, 1, 30_000))
    assert time.process_time() - begun_s < 20  # one second; in quadratic time it would be minutes


def test_a_file_of_too_many_actions_or_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action, "MAX_ACTIONS", 100)
    assert Schedule.from_csv("F0.0," * 100).num_ranks == 1
    for text in ("F0.0," * 101, "F0.0\n" * 101, ",\n" * 101):
        with pytest.raises(ScheduleError, match="too large"):
            Schedule.from_csv(text)


def test_plans_know_the_schedules_that_train_and_their_chunks() -> None:
    assert [*SCHEDULES, "inference"] == list(GENERATORS)
    for name in SCHEDULES:
        plan = Plan(pp=2, schedule=name)
        made = make_schedule(name, 2, 3)
        assert (plan.num_stages, GENERATORS[name].splits) == (made.num_stages, bool(made.split))
    assert Plan(pp=2, schedule="1f1b", chunks=3).num_stages == 6
    for text in ("schedule=inference", "schedule=zbv chunks=3", "schedule=file:my.csv chunks=2"):
        with pytest.raises(PlanError):
            Plan.parse(f"pp=2 {text}")


@pytest.mark.parametrize("path", ["my runs/a.csv", "a.csv ", "a\tb.csv"])
def test_a_schedules_path_that_a_plans_text_would_tear_apart_is_refused(path: str) -> None:
    with pytest.raises(PlanError, match="spaces or commas") as error:
        Plan(pp=2, schedule=f"file:{path}")
    assert "try     : rename the file" in str(error.value)
