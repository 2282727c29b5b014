"""Covering sets: few cases of a large product of options in which every pair of options still meets."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations

Case = Mapping[str, str]  # a factor's name -> the option taken; a factor that does not apply is left out


def covering(cases: Sequence[Case], *, seed: int, least: int = 0) -> list[Case]:
    """A selection of `cases` with every pair of options that any of them has, in the order of choice.

    Greedy: always the case with the most pairs that are still missing, among equals the first of a seeded
    shuffle. When no pair is missing, goes on with triples until `least` cases are chosen.
    """
    left = [*cases]
    random.Random(seed).shuffle(left)
    chosen: list[Case] = []
    for size, wanted in ((2, len(cases)), (3, least)):
        tuples = [combined(case, size) for case in left]
        missing = set[frozenset[tuple[str, str]]]().union(*tuples)
        missing -= set[frozenset[tuple[str, str]]]().union(*(combined(case, size) for case in chosen))
        while missing and len(chosen) < wanted:
            best = max(range(len(left)), key=lambda index: len(tuples[index] & missing))
            missing -= tuples.pop(best)
            chosen.append(left.pop(best))
    return chosen


def combined(case: Case, size: int) -> frozenset[frozenset[tuple[str, str]]]:
    """All combinations of `size` options of a case."""
    return frozenset(map(frozenset, combinations(sorted(case.items()), size)))
