"""A folder of checkpoints: which there are, how one becomes complete, which are kept.

    step-00000120                  a checkpoint, whole
    step-00000140.tmp-5d1f...      one that is being written, or what a killed save has left
    step-00000120.before-5d1f...   the one that a save of the same step is about to replace
    step-00000120.damaged, .aside  what a run has gone back behind; nobody reads or removes it
    .lock                          held by whoever saves into the folder
    best.json                      which was best by validation, where that is asked for

[Note: how a checkpoint becomes complete]
All ranks write into `step-00000120.tmp-<random>` and sync their files to the disk; when each has said what it
has written, the first rank writes the manifest and syncs it and the directory; only then is this renamed,
which the file system does wholly or not at all, and its parent synced. A process killed at any instant leaves
the earlier checkpoints as they were, and at most a `.tmp-` directory that nobody reads and the next save
removes. A step that is saved again is renamed to `.before-` first, as a directory cannot replace one: whoever
next looks into the folder and finds no such step gives that its name back.
"""

import contextlib
import json
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plait.errors import CheckpointError
from plait.fileio import file_lock, sync_folder, write_json

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")
_BEFORE = re.compile(r"(step-\d{8,})\.before-[0-9a-f]+")
_BEST = "best.json"
_LOCK = ".lock"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest `last`; with `every`, those of steps that it divides; with `best`,
    the one with the lowest score. Raises CheckpointError where nothing would stay."""

    last: int = 2
    every: int = 0
    best: bool = False

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise CheckpointError(
                "what has been saved would not be kept",
                given=f"Keep(last={self.last}, every={self.every})",
                expected="last from 1, every from 0",
            )


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first. Half-written ones are not among them."""
    found = list(folder.iterdir()) if folder.is_dir() else []
    for path in found:
        if (match := _BEFORE.fullmatch(path.name)) and not (final := folder / match[1]).exists():
            with contextlib.suppress(OSError):  # another rank was faster
                path.rename(final)
                found.append(final)
    numbered = [(step, path) for path in found if (step := step_of(path)) is not None]
    return [path for _, path in sorted(numbered)]


def step_of(checkpoint: Path) -> int | None:
    """By its name."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


@contextlib.contextmanager
def saving_alone(folder: Path) -> Iterator[None]:
    """While entered, nobody else saves into the folder. Raises CheckpointError when somebody does,
    OSError."""
    try:
        with file_lock(folder / _LOCK):
            yield
    except BlockingIOError as error:
        raise CheckpointError(
            "another job saves into this folder",
            given=folder,
            expected="one job to a run",
            hint="end the other one; it may have lost its network and not know it yet",
        ) from error


def put_in_place(partial: Path, final: Path) -> None:
    """Gives a complete checkpoint its name; what had it before goes. Raises OSError."""
    old = final.with_name(f"{final.name}.before-{secrets.token_hex(6)}") if final.exists() else None
    try:
        if old is not None:
            final.rename(old)
        partial.rename(final)
    except OSError:
        if old is not None and old.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Removes what saves that were killed have left."""
    steps(folder)  # what was to be replaced, and was not, has its name back
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name) or _BEFORE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def best(folder: Path) -> tuple[int, float] | None:
    """(step, score) of the best checkpoint in a folder, where one was noted."""
    try:
        found = json.loads((folder / _BEST).read_text(encoding="utf-8"))
        return int(found["step"]), float(found["score"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def note_score(folder: Path, step: int, score: float) -> None:
    """Remembers the checkpoint if it is the best so far, or the one that was is no more. Raises OSError."""
    known = best(folder)
    if known is None or score < known[1] or known[0] == step or not place_of(folder, known[0]).exists():
        write_json(folder / _BEST, {"step": step, "score": score})


def prune(folder: Path, keep: Keep) -> None:
    """Removes all but those that are kept."""
    known = best(folder) if keep.best else None
    for path in steps(folder)[: -keep.last]:
        step = step_of(path)
        if not (keep.every and step is not None and step % keep.every == 0) and (
            known is None or step != known[0]
        ):
            _remove(path)


def remove_after(folder: Path, step: int) -> None:
    """Removes the checkpoints of later steps, the last one first."""
    for path in reversed(steps(folder)):
        if (step_of(path) or 0) > step:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Renamed first: a removal that is killed half-way leaves no half of a checkpoint under its name.

    One that stays costs disk and nothing else: no reason to end a run.
    """
    doomed = checkpoint.with_name(f"{checkpoint.name}.tmp-{secrets.token_hex(6)}")
    try:
        checkpoint.rename(doomed)
    except OSError as error:
        warnings.warn(f"an old checkpoint cannot be removed: {error}", stacklevel=3)
        return
    shutil.rmtree(doomed, ignore_errors=True)
