"""A plan's schedule, by name or from a user's file, and derived schedules over the same stages."""

import csv
from pathlib import Path

from plait.errors import ScheduleError
from plait.fileio import read_text
from plait.plan.schedule.action import Action, B, F, Schedule
from plait.plan.schedule.generators import make_schedule


def forwards_only(schedule: Schedule, micros: int) -> Schedule:
    """Forwards of `micros` micro-batches: each rank runs its stages in turn, all micro-batches of one stage
    first."""
    return Schedule.from_actions(
        "inference",
        (
            [F(stage, micro) for stage in schedule.stages_of(rank) for micro in range(micros)]
            for rank in range(schedule.num_ranks)
        ),
    )


def one_micro_batch(schedule: Schedule) -> Schedule:
    """Forward and backward of one micro-batch."""
    ranks: list[list[Action]] = []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        ranks.append([*(F(stage, 0) for stage in stages), *(B(stage, 0) for stage in reversed(stages))])
    return Schedule.from_actions("one micro-batch", ranks)


FILE = "file:"


def load_schedule(name: str, ranks: int, micros: int, chunks: int = 0) -> Schedule:
    """Like `make_schedule`; for `file:PATH`, read the CSV file.

    A file has to match `ranks` and `micros`; 0 accepts any. Not validated: see `check`. Raises ScheduleError.
    """
    if not name.startswith(FILE):
        return make_schedule(name, ranks, micros, chunks)
    path = Path(name.removeprefix(FILE))
    schedule = _read(path)
    for key, expected, actual, unit in (
        ("pp", ranks, schedule.num_ranks, "ranks"),
        ("micro", micros, schedule.num_micros, "micro-batches"),
    ):
        if expected not in (0, actual):
            raise ScheduleError(
                f"the schedule file is for a different number of {unit}",
                given=f"{path}: {actual} {unit}",
                expected=f"{expected} {unit}",
                hint=f"{key}={actual}, or another file",
            )
    return schedule


def _read(path: Path) -> Schedule:
    try:
        text = read_text(path)
    except OSError as error:
        raise ScheduleError(
            "the schedule file cannot be read",
            given=f"{path}: {error.strerror}",
            expected="a CSV file with one line per rank",
            hint="plait schedule 1f1b --pp 4 --micro 8 --csv FILE writes one",
        ) from error
    except UnicodeDecodeError as error:
        raise ScheduleError(
            "the schedule file is not UTF-8 text",
            given=f"{path}: {error}",
            expected="a CSV file with one line per rank",
            hint="plait schedule 1f1b --pp 4 --micro 8 --csv FILE writes one",
        ) from error
    try:
        return Schedule.from_csv(text, name=path.stem)
    except csv.Error as error:
        raise ScheduleError(
            "the schedule file is not CSV",
            given=f"{path}: {error}",
            expected="actions such as F0.3, separated by commas; one line per rank",
            hint="plait schedule 1f1b --pp 4 --micro 8 --csv FILE writes one",
        ) from error
