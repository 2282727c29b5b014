"""Plans of the tensor parallelism tests on full models: the product of options, and a covering set."""

import random
from collections.abc import Set
from itertools import product

from support import hf_models
from support.covering import Case, Pair, covering

FACTORS = {
    "family": " ".join(hf_models.CONFIGS),
    "tp": "2 3 4 2x1 2x2",
    "sp": "false true",
    "data": "alone zero0 zero1 zero2 zero3",  # with dp=2, except alone
    "loss": "own given",
    "recompute": "none full",
}
SEED, NUM_SAMPLED = 23, 500


def all_cases() -> list[Case]:
    found = []
    for options in product(*(text.split() for text in FACTORS.values())):
        case = dict(zip(FACTORS, options, strict=True))
        if case["sp"] == "true" and case["tp"].endswith("x1"):
            continue
        if case["family"] in hf_models.WITH_EXPERTS and "x" in case["tp"]:
            continue
        if num_ranks(case) > 8:
            continue
        found.append(case)
    return found


def few_cases(known: Set[Pair]) -> list[Case]:
    """Cases on few ranks that cover every pair of options that is neither `known` nor left to the sweep.

    Two columns are left to it: their layouts are those of four and of 2x2 with fewer ranges. So are, with a
    family, ZeRO's stages but for the last: they see the flat parameters of units, whatever the layers.
    """
    cases = [case for case in all_cases() if case["tp"] != "2"]
    stages = {("data", f"zero{stage}") for stage in range(3)}
    in_sweep = {frozenset({("family", family), stage}) for family in hf_models.CONFIGS for stage in stages}
    return covering(cases, seed=SEED, known=known | in_sweep, cost=num_ranks)


def seen_in(hybrid: Case) -> Case:
    """Map a case of the hybrid plans to the factors used here."""
    data = "alone" if hybrid["dp"] == "1" else f"zero{hybrid['zero']}"
    return {**hybrid, "family": hybrid["model"], "data": data}


def many_cases(known: Set[Pair]) -> list[Case]:
    """Cases that cover every pair that is not `known`, and a sample: all cases would take hours."""
    pairs = covering(all_cases(), seed=SEED, known=known)
    sampled = random.Random(SEED).sample(all_cases(), NUM_SAMPLED)
    return list({name_of(case): case for case in (*pairs, *sampled)}.values())


def plan_of(case: Case) -> str:
    words = [f"tp={case['tp']} recompute={case['recompute']}"]
    if case["sp"] == "true":
        words.append("sp=true")
    if case["data"] != "alone":
        words.append(f"dp=2 zero={case['data'][-1]}")
    return " ".join([*words, "precision=fp64"])


def num_ranks(case: Case) -> int:
    rows, _, cols = case["tp"].rpartition("x")
    return int(rows or 1) * int(cols) * (1 if case["data"] == "alone" else 2)


def name_of(case: Case) -> str:
    return "-".join(f"{key}={option}" for key, option in case.items())
