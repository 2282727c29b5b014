"""Where a plan's schedule comes from: a name that plait knows, or the user's file.

Schedules over the stages of another schedule, where its ranks have them.
"""

import csv
from pathlib import Path

from plait.errors import ScheduleError
from plait.plan.schedule.action import Action, B, F, Schedule
from plait.plan.schedule.generators import make_schedule


def forwards_only(schedule: Schedule, micros: int) -> Schedule:
    """Forwards of so many micro-batches: each rank takes its stages in turn, all micro-batches of one."""
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
    """As `make_schedule`, and for `file:PATH` what the CSV file says.

    With a file, `ranks` and `micros` are what it has to have; 0: whatever it has. Not checked: see `check`.
    Raises ScheduleError.
    """
    if not name.startswith(FILE):
        return make_schedule(name, ranks, micros, chunks)
    path = Path(name.removeprefix(FILE))
    schedule = _read(path)
    for asked, there, words in (
        (ranks, schedule.num_ranks, "ranks"),
        (micros, schedule.num_micros, "micro-batches"),
    ):
        if asked not in (0, there):
            raise ScheduleError(
                f"the schedule's file is for other {words}",
                given=f"{path}: {there} {words}",
                expected=f"{asked} {words}",
            )
    return schedule


def _read(path: Path) -> Schedule:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError("the schedule cannot be read", given=f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError("the schedule is no text", given=f"{path}: {error}") from error
    try:
        return Schedule.from_csv(text, name=path.stem)
    except csv.Error as error:
        raise ScheduleError("the schedule is no CSV", given=f"{path}: {error}") from error
