"""Going on: from which checkpoint, and what becomes of those that it was not.

[Note: which checkpoint a run goes on from]
The newest that is whole. One that is damaged is told by name and reason, and the one before it is tried; when
none is whole the run ends with a letter that names them all. One of another model, data, optimizer or order
of samples ends it at once: an older one would be no better. A manifest is judged where it is opened, the rest
when the ranks have read it: reading everything twice would double the time of a start.

What a run has gone back behind would be its newest at the next start, and in the way of its saves. It is
renamed, never removed: `step-00000120.damaged` when an older one has loaded in its place, and `.aside` when
`--from` names an older one. The first rank decides what there is and renames it; file systems that hosts
share show the others the same a little later.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from plait.checkpoint import Checkpoint, is_damaged, open_checkpoint, open_together, step_of, steps
from plait.comm import World, raise_on_all, text_of
from plait.engine.engine import Engine
from plait.errors import CheckpointError, RunError
from plait.fileio import sync_folder, sync_tree

Check = Callable[[Checkpoint], None]  # raises CheckpointError unless it is one of this run


def find_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint with a manifest and files as it says; None where there is none at all. No tensor
    is read. Raises CheckpointError when all are damaged."""
    damaged = []
    for path in reversed(steps(folder)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            if not is_damaged(error):
                raise
            damaged.append(error)
    _check_any(damaged)
    return None


def load_newest(engine: Engine, folder: Path, check: Check) -> tuple[Checkpoint | None, list[str]]:
    """Takes over the newest checkpoint that is whole, None where there is none at all; and what was wrong
    with newer ones. Every rank must call it. Raises CheckpointError, on all of them alike."""
    world = engine.world
    names = [path.name for path in reversed(steps(folder))] if world.rank == 0 else []
    damaged: list[CheckpointError] = []
    for name in json.loads(text_of(0, json.dumps(names), world.group, world.device)):
        try:
            found = open_together(folder / name, world)
            check(found)
            with found.reader() as reader:
                engine.load_from(reader)
        except CheckpointError as error:
            if not is_damaged(error):
                raise
            damaged.append(error)
            continue
        newer = [folder / name for name in names if (step_of(folder / name) or 0) > found.step]
        _set_aside_together(newer, world)
        return found, [f"{error.fact}: {error.given}; it is now called .damaged" for error in damaged]
    _check_any(damaged)
    return None, []


def rewind(folder: Path, to: Path, check: Check) -> None:
    """Makes `to` the newest checkpoint in its run's folder. Raises CheckpointError and RunError, and has then
    changed nothing."""
    found = _whole(to, check)
    if to.resolve().parent != folder.resolve():
        raise RunError(
            "a run goes back to a checkpoint of its own",
            given=f"--from {to}",
            expected=f"one of those in {folder}",
            hint="without --resume and with another run.dir, a new run begins with it",
        )
    try:
        set_aside([path for path in steps(folder) if (step_of(path) or 0) > found.step], "aside")
    except OSError as error:
        raise RunError("later checkpoints cannot be renamed", given=f"{folder}: {error}") from error


def start_from(folder: Path, start: Path, check: Check) -> None:
    """Makes a folder of checkpoints with one in it, that of another run; on disk when it returns. Raises
    CheckpointError and OSError."""
    found = _whole(start, check)
    place = folder / found.path.name
    folder.mkdir()
    shutil.copytree(found.path, place, copy_function=_link)
    sync_tree(folder)


def set_aside(checkpoints: list[Path], word: str) -> None:
    """Renames them, so that nobody takes them for checkpoints, and nobody removes them. Raises OSError."""
    for path in checkpoints:
        place, number = path.with_name(f"{path.name}.{word}"), 1
        while place.exists():
            number += 1
            place = path.with_name(f"{path.name}.{word}-{number}")
        path.rename(place)
        sync_folder(path.parent)


def _whole(path: Path, check: Check) -> Checkpoint:
    """One that the user has named: read wholly, for nothing else would do in its place."""
    found = open_checkpoint(path.resolve())
    check(found)
    found.verify()
    return found


def _link(source: str, target: str) -> None:
    """Nobody writes into a file of a checkpoint: on one file system two runs can share it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _set_aside_together(damaged: list[Path], world: World) -> None:
    problem = None
    try:
        set_aside(damaged if world.rank == 0 else [], "damaged")
    except OSError as error:
        problem = CheckpointError("a damaged checkpoint cannot be renamed", given=error)
    raise_on_all(problem, world.group, world.device)


def _check_any(damaged: list[CheckpointError]) -> None:
    if damaged:
        raise CheckpointError(
            "no checkpoint of the run is whole",
            given="; ".join(str(error.given) for error in damaged),
            expected="one that is as it was written",
            hint="a copy of one from elsewhere; or begin anew, with another run.dir",
        )
