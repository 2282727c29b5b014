"""Covering sets: a few cases of a large product of options that still cover every pair of options."""

import functools
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import combinations

Case = Mapping[str, str]  # factor -> option; without factors that do not apply
Pair = frozenset[tuple[str, str]]  # two options, or more
_Options = tuple[tuple[str, str], ...]  # sorted
Draw = Callable[[random.Random, Case], Case | None]  # a random case with the given options, or None

DRAWN_AT_ONCE = 150  # candidates per choice
_SAMPLE = 600  # random cases that show which pairs are rare


def covering(
    cases: Sequence[Case],
    *,
    seed: int,
    least: int = 0,
    known: Set[Pair] = frozenset(),
    cost: Callable[[Case], float] = lambda _: 1.0,
    size: int = 2,
) -> list[Case]:
    """Select `cases` that cover every pair of options of any of them, in the order of choice, or every
    combination of `size` options. `known` pairs are covered elsewhere.

    Greedy: always the case with the most missing pairs for its cost, ties by a seeded shuffle. Once no pair
    is missing, continues with larger combinations until `least` cases are chosen.
    """
    left = [*cases]
    random.Random(seed).shuffle(left)
    chosen: list[Case] = []
    for number, wanted in ((size, len(cases)), (size + 1, least)):
        bits = _Bits()
        sets = [bits.of(_combinations(case, number)) for case in left]
        missing = functools.reduce(operator.or_, sets, 0) & ~bits.of(tuple(sorted(pair)) for pair in known)
        for case in chosen:
            missing &= ~bits.of(_combinations(case, number))
        while missing and len(chosen) < wanted:
            best = max(
                range(len(left)), key=lambda index: (sets[index] & missing).bit_count() / cost(left[index])
            )
            missing &= ~sets.pop(best)
            chosen.append(left.pop(best))
    return chosen


def covering_drawn(
    factors: Mapping[str, Sequence[str]],
    draw: Draw,
    *,
    seed: int,
    first: Sequence[Case] = (),
    least: int = 0,
    cost: Callable[[Case], float] = lambda _: 1.0,
) -> list[Case]:
    """Like `covering`, for a product too large to list: cases are drawn, with the options of each of `first`,
    then for missing pairs, the rare ones first, then without condition until there are `least`.

    A pair without a drawn case is considered impossible. Of candidates, the one with the most missing pairs
    for its cost is chosen.
    """
    rng, bits = random.Random(seed), _Bits()
    options = [(factor, option) for factor, found in factors.items() for option in found]
    pairs = sorted(tuple(sorted(pair)) for pair in combinations(options, 2) if pair[0][0] != pair[1][0])
    seen = Counter(pair for _ in range(_SAMPLE) for pair in _combinations(draw(rng, {}) or {}, 2))
    missing = bits.of(pairs)
    chosen: list[Case] = []

    def choose(wanted: Case) -> None:
        nonlocal missing
        found: list[Case] = []
        while len(found) < DRAWN_AT_ONCE and (case := draw(rng, wanted)) is not None:
            found.append(case)
        sets = [bits.of(_combinations(case, 2)) & missing for case in found]
        if found:
            best = max(range(len(found)), key=lambda index: sets[index].bit_count() / cost(found[index]))
            missing &= ~sets[best]
            chosen.append(found[best])

    for wanted in first:
        choose(wanted)
    for pair in sorted(pairs, key=lambda pair: seen[pair]):
        if missing & bits.of([pair]):
            choose(dict(pair))
    known = {frozenset(case.items()) for case in chosen}
    while len(chosen) < least:
        case = draw(rng, {})
        if case is not None and frozenset(case.items()) not in known:
            known.add(frozenset(case.items()))
            chosen.append(case)
    return chosen


def combined(case: Case, size: int) -> frozenset[Pair]:
    """All combinations of `size` options of a case."""
    return frozenset(map(frozenset, _combinations(case, size)))


def _combinations(case: Case, size: int) -> Iterator[_Options]:
    return combinations(sorted(case.items()), size)


class _Bits:
    """Sets of combinations as the bits of integers, which are compared faster."""

    def __init__(self) -> None:
        self._bits: dict[_Options, int] = {}

    def of(self, found: Iterable[_Options]) -> int:
        bits = self._bits
        return functools.reduce(operator.or_, (bits.setdefault(one, 1 << len(bits)) for one in found), 0)
