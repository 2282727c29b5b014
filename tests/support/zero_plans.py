"""Plans of the ZeRO tests: the full product of options, and a covering set of it."""

from collections.abc import Set
from itertools import product

from plait.errors import PlanError
from plait.plan import Plan
from support.covering import Case, Pair, covering

FACTORS = {
    "dp": "1 2 3 4",
    "zero": "0 1 2 3",
    "shard": "whole half",  # of dp; whole is the default
    "micro": "1 many",  # see MANY
    "recompute": "none full",
    "accumulate": "unsharded sharded",
    "prefetch": "0 2",
    "reshard": "use step",
    "transport": "host gloo",
    "build": "llama tied_llama branches",
}
NOT_OF_THE_PLAN = ("build", "shard", "transport")
MANY = {1: 3, 2: 3, 3: 4, 4: 3}  # micro-batches by dp: dp x micro divides the sequences of a step
STAGE_3_ONLY = ("prefetch", "reshard")
SEED = 17


def all_cases() -> list[Case]:
    """All valid cases, with the factors that apply."""
    found = {}
    for options in product(*(text.split() for text in FACTORS.values())):
        case = dict(zip(FACTORS, options, strict=True))
        if case["zero"] != "3":
            case = {key: option for key, option in case.items() if key not in STAGE_3_ONLY}
        if case["zero"] == "0":
            del case["shard"]
        if case["dp"] == "1":
            del case["transport"]
        if case.get("shard") == "half" and int(case["dp"]) % 2:
            continue
        try:
            Plan.parse(plan_of(case))
        except PlanError:
            continue
        found[name_of(case)] = case
    return [*found.values()]


def few_cases(known: Set[Pair] = frozenset()) -> list[Case]:
    """Cases that cover every pair of options that is not `known`."""
    return covering(all_cases(), seed=SEED, known=known)


def seen_in(hybrid: Case) -> Case:
    """Map a case of the hybrid plans to the factors used here."""
    found = {**hybrid, "build": hybrid["model"], "micro": "1" if hybrid["micro"] == "1" else "many"}
    if "shard" in found:
        copies = "2" if found["shard"] == "half" else found["dp"] if found["shard"] == "one" else "1"
        found["shard"] = {"1": "whole", "2": "half"}.get(copies, "")
    return found


def plan_of(case: Case) -> str:
    """Text of the plan, in float64."""
    words = {key: option for key, option in case.items() if key not in NOT_OF_THE_PLAN}
    words["micro"] = str(_micro(case))
    if case.get("shard") == "half":
        words["shard"] = str(int(case["dp"]) // 2)
    return " ".join(f"{key}={value}" for key, value in words.items()) + " precision=fp64"


def name_of(case: Case) -> str:
    return "-".join(f"{key}={option}" for key, option in case.items())


def micros_of(case: Case) -> int:
    """Number of micro-batches in a step, over all data ranks."""
    return int(case["dp"]) * _micro(case)


def _micro(case: Case) -> int:
    return MANY[int(case["dp"])] if case["micro"] == "many" else 1
