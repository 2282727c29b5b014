"""Covering sets: a few cases of a large product of options that still cover every pair of options."""

import random
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import combinations

Case = Mapping[str, str]  # factor -> option; without factors that do not apply
Pair = frozenset[tuple[str, str]]  # two options, or more
Draw = Callable[[random.Random, Case], Case | None]  # a random case with the given options, or None

DRAWN_AT_ONCE = 12  # candidates per choice


def covering(
    cases: Sequence[Case], *, seed: int, least: int = 0, known: Set[Pair] = frozenset()
) -> list[Case]:
    """Select `cases` that cover every pair of options of any of them, in the order of choice. `known` pairs
    are covered elsewhere.

    Greedy: always the case with the most missing pairs, ties by a seeded shuffle. Once no pair is missing,
    continues with triples until `least` cases are chosen.
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
    """Like `covering`, for a product too large to list: cases are drawn for missing pairs.

    A pair without a drawn case is considered impossible.
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
