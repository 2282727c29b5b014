"""Plans that combine all parallelisms: a product of options too large to list, and covering sets of it."""

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from plait.errors import ScheduleError
from plait.plan.schedule import GENERATORS
from support import pipeline_plans, programs
from support.covering import Case, Pair, combined, covering_drawn

FACTORS = {
    factor: options.split()
    for factor, options in {
        "pp": "1 2 3 4",
        "dp": "1 2 3 4",
        "tp": "1 2 3 4 2x1 2x2",
        "sp": "false true",
        "schedule": "gpipe 1f1b interleaved bfs zb-h1 zbv dualpipev file",
        "chunks": "1 2",
        "zero": "0 1 2 3",
        "shard": "all half one",  # one copy over all data ranks, two copies, or one per rank
        "accumulate": "unsharded sharded",
        "prefetch": "0 1 2",
        "reshard": "use step",
        "algorithm": "auto naive ring halving tree two-level",
        "offload": "none cpu disk",
        "recompute": "none full selective every=2",
        "micro": "1 2 3 4",
        "loss": "own given",
        "transport": "host gloo",
        "model": "llama tied_llama gpt2",
    }.items()
}
OF_THE_PLAN = (
    *("pp", "dp", "tp", "sp", "zero", "accumulate", "prefetch", "reshard"),
    *("algorithm", "offload", "recompute", "micro"),
)
LEAST_RANKS, MOST_RANKS = 2, 8
SEED, NUM_SAMPLED = 41, 600
ALL_STRANDS = 8 * [{"pp": "2", "dp": "2", "tp": tp} for tp in ("2", "2x1", "2")]
_MORE_OFTEN = 8  # weight of shapes with pp, dp and tp > 1 in random draws
_TRIES = 150  # random draws until a pair of options is considered impossible


@functools.cache
def few_cases() -> tuple[Case, ...]:
    """Cases that cover every pair of options, first those with pp, dp and tp at once."""
    return tuple(covering_drawn(FACTORS, draw, seed=SEED, first=ALL_STRANDS, cost=_cost))


@functools.cache
def many_cases() -> tuple[Case, ...]:
    """Other cases, from another seed."""
    few = {name_of(case) for case in few_cases()}
    drawn = covering_drawn(FACTORS, draw, seed=SEED + 1, least=NUM_SAMPLED)
    return tuple(case for case in drawn if name_of(case) not in few)


def pairs_in(factors: Mapping[str, str], seen: Callable[[Case], Case] = dict) -> frozenset[Pair]:
    """Pairs of another product's options in the few cases; `seen` maps a case to that product."""
    options = {factor: text.split() for factor, text in factors.items()}
    views = [{k: v for k, v in seen(case).items() if v in options.get(k, ())} for case in few_cases()]
    return frozenset().union(*(combined(view, 2) for view in views))


def draw(rng: random.Random, wanted: Case) -> Case | None:
    """Draw a random case with the options `wanted`; None if none is found."""
    shapes = [shape for shape in _shapes() if wanted.items() <= {**wanted, **shape}.items()]
    for _ in range(_TRIES if shapes else 0):
        drawn = {factor: rng.choice(options) for factor, options in FACTORS.items()}
        case = _applying({**drawn, **wanted, **rng.choice(shapes)})
        if case is not None and wanted.items() <= case.items():
            return case
    return None


@functools.cache
def _shapes() -> list[Case]:
    shapes = [
        dict(zip(("pp", "dp", "tp"), s, strict=True))
        for s in product(*(FACTORS[axis] for axis in ("pp", "dp", "tp")))
    ]
    possible = [shape for shape in shapes if LEAST_RANKS <= num_ranks(shape) <= MOST_RANKS]
    return possible + _MORE_OFTEN * [shape for shape in possible if "1" not in shape.values()]


def _applying(case: Case) -> Case | None:
    """Drop factors that do not apply; None if options exclude each other."""
    zero, dp = int(case["zero"]), int(case["dp"])
    if case["schedule"] != "file":
        try:
            GENERATORS[case["schedule"]].chunks_for(case["schedule"], int(case["chunks"]))
        except ScheduleError:
            return None
    if case["shard"] == "half" and dp != 4:
        return None
    left_out = {
        "sp": case["tp"] == "1" or case["tp"].endswith("x1"),
        "shard": zero == 0 or dp == 1,
        "accumulate": zero < 2,
        "prefetch": zero < 3,
        "reshard": zero < 3,
        "algorithm": dp == 1,
    }
    return {factor: option for factor, option in case.items() if not left_out.get(factor)}


def _cost(case: Case) -> float:
    """Root of the processor time, roughly: of each rank's engine and of its micro-batches; Gloo takes twice
    as much. Of the time itself, nearly all cases would have one micro-batch."""
    of_a_rank = 3 + int(case["micro"]) * num_layers(case) / int(case["pp"])
    return math.sqrt(num_ranks(case) * of_a_rank * (2 if case["transport"] == "gloo" else 1))


def num_ranks(case: Case) -> int:
    rows, _, cols = case["tp"].rpartition("x")
    return int(case["pp"]) * int(case["dp"]) * int(rows or 1) * int(cols)


def plan_of(case: Case, folder: Path) -> str:
    """Text of the plan. A random schedule is written into the folder."""
    schedule = pipeline_plans.schedule_words(case, folder)
    words = " ".join(f"{key}={case[key]}" for key in OF_THE_PLAN if key in case)
    shard = {"half": " shard=2", "one": " shard=1"}.get(case.get("shard", "all"), "")
    return f"{words}{shard} {schedule} precision=fp64"


def task_of(case: Case, folder: Path) -> programs.Task:
    sequences = 2 * int(case["dp"]) * int(case["micro"])
    task = pipeline_plans.task(case["model"], num_layers(case), sequences)
    disk = str(folder) if case["offload"] == "disk" else None
    return replace(task, own_loss=case["loss"] == "own", offload_dir=disk)


def num_layers(case: Case) -> int:
    """One block more than stages, so that stages differ in depth."""
    return int(case["pp"]) * int(case["chunks"]) + 1


def name_of(case: Case) -> str:
    return "-".join(f"{key}={option}" for key, option in case.items())
