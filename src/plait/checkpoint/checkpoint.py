"""An existing checkpoint: its step, facts and tensors."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.directory import step_of, steps
from plait.checkpoint.manifest import DAMAGED, MANIFEST, Manifest, damage, read_error, read_manifest
from plait.checkpoint.reader import Reader
from plait.comm import World, raise_on_all
from plait.errors import CheckpointError

_NOT_A_CHECKPOINT = "not a checkpoint"
_MAX_THREADS = 8


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is valid and whose files exist. All data read from them is verified."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    def check_same(self, fact: str, value: object) -> None:
        """Raise CheckpointError unless the run that saved this had `value` for `fact`."""
        if (saved := self.facts.get(fact)) != json.loads(json.dumps(value)):
            what = "order of samples" if fact == "samples" else fact
            raise CheckpointError(
                f"the checkpoint is of another {what}",
                given=f"{self.path}: {_difference(saved, value)}",
                expected=f"the {what} of this run",
                hint="resume with the recipe that it was saved with, or choose another run.dir",
            )

    def reader(self) -> Reader:
        """Return a reader of its tensors, under any plan."""
        return Reader(self.path, self.manifest)

    def read(self, only: str | tuple[str, ...] = "") -> dict[str, Tensor]:
        """Read the full tensors whose keys begin with `only`, on the CPU. Raises CheckpointError."""
        with self.reader() as reader:
            tensors = {key: reader.read_full(key) for key in self.manifest.tensors if key.startswith(only)}
            reader.finish()
        return tensors

    def verify(self) -> None:
        """Read every byte. Raises CheckpointError, which names the damaged file."""
        if extra := sorted({path.name for path in self.path.iterdir()} - {MANIFEST, *self.manifest.files}):
            raise damage(self.path / extra[0], "not in the manifest")
        with (
            self.reader() as reader,
            ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool,
        ):
            list(pool.map(reader.check_header, range(len(self.manifest.files))))
            chunks = ((key, chunk) for key, facts in self.manifest.tensors.items() for chunk in facts.chunks)
            list(pool.map(lambda key_chunk: reader.check(*key_chunk), chunks))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check the manifest, and that its files exist. Raises CheckpointError."""
    try:
        exists, is_folder = path.exists(), path.is_dir() and not path.is_symlink()
        inside = steps(path) if is_folder and not (path / MANIFEST).exists() else []
    except OSError as error:
        raise read_error(path, error) from error
    if not is_folder or inside:
        given = path if is_folder else f"{path}, {'not a directory' if exists else 'which does not exist'}"
        hint = inside[-1] if inside else None
        raise CheckpointError(
            _NOT_A_CHECKPOINT, given=given, expected="a directory such as step-00000120", hint=hint
        )
    manifest, step = read_manifest(path), step_of(path)
    if step is not None and manifest.step != step:  # a checkpoint with another name may be of any step
        raise damage(path / MANIFEST, f"of step {manifest.step}, in the directory of step {step}")
    return Checkpoint(path, manifest)


def is_damaged(error: CheckpointError) -> bool:
    """Return whether the checkpoint itself is at fault, and not the request."""
    return error.fact in (DAMAGED, _NOT_A_CHECKPOINT)


def open_on_all_ranks(path: Path, world: World) -> Checkpoint:
    """Run `open_checkpoint` on every rank, and raise one rank's error on all."""
    opened, problem = None, None
    try:
        opened = open_checkpoint(path)
    except CheckpointError as error:
        problem = error
    raise_on_all(problem, world.group, world.device)
    assert opened is not None, "no rank raised, and there is no checkpoint"
    return opened


def newest(folder: str | Path) -> Checkpoint | None:
    """Open the last checkpoint in a folder; None if there is none.

    Raises CheckpointError if it is damaged: an older one is not used silently instead.
    """
    paths = steps(Path(folder))
    return open_checkpoint(paths[-1]) if paths else None


def _difference(saved: object, value: object) -> str:
    """Describe the first key in which two mappings differ, or both values."""
    if isinstance(saved, dict) and isinstance(value, dict):
        for key in [*value, *saved]:
            if isinstance(saved.get(key), dict) and isinstance(value.get(key), dict):
                if saved[key] != value[key]:
                    return f"{key}: {_difference(saved[key], value[key])}"
            elif saved.get(key) != value.get(key):
                return f"{key}={saved.get(key)!r}, here {key}={value.get(key)!r}"
    return f"{saved!r}, here {value!r}"
