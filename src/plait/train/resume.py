"""Resume a run: choose the checkpoint, and set the others aside.

[Note: checkpoint choice on resume]
The newest intact checkpoint is loaded. A damaged one is reported with its name and the reason, and the one
before it is tried; if none is intact, the run ends with an error that names them all. A checkpoint of another
model, data, optimizer or sample order ends the run at once: an older one would be no better. A manifest is
checked when it is opened, the rest when the ranks have read it: reading everything twice would double the
time to start.

Checkpoints newer than the loaded one would be the newest at the next start, and in the way of its saves. They
are renamed, never removed: `step-00000120.damaged` when an older one was loaded instead, and `.aside` when
`--from` names an older one. Rank 0 lists and renames them; on shared file systems the other hosts see it a
little later.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from plait.checkpoint import Checkpoint, is_damaged, open_checkpoint, step_of, steps
from plait.checkpoint.checkpoint import open_on_all_ranks
from plait.comm import broadcast_text, raise_on_all
from plait.engine.engine import Engine
from plait.errors import CheckpointError, RunError
from plait.fileio import WRITABLE, disk_hint, sync_folder, sync_tree, writing

Check = Callable[[Checkpoint], None]  # raises CheckpointError unless the checkpoint belongs to this run


def find_newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint with a valid manifest and its files; None if there is none at all.

    Reads no tensors. Raises CheckpointError if all are damaged.
    """
    damaged = []
    for path in reversed(steps(folder)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            if not is_damaged(error):
                raise
            damaged.append(error)
    _check_none_damaged(damaged)
    return None


def load_newest(engine: Engine, folder: Path, check: Check) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest intact checkpoint into the engine.

    Returns it (None if there is none at all) and warnings about newer, damaged ones. Collective. Raises
    CheckpointError on all ranks.
    """
    world = engine.world
    names = [path.name for path in reversed(steps(folder))] if world.rank == 0 else []
    damaged: list[CheckpointError] = []
    for name in json.loads(broadcast_text(0, json.dumps(names), world.group, world.device)):
        try:
            saved = open_on_all_ranks(folder / name, world)
            check(saved)
            with saved.reader() as reader:
                engine.load_from(reader, options=False)  # the recipe's
        except CheckpointError as error:
            if not is_damaged(error):
                raise
            damaged.append(error)
            continue
        problem = None
        try:
            set_aside(_newer(folder, saved) if world.rank == 0 else [], "damaged")
        except OSError as error:
            problem = CheckpointError(
                "cannot rename a damaged checkpoint", given=error, expected=WRITABLE, hint=disk_hint(folder)
            )
        raise_on_all(problem, world.group, world.device)
        return saved, [f"{error.fact}: {error.given}; renamed to .damaged" for error in damaged]
    _check_none_damaged(damaged)
    return None, []


def rewind(folder: Path, to: Path, check: Check) -> None:
    """Make `to` the newest checkpoint of its run, renaming later ones.

    Raises CheckpointError and RunError, and has then changed nothing.
    """
    saved = _verified(to, check)
    if to.resolve().parent != folder.resolve():
        raise RunError(
            "a run can rewind only to its own checkpoints",
            given=f"--from {to}",
            expected=f"a checkpoint in {folder}",
            hint="without --resume and with another run.dir, a new run starts from it",
        )
    with writing("cannot rename later checkpoints", folder):
        set_aside(_newer(folder, saved), "aside")


def start_from(folder: Path, start: Path, check: Check) -> None:
    """Create the checkpoint folder of a new run with another run's checkpoint in it; durable on return.

    Raises CheckpointError and OSError.
    """
    saved = _verified(start, check)
    target = folder / saved.path.name
    folder.mkdir()
    shutil.copytree(saved.path, target, copy_function=_link)
    sync_tree(folder)


def set_aside(checkpoints: list[Path], suffix: str) -> None:
    """Rename checkpoints so that they are neither loaded nor removed. Raises OSError."""
    for path in checkpoints:
        target, number = path.with_name(f"{path.name}.{suffix}"), 1
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}.{suffix}-{number}")
        path.rename(target)
        sync_folder(path.parent)


def _verified(path: Path, check: Check) -> Checkpoint:
    """Open a checkpoint named by the user and verify all of it: there is no other to fall back to."""
    saved = open_checkpoint(path.resolve())
    check(saved)
    saved.verify()
    return saved


def _link(source: str, target: str) -> None:
    """Hard-link if possible: checkpoint files are never modified, so two runs can share them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _newer(folder: Path, saved: Checkpoint) -> list[Path]:
    return [path for path in steps(folder) if (step_of(path) or 0) > saved.step]


def _check_none_damaged(damaged: list[CheckpointError]) -> None:
    if damaged:
        raise CheckpointError(
            "all checkpoints of the run are damaged",
            given="; ".join(str(error.given) for error in damaged),
            expected="at least one intact checkpoint",
            hint="restore one from a backup, or start a new run with another run.dir",
        )
