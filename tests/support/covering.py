"""Covering sets: few cases of a large product of options in which every pair of options still meets."""

import random
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import combinations

Case = Mapping[str, str]  # a factor's name -> the option taken; a factor that does not apply is left out
Pair = frozenset[tuple[str, str]]  # two options, or more
Draw = Callable[[random.Random, Case], Case | None]  # a random case with the options given, if there is one

DRAWN_AT_ONCE = 12  # cases of which the best is taken


def covering(
    cases: Sequence[Case], *, seed: int, least: int = 0, known: Set[Pair] = frozenset()
) -> list[Case]:
    """A selection of `cases` with every pair of options that any of them has, in the order of choice. Pairs
    that are `known` are shown elsewhere.

    Greedy: always the case with the most pairs that are still missing, among equals the first of a seeded
    shuffle. When no pair is missing, goes on with triples until `least` cases are chosen.
    """
    left = [*cases]
    random.Random(seed).shuffle(left)
    chosen: list[Case] = []
    for size, wanted in ((2, len(cases)), (3, least)):
        tuples = [combined(case, size) for case in left]
        missing = set[Pair]().union(*tuples) - known
        missing -= set[Pair]().union(*(combined(case, size) for case in chosen))
        while missing and len(chosen) < wanted:
            best = max(range(len(left)), key=lambda index: len(tuples[index] & missing))
            missing -= tuples.pop(best)
            chosen.append(left.pop(best))
    return chosen


def covering_drawn(factors: Mapping[str, Sequence[str]], draw: Draw, *, seed: int, least: int) -> list[Case]:
    """As `covering`, of a product too large to be listed: cases are drawn for pairs that are still missing.

    A pair for which nothing can be drawn is one that no case has.
    """
    rng = random.Random(seed)
    options = [(factor, option) for factor, found in factors.items() for option in found]
    missing = {frozenset(pair) for pair in combinations(options, 2) if pair[0][0] != pair[1][0]}
    chosen: list[Case] = []
    for pair in sorted(missing, key=sorted):
        if pair in missing:
            found = [case for _ in range(DRAWN_AT_ONCE) if (case := draw(rng, dict(pair))) is not None]
            if found:
                chosen.append(max(found, key=lambda case: len(combined(case, 2) & missing)))
                missing -= combined(chosen[-1], 2)
    known = {frozenset(case.items()) for case in chosen}
    while len(chosen) < least:
        case = draw(rng, {})
        if case is not None and frozenset(case.items()) not in known:
            known.add(frozenset(case.items()))
            chosen.append(case)
    return chosen


def combined(case: Case, size: int) -> frozenset[Pair]:
    """All combinations of `size` options of a case."""
    return frozenset(map(frozenset, combinations(sorted(case.items()), size)))
