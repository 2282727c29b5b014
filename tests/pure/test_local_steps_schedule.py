"""When the parts of an exchange between islands are sent and applied."""

from itertools import pairwise

import pytest

from plait.plan import Plan
from plait.plan.local_steps import LocalSteps

CASES = [(steps, parts) for steps in range(1, 13) for parts in range(1, steps + 1)]


@pytest.mark.parametrize(("steps", "parts"), CASES)
def test_every_part_is_sent_once_in_a_round_and_applied_before_the_next_is_in_flight(
    steps: int, parts: int
) -> None:
    local = LocalSteps(steps, None, 0.0, parts)
    last = 5 * steps
    sent = [(n, part) for n in range(1, last + 1) if (part := local.started_after(n)) is not None]
    applied = [(n, part) for n in range(1, last + 1) if (part := local.applied_after(n)) is not None]
    assert [part for _, part in sent] == [part for _ in range(5) for part in range(parts)]
    assert sent[parts - 1] == (steps, parts - 1), "the last part is sent at the end of the round"
    assert applied == [(n + local.delay, part) for n, part in sent if n + local.delay <= last]
    assert all(n + local.delay <= following for (n, _), (following, _) in pairwise(sent))
    for n in range(1, last + 1):
        in_flight = [part for begin, part in sent if begin <= n < begin + local.delay]
        assert local.in_flight_after(n) == (in_flight[0] if in_flight else None)


def test_one_part_is_exchanged_at_once_and_more_during_steps() -> None:
    assert Plan.parse("dp=2 local_steps=8").local.delay == 0
    assert Plan.parse("dp=2 local_steps=8 exchange_parts=2").local.delay == 4


@pytest.mark.parametrize(
    ("parts", "sizes", "expected"),
    [(2, [1, 1, 1, 1], [0, 0, 1, 1]), (3, [6, 3, 3], [0, 1, 2]), (2, [], []), (1, [5, 0], [0, 0])],
)
def test_units_are_divided_in_order_and_by_size(parts: int, sizes: list[int], expected: list[int]) -> None:
    assert LocalSteps(8, None, 0.0, parts).divide(sizes) == expected
