"""Ranks that follow the deadlines never wait in a circle, whatever each of them skips."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.plan.prefetch import MAX_IN_FLIGHT, reduction_deadlines


class Rank:
    """Backward as one rank runs it: it goes from use to use, reduces what is complete or due, lands, waits.

    `events` is what it does, in order: ("gather", place), ("reduce", unit), ("land", unit), ("wait", place).
    """

    def __init__(self, last_uses: list[int], prefetch: int, seen: set[int], complete: dict[int, int]) -> None:
        """`seen`: places whose use happens here. `complete`: by which place a unit is, if ever."""
        uses = 1 + max(last_uses, default=-1)
        due = reduction_deadlines(last_uses, prefetch)
        self.events: list[tuple[str, int]] = []
        self._reduced = 0
        gathered = 0
        for place in range(uses):
            stop = min(uses, place + 1 + prefetch)
            self.events += [("gather", number) for number in range(gathered, stop)]
            gathered = max(gathered, stop)
            while self._reduced < len(due) and (limit := due[self._reduced]) is not None and limit <= place:
                self._reduce()
            self.events.append(("wait", place))
            if place in seen:
                while self._reduced < len(due) and complete.get(self._reduced, uses) <= place:
                    self._reduce()
        while self._reduced < len(due):
            self._reduce()
        self.events += [("land", unit) for unit in range(max(0, len(due) - MAX_IN_FLIGHT), len(due))]

    def _reduce(self) -> None:
        self.events.append(("reduce", self._reduced))
        if self._reduced >= MAX_IN_FLIGHT:
            self.events.append(("land", self._reduced - MAX_IN_FLIGHT))
        self._reduced += 1


def all_finish(ranks: list[Rank]) -> bool:
    """Runs the ranks: to wait for a gather, or to land a reduction, takes that all have started it."""
    at = [0] * len(ranks)
    started: list[set[tuple[str, int]]] = [set() for _ in ranks]
    moved = True
    while moved:
        moved = False
        for index, rank in enumerate(ranks):
            while at[index] < len(rank.events):
                kind, number = rank.events[at[index]]
                needs = {"wait": ("gather", number), "land": ("reduce", number)}.get(kind)
                if needs is not None and not all(needs in done for done in started):
                    break
                started[index].add((kind, number))
                at[index] += 1
                moved = True
    return all(place == len(rank.events) for place, rank in zip(at, ranks, strict=True))


def _some_ranks(seed: int, units: int, prefetch: int, num_ranks: int) -> list[Rank]:
    chance = random.Random(seed)
    last_uses = list(range(units))
    for _ in range(chance.choice([0, 0, 1, 3])):  # an order of reductions that is not the walk's
        last_uses.append(last_uses.pop(chance.randrange(units)))
    if chance.random() < 0.3:  # pinned: in no walk, complete at any time
        last_uses[chance.randrange(units)] = -1
    ranks = []
    for _ in range(num_ranks):
        seen = {place for place in range(units) if chance.random() < 0.8}
        complete = {
            unit: max(last, chance.choice([0, 0, 0, units]))
            for unit, last in enumerate(last_uses)
            if chance.random() < 0.8
        }
        ranks.append(Rank(last_uses, prefetch, seen, complete))
    return ranks


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 14), st.integers(0, 3), st.integers(1, 4))
def test_no_ranks_wait_in_a_circle(seed: int, units: int, prefetch: int, num_ranks: int) -> None:
    assert all_finish(_some_ranks(seed, units, prefetch, num_ranks))


def test_with_later_deadlines_they_would() -> None:
    """One rank is complete with everything at once, the other never: the deadline is exact."""
    for prefetch in (0, 1, 2):
        last_uses = list(range(12))
        eager = Rank(last_uses, prefetch, set(range(12)), dict(enumerate(last_uses)))
        lazy = Rank(last_uses, prefetch, set(), {})
        assert all_finish([eager, lazy])
        late = Rank.__new__(Rank)
        late.events = _postponed(lazy.events)
        assert not all_finish([eager, late])


def _postponed(events: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Every reduction (and its landing) after the next wait."""
    found: list[tuple[str, int]] = []
    held: list[tuple[str, int]] = []
    for event in events:
        if event[0] in ("reduce", "land"):
            held.append(event)
            continue
        found.append(event)
        if event[0] == "wait":
            found, held = found + held, []
    return found + held


def test_deadlines_are_exact_for_a_plain_walk() -> None:
    assert reduction_deadlines([0, 1, 2, 3, 4], prefetch=1) == [4, 5, 6, None, None]
    assert reduction_deadlines([0, 1, 2, -1], prefetch=0) == [3, 3, None, None]
    assert reduction_deadlines([], prefetch=1) == []
