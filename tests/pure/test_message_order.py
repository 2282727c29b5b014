"""Receives in the global order of a schedule never block a rank that others wait for, on one stream."""

import random
from collections.abc import Callable, Iterator

import pytest

from plait.plan.schedule import Action, Kind, Schedule, check, make_schedule
from plait.plan.schedule.simulate import global_order
from plait.plan.schedule.validate import dependencies
from support.schedules import random_schedule

# What a rank starts: ("compute" | "send" | "receive", action that sends).
Operation = tuple[str, Action]
Rule = Callable[[Schedule, int, int, dict[Action, int]], list[Action]]


def message_of(schedule: Schedule, action: Action, rank: int) -> Action | None:
    """The action of another rank whose message an action needs."""
    for need in dependencies(action, schedule.num_stages):
        if schedule.rank_of[need.stage] != rank and need.kind is action.kind:
            return need
    return None


def in_global_order(schedule: Schedule, rank: int, index: int, order: dict[Action, int]) -> list[Action]:
    """Receives posted before an action by [Note: global message order] in `pipeline/executor.py`."""
    needed = filter(None, (message_of(schedule, action, rank) for action in schedule.ranks[rank]))
    here = order[schedule.ranks[rank][index]]
    return sorted((message for message in needed if order[message] < here), key=order.__getitem__)


def two_ahead(schedule: Schedule, rank: int, index: int, _: dict[Action, int]) -> list[Action]:
    """Receives posted where every channel has a stream of its own."""
    upcoming = schedule.ranks[rank][: index + 3]
    return [message for action in upcoming if (message := message_of(schedule, action, rank)) is not None]


def operations(schedule: Schedule, rank: int, rule: Rule) -> Iterator[Operation]:
    order, posted = global_order(schedule), set[Action]()
    for index, action in enumerate(schedule.ranks[rank]):
        for message in rule(schedule, rank, index, order):
            if message not in posted:
                posted.add(message)
                yield "receive", message
        yield "compute", action
        step = {Kind.F: 1, Kind.B: -1, Kind.W: 0}[action.kind]
        if step and schedule.rank_of.get(action.stage + step, rank) != rank:
            yield "send", action


def stuck(schedule: Schedule, rule: Rule) -> list[Operation]:
    """The next operation of each rank that cannot go on, if each of its operations ends before the next one
    begins and a message moves when both ranks have come to it."""
    rows = [list(operations(schedule, rank, rule)) for rank in range(schedule.num_ranks)]
    at, moved = [0] * len(rows), True

    def head(rank: int) -> Operation | None:
        return rows[rank][at[rank]] if at[rank] < len(rows[rank]) else None

    while moved:
        moved = False
        for rank in range(len(rows)):
            while (operation := head(rank)) is not None and operation[0] == "compute":
                at[rank] += 1
                moved = True
            if operation is None or operation[0] != "send":
                continue
            receivers = [other for other in range(len(rows)) if head(other) == ("receive", operation[1])]
            for one in (rank, *receivers) if receivers else ():
                at[one] += 1
                moved = True
    return [operation for rank in range(len(rows)) if (operation := head(rank)) is not None]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_schedules_end_if_every_message_waits_for_both_its_ranks(name: str, num_ranks: int) -> None:
    schedule = make_schedule(name, num_ranks, 2 * num_ranks, 2 if name == "interleaved" else 0)
    assert not stuck(schedule, in_global_order)


def test_random_schedules_end_if_every_message_waits_for_both_its_ranks() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        schedule = random_schedule(rng, rng.randint(2, 5), micros=rng.randint(1, 5), chunks=rng.randint(1, 3))
        check(schedule)
        assert not stuck(schedule, in_global_order), f"seed {seed}\n{schedule}"


def test_receives_two_actions_ahead_would_block_a_single_stream() -> None:
    assert stuck(make_schedule("1f1b", 4, 8, 0), two_ahead)
