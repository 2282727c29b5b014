"""`check` against an executor with real channels; its errors for schedules that are wrong."""

import random
import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.plan.schedule import GENERATORS, Action, Kind, Schedule, check, make_schedule
from support.schedules import Executor, random_schedule

TRAINING = [name for name, generator in GENERATORS.items() if generator.trains]
_WHERE = re.compile(r"given   : (?:(\S+) )?at position (\d+) of rank (\d+)")


@st.composite
def valid_schedules(draw: st.DrawFn, min_ranks: int = 1) -> Schedule:
    """Schedules by name, or random."""
    name = draw(st.sampled_from([*TRAINING, "random", "random"]))
    ranks, micros = draw(st.integers(min_ranks, 5)), draw(st.integers(1, 7))
    if name != "random":
        return make_schedule(name, ranks, micros)
    rng = random.Random(draw(st.integers(0, 2**32)))
    return random_schedule(rng, ranks, micros, draw(st.integers(1, 3)), draw(st.sampled_from([0, 0.5, 1])))


def cell(draw: st.DrawFn, schedule: Schedule) -> tuple[int, int]:
    rank = draw(st.integers(0, schedule.num_ranks - 1))
    return rank, draw(st.integers(0, len(schedule.ranks[rank]) - 1))


def refused(schedule: Schedule) -> tuple[str, int, int]:
    """(fact, rank, position) of the error, whose grid marks that cell and no other."""
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    where = _WHERE.search(str(error.value))
    assert where is not None, error.value
    rank, position = int(where[3]), int(where[2])
    assert where[1] == str(schedule.ranks[rank][position])
    marked = [line for line in str(error.value).splitlines() if re.search(r">\S+<", line)]
    assert len(marked) == 1
    assert marked[0].lstrip().startswith(f"rank {rank}:")
    assert re.findall(r">(\S+)<", marked[0]) == [where[1]]
    return error.value.fact, rank, position


