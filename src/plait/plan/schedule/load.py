"""A plan's schedule, by name or from a user's file, its stages and what ranks hold; derived schedules."""

import csv
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from plait.errors import ScheduleError
from plait.fileio import read_text
from plait.plan.schedule.action import FORWARD, WEIGHT, Action, B, F, Schedule
from plait.plan.schedule.generators import GENERATORS, make_schedule


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


@lru_cache(maxsize=256)
def stages_of(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage."""
    schedule = load_schedule(name, ranks, 0 if name.startswith(FILE) else 1, chunks)
    return tuple(schedule.rank_of[stage] for stage in range(schedule.num_stages))


@lru_cache(maxsize=256)
def stages_by_rank(name: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every rank, in model order."""
    of = stages_of(name, ranks, chunks)
    return tuple(tuple(stage for stage, at in enumerate(of) if at == rank) for rank in range(max(of) + 1))


Held = tuple[tuple[int, int], ...]  # see `in_flight`


def in_flight(name: str, ranks: int, micros: int, chunks: int, rank: int) -> tuple[Held, ...]:
    """Return what a rank holds at some moments, one of them its peak: for each of its stages, in model order,
    the micro-batches between forward and backward, and between backward and weight gradients."""
    if name in ("gpipe", "bfs"):  # all forwards come before the first backward
        return (((micros, 0),) * stages_of(name, ranks, chunks).count(rank),)
    return _in_flight(name, ranks, min(micros, 2 * ranks), chunks, rank)


@lru_cache(maxsize=1 << 12)
def _in_flight(name: str, ranks: int, micros: int, chunks: int, rank: int) -> tuple[Held, ...]:
    if name.startswith(FILE):
        return _largest(load_schedule(name, ranks, 0).ranks[rank])
    return _largest(GENERATORS[name].make(rank, ranks, micros, chunks))


def _largest(actions: Sequence[Action]) -> tuple[Held, ...]:
    """Return what a rank holds after its forwards, without moments that another one covers."""
    saved = dict.fromkeys(sorted({stage for _, stage, _ in actions}), 0)
    split = {(stage, micro) for kind, stage, micro in actions if kind is WEIGHT}
    deferred = dict(saved)
    found: list[Held] = []
    for kind, stage, micro in actions:
        if kind is FORWARD:
            saved[stage] += 1
            held = tuple((saved[of], deferred[of]) for of in saved)
            if not any(_covers(other, held) for other in found):
                found = [other for other in found if not _covers(held, other)] + [held]
        elif kind is WEIGHT:
            deferred[stage] -= 1
        else:
            saved[stage] -= 1
            deferred[stage] += (stage, micro) in split
    return tuple(found)


def _covers(one: Held, other: Held) -> bool:
    return all(a[0] >= b[0] and a[1] >= b[1] for a, b in zip(one, other, strict=True))
