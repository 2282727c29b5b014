"""Pipeline plans that are compared with one process: products of their options, and covering sets.

A model has one block more than stages, so that stages differ in depth.
"""

import functools
import random
from collections.abc import Set
from itertools import product
from pathlib import Path
from typing import Any

from plait.errors import ScheduleError
from plait.plan.schedule import GENERATORS
from support import pipeline_models, programs
from support.covering import Case, Pair, covering
from support.schedules import random_schedule

FACTORS = {
    "schedule": "gpipe 1f1b interleaved bfs zb-h1 zbv dualpipev file",
    "pp": "1 2 3 4",
    "micro": "1 2 3 4 7 8",
    "chunks": "1 2",
    "recompute": "none full",
    "model": " ".join(pipeline_models.MODELS),
}
SEED = 29
DATA_FACTORS = {
    "schedule": "gpipe 1f1b interleaved bfs zb-h1 zbv dualpipev",
    "zero": "0 1 2 3",
    "shard": "all one",  # one copy over both data ranks, or one on each
    "accumulate": "unsharded sharded",
    "offload": "none cpu",
    "recompute": "none full",
    "transport": "host gloo",
    "model": " ".join(pipeline_models.MODELS),
}
NUM_DATA_SAMPLED = 400
DATA_MICRO = 3
STEPS, SEQUENCES_EACH, LENGTH = 2, 2, 6


def all_cases() -> list[Case]:
    cases = (
        dict(zip(FACTORS, options, strict=True)) for options in product(*map(str.split, FACTORS.values()))
    )
    return [case for case in cases if _exists(case)]


def few_cases(known: Set[Pair]) -> list[Case]:
    """Cases that cover every pair of options that is not `known`."""
    return covering(all_cases(), seed=SEED, known=known)


def all_data_cases() -> list[Case]:
    """Cases on two data ranks and two pipeline ranks, with the factors that apply."""
    found = {}
    for options in product(*map(str.split, DATA_FACTORS.values())):
        case = dict(zip(DATA_FACTORS, options, strict=True))
        if case["zero"] == "0":
            del case["shard"]
        if case["zero"] in "01":
            del case["accumulate"]
        found[name_of(case)] = case
    return [*found.values()]


def few_data_cases(known: Set[Pair]) -> list[Case]:
    return covering(all_data_cases(), seed=SEED, known=known)


def many_data_cases() -> list[Case]:
    """A sample: all cases would take an hour more."""
    return random.Random(SEED).sample(all_data_cases(), NUM_DATA_SAMPLED)


def data_plan_of(case: Case) -> str:
    keys = ("schedule", "zero", "accumulate", "offload", "recompute")
    words = " ".join(f"{key}={case[key]}" for key in keys if key in case)
    shard = " shard=1" if case.get("shard") == "one" else ""
    return f"pp=2 dp=2 {words}{shard} micro={DATA_MICRO} precision=fp64"


def plan_of(case: Case, folder: Path) -> str:
    """Text of the plan; see `schedule_words`."""
    words = " ".join(f"{key}={case[key]}" for key in ("pp", "micro", "recompute"))
    return f"{words} {schedule_words(case, folder)} precision=fp64"


def schedule_words(case: Case, folder: Path) -> str:
    """A plan's keys for the schedule. A random one is written into the folder."""
    if case["schedule"] != "file":
        return f"schedule={case['schedule']} chunks={case['chunks']}"
    numbers = [int(case[key]) for key in ("pp", "micro", "chunks")]
    path = folder / "schedule.csv"
    path.write_text(random_schedule(random.Random(str(numbers)), *numbers).to_csv())
    return f"schedule=file:{path}"


def task_of(case: Case) -> programs.Task:
    layers = int(case["pp"]) * int(case["chunks"]) + 1
    return task(case["model"], layers, SEQUENCES_EACH * int(case["micro"]))


def task(model: str, layers: int, sequences: int, steps: int = STEPS) -> programs.Task:
    """Task of a model with `layers` blocks and global batches of `sequences`."""
    return programs.Task(
        build_of(model, layers),
        functools.partial(programs.batches, sequences=sequences, length=LENGTH),
        steps=steps,
    )


def build_of(model: str, layers: int) -> Any:
    return functools.partial(getattr(pipeline_models, model), layers=layers)


def name_of(case: Case) -> str:
    return "-".join(f"{key}={option}" for key, option in case.items())


def _exists(case: Case) -> bool:
    if case["schedule"] == "file":
        return True
    try:
        GENERATORS[case["schedule"]].chunks_for(case["schedule"], int(case["chunks"]))
    except ScheduleError:
        return False
    return True