def edited(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = [*schedule.ranks]
    lists[rank] = tuple(actions)
    return Schedule.from_actions("edited", lists)


@given(valid_schedules())
def test_valid_schedules_pass_with_the_buffers_that_an_executor_counts(schedule: Schedule) -> None:
    ran = Executor(schedule).run()
    assert not ran.stuck
    checked = check(schedule)
    assert list(checked.in_flight) == ran.in_flight
    assert list(checked.buffers) == ran.buffers


@given(valid_schedules(), st.data())
def test_any_order_is_refused_if_and_only_if_an_executor_hangs(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank, first = cell(data.draw, schedule)
    actions = list(schedule.ranks[rank])
    second = data.draw(st.integers(0, len(actions) - 1))
    actions.insert(second, actions.pop(first))
    moved = edited(schedule, rank, actions)
    ran = Executor(moved).run()
    if ran.stuck:
        _, rank, position = refused(moved)
        assert ran.stuck[rank] == position
    else:
        assert list(check(moved).buffers) == ran.buffers


@given(valid_schedules(), st.data())
def test_two_actions_that_depend_on_each_other_cannot_change_places(
    schedule: Schedule, data: st.DataObject
) -> None:
    micro = data.draw(st.integers(0, schedule.num_micros - 1))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    actions = list(schedule.ranks[rank])
    # Of one micro-batch, forwards and backwards are one chain; no weights' half is part of it.
    chain = [at for at, a in enumerate(actions) if a.micro == micro and a.kind is not Kind.W]
    first, second = data.draw(st.sampled_from(list(pairwise(chain))))
    actions[first], actions[second] = actions[second], actions[first]
    swapped = edited(schedule, rank, actions)
    _, rank, position = refused(swapped)
    assert Executor(swapped).run().stuck[rank] == position


@given(valid_schedules(), st.data())
def test_a_lost_forward_or_backward_is_missed(schedule: Schedule, data: st.DataObject) -> None:
    rank, position = cell(data.draw, schedule)
    actions = list(schedule.ranks[rank])
    lost = actions.pop(position)
    assume(lost.kind is not Kind.W)  # without it, its backward is a whole one
    less = edited(schedule, rank, actions)
    assume(less.trains)  # one backward less than one: forwards alone
    fact, rank, position = refused(less)
    assert fact == f"{lost} is missing"
    shows = less.ranks[rank][position]
    if lost.kind is Kind.F:  # its own backward needs it
        assert shows == lost._replace(kind=Kind.B)
    else:
        assert shows.micro == lost.micro
        assert shows.stage in (lost.stage, lost.stage - 1)


@given(valid_schedules(), st.data())
def test_an_action_that_is_there_twice_is_marked_the_second_time(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank, position = cell(data.draw, schedule)
    actions = list(schedule.ranks[rank])
    again = data.draw(st.integers(0, len(actions)))
    actions.insert(again, actions[position])
    twice = edited(schedule, rank, actions)
    fact, *where = refused(twice)
    assert fact == f"{schedule.ranks[rank][position]} appears twice"
    assert where == [rank, max(again, position + (again <= position))]


@given(valid_schedules(min_ranks=2), st.data())
def test_an_action_on_another_rank_than_its_stage_is_marked(schedule: Schedule, data: st.DataObject) -> None:
    rank, position = cell(data.draw, schedule)
    to = data.draw(st.sampled_from([other for other in range(schedule.num_ranks) if other != rank]))
    actions, target = list(schedule.ranks[rank]), list(schedule.ranks[to])
    moved = actions.pop(position)
    place = data.draw(st.integers(0, len(target)))
    target.insert(place, moved)
    fact, *where = refused(edited(edited(schedule, rank, actions), to, target))
    assert fact == f"stage {moved.stage} is on two ranks"
    if sum(action.stage == moved.stage for action in actions) > 1:  # else either rank can be its home
        assert where == [to, place]


def message(text: str) -> str:
    with pytest.raises(ScheduleError) as error:
        check(Schedule.parse(text))
    return error.value.message()


@pytest.mark.quick
def test_a_deadlock_is_reported_as_a_cycle_of_waits() -> None:
    text = "rank 0: F0.0 B0.0 F0.1 B0.1\nrank 1: F1.0 F1.1 B1.0 B1.1"
    assert message(text) == (
        "ScheduleError: the ranks wait for each other: deadlock\n"
        "  given   : B0.0 at position 1 of rank 0, counted from 0: rank 0 at B0.0 waits for B1.0 of rank 1, "
        "which at F1.1 waits for F0.1 of rank 0\n"
        "            rank 0:  F0.0 >B0.0< F0.1  B0.1\n"
        "            rank 1:  F1.0  F1.1  B1.0  B1.1\n"
        "  expected: an order in which every action comes after its dependencies\n"
        "  try     : move, add or remove the marked action; plait schedule file:PATH checks the file"
    )


def test_a_wrong_order_within_one_rank_is_reported_as_such() -> None:
    text = message("rank 0: F0.0 B0.0\nrank 1: B1.0 F1.0")
    assert text.startswith("ScheduleError: B1.0 comes before an action it depends on\n")
    assert "            rank 1: >B1.0< F1.0\n  expected: F1.0 first; its rank computes it later" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the schedule has no ranks"),
        ("rank 0: F0.0 B0.0\nrank 1:", "rank 1 has no actions"),
        ("rank 0: F0.0 F0.2 B0.0 B0.2", "F0.1 is missing"),
        ("rank 0: F0.0 F2.0 B2.0 B0.0", "F1.0 is missing"),
        ("rank 0: F0.0 F0.1 B0.0", "B0.1 is missing"),
        ("rank 0: F0.0 F0.1 B0.0 W0.0 W0.1", "B0.1 is missing"),
        ("rank 0: F0.0 W0.0 B0.0", "W0.0 comes before an action it depends on"),
        ("rank 0: F0.999999999", "F0.0 is missing"),
    ],
)
def test_missing_actions_are_named(text: str, says: str) -> None:
    assert says in message(text).splitlines()[0]


def test_the_grid_of_a_large_schedule_is_cut_around_the_cell() -> None:
    schedule = make_schedule("1f1b", 32, 100)
    actions = list(schedule.ranks[16])
    actions.insert(60, actions[40])
    with pytest.raises(ScheduleError) as error:
        check(edited(schedule, 16, actions))
    lines = str(error.value).splitlines()
    grid = [line for line in lines if line.startswith("            rank ")]
    assert [line.split(":")[0] for line in grid] == [f"            rank {rank}" for rank in range(12, 21)]
    assert f">{actions[40]}<" in grid[4]
    assert all(len(line) < 120 and line.count("...") == 2 for line in grid)
    assert len({line.find(" ", 22) for line in grid}) == 1
    assert lines.count("            ...") == 2


def test_messages_that_are_not_used_in_their_order_need_buffers() -> None:
    # Rank 0 computes micro-batches 0 to 3, rank 1 the last first: it holds what comes before.
    text = "rank 0: F0.0 F0.1 F0.2 F0.3\nrank 1: F1.3 F1.2 F1.1 F1.0"
    assert check(Schedule.parse(text)).buffers == (0, 4)
    assert check(make_schedule("inference", 2, 4)).buffers == (0, 1)
