"""A folder of checkpoints: listing, atomic completion and retention.

    step-00000120                  a complete checkpoint
    step-00000140.tmp-5d1f...      one that is being written, or left by a killed save
    step-00000120.before-5d1f...   one that a save of the same step is about to replace
    step-00000120.damaged, .aside  one that a run has rolled back past; never read or removed
    .lock                          held by the process that saves into the folder
    best.json                      the best checkpoint by validation, if requested

[Note: atomic completion of a checkpoint]
All ranks write into `step-00000120.tmp-<random>` and sync their files to the disk; once each has listed what
it has written, rank 0 writes the manifest and syncs it and the directory; only then is the directory renamed,
which is atomic, and its parent synced. A process killed at any time leaves the earlier checkpoints unchanged,
and at most a `.tmp-` directory that is never read and that the next save removes. A step that is saved again
is renamed to `.before-` first, as a directory cannot replace another: the next process that lists the folder
and finds no such step restores its name.
"""

import contextlib
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plait.errors import CheckpointError
from plait.fileio import file_lock, read_json, sync_folder, write_json

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")
_BEFORE = re.compile(r"(step-\d{8,})\.before-[0-9a-f]+")
_BEST = "best.json"
_LOCK = ".lock"


@dataclass(frozen=True)
class Keep:
    """The checkpoints to retain: the newest `last`; with `every`, those of steps that it divides; with
    `best`, the one with the lowest score. Raises CheckpointError if none would be retained."""

    last: int = 2
    every: int = 0
    best: bool = False

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise CheckpointError(
                "saved checkpoints would not be kept",
                given=f"Keep(last={self.last}, every={self.every})",
                expected="last >= 1, every >= 0",
                hint="Keep(last=1)",
            )


def steps(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        if (match := _BEFORE.fullmatch(path.name)) and not (final := folder / match[1]).exists():
            with contextlib.suppress(OSError):  # another rank was faster
                path.rename(final)
                paths.append(final)
    numbered = [(step, path) for path in paths if (step := step_of(path)) is not None]
    return [path for _, path in sorted(numbered)]


def step_of(checkpoint: Path) -> int | None:
    """The step in the checkpoint's name, None if there is none."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


@contextlib.contextmanager
def save_lock(folder: Path) -> Iterator[None]:
    """Lock the folder against other jobs' saves. Raises CheckpointError if one holds the lock, OSError."""
    try:
        with file_lock(folder / _LOCK):
            yield
    except BlockingIOError as error:
        raise CheckpointError(
            "another job saves into this folder",
            given=folder,
            expected="one job to a run",
            hint="end the other one; it may have lost its network without having noticed",
        ) from error


def commit(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its final name, and remove the one that had it. Raises OSError."""
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
    """Remove the directories that killed saves have left."""
    steps(folder)  # restores the names of checkpoints that were not replaced
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name) or _BEFORE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def best(folder: Path) -> tuple[int, float] | None:
    """(step, score) of the best checkpoint in a folder, None if none is recorded."""
    try:
        record = read_json(folder / _BEST)
        return int(record["step"]), float(record["score"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def record_score(folder: Path, step: int, score: float) -> None:
    """Record the checkpoint if it is the best so far, or the best one was removed. Raises OSError."""
    known = best(folder)
    if known is None or score < known[1] or known[0] == step or not step_path(folder, known[0]).exists():
        write_json(folder / _BEST, {"step": step, "score": score})


def prune(folder: Path, keep: Keep) -> None:
    """Remove all checkpoints except those to retain."""
    known = best(folder) if keep.best else None
    for path in steps(folder)[: -keep.last]:
        step = step_of(path)
        if not (keep.every and step is not None and step % keep.every == 0) and (
            known is None or step != known[0]
        ):
            _remove(path)


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, the last one first."""
    for path in reversed(steps(folder)):
        if (step_of(path) or 0) > step:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Rename, then remove, so that a killed removal leaves no partial checkpoint under its name.

    A failure only costs disk space, so it is a warning.
    """
    doomed = checkpoint.with_name(f"{checkpoint.name}.tmp-{secrets.token_hex(6)}")
    try:
        checkpoint.rename(doomed)
    except OSError as error:
        warnings.warn(f"an old checkpoint cannot be removed: {error}", stacklevel=3)
        return
    shutil.rmtree(doomed, ignore_errors=True)
