"""A checkpoint that is there: what it is of, and its tensors."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.directory import step_of, steps
from plait.checkpoint.manifest import (
    DAMAGED,
    MANIFEST,
    Damage,
    Manifest,
    read_error,
    read_manifest,
)
from plait.checkpoint.reader import Reader
from plait.comm import World, raise_on_all
from plait.errors import CheckpointError

_NOT_A_CHECKPOINT = "not a checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is valid and whose files are there. What is read from them is verified."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every whole tensor, by key."""
        return {key: facts.shape for key, facts in self.manifest.tensors.items()}

    def check_same(self, fact: str, value: object) -> None:
        """Raises CheckpointError unless the run that saved this had `value` for `fact`."""
        if (found := self.facts.get(fact)) != json.loads(json.dumps(value)):
            raise CheckpointError(
                f"the checkpoint is of another {fact}",
                given=f"{self.path}: {_difference(found, value)}",
                expected=f"the {fact} of this run",
                hint="resume with the recipe that it was saved with, or choose another run.dir",
            )

    def reader(self) -> Reader:
        """What reads its tensors, under any plan."""
        return Reader(self.path, self.manifest)

    def read(self, only: str | tuple[str, ...] = "") -> dict[str, Tensor]:
        """The tensors whose keys begin with `only`, whole, on the CPU. Raises CheckpointError when
        damaged."""
        with self.reader() as reader:
            found = {key: reader.whole(key) for key in self.manifest.tensors if key.startswith(only)}
            reader.finish()
        return found

    def verify(self) -> None:
        """Reads every byte. Raises CheckpointError, which names what is damaged."""
        extra = sorted(path.name for path in self.path.iterdir() if path.name not in self._names)
        if extra:
            raise Damage(self.path / extra[0], "the manifest does not know it").error()
        with self.reader() as reader, ThreadPoolExecutor(_num_cpus()) as pool:
            list(pool.map(reader.check_header, range(len(self.manifest.files))))
            chunks = ((key, chunk) for key, facts in self.manifest.tensors.items() for chunk in facts.chunks)
            list(pool.map(lambda each: reader.check(*each), chunks))

    @property
    def _names(self) -> set[str]:
        return {MANIFEST, *self.manifest.files}


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks the manifest, and that its files are there. Raises CheckpointError."""
    try:
        is_there, is_folder = path.exists(), path.is_dir() and not path.is_symlink()
        inside = steps(path) if is_folder and not (path / MANIFEST).exists() else []
    except OSError as error:
        raise read_error(path, error) from error
    if not is_folder or inside:
        given = path if is_folder else f"{path}, {'no directory' if is_there else 'which is not there'}"
        hint = inside[-1] if inside else None
        raise CheckpointError(
            _NOT_A_CHECKPOINT, given=given, expected="a directory such as step-00000120", hint=hint
        )
    manifest, step = read_manifest(path), step_of(path)
    if step is not None and manifest.step != step:  # one with a name of its own may be of any
        raise Damage(path / MANIFEST, f"of step {manifest.step}, in a directory of step {step}").error()
    return Checkpoint(path, manifest)


def is_damaged(error: CheckpointError) -> bool:
    """Whether the checkpoint itself is at fault, and not what is asked of it."""
    return error.fact in (DAMAGED, _NOT_A_CHECKPOINT)


def open_on_all_ranks(path: Path, world: World) -> Checkpoint:
    """`open_checkpoint` on every rank. What one of them finds wrong, all raise."""
    found, problem = None, None
    try:
        found = open_checkpoint(path)
    except CheckpointError as error:
        problem = error
    raise_on_all(problem, world.group, world.device)
    assert found is not None, "no rank has a problem, nor the checkpoint"
    return found


def newest(folder: str | Path) -> Checkpoint | None:
    """The last checkpoint in a folder, None when there is none.

    Raises CheckpointError when it is damaged: an older one is not taken in its place silently.
    """
    paths = steps(Path(folder))
    return open_checkpoint(paths[-1]) if paths else None


def _num_cpus() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def _difference(found: object, value: object) -> str:
    """The first key in which two mappings differ, or both values."""
    if isinstance(found, dict) and isinstance(value, dict):
        for key in [*value, *found]:
            if isinstance(found.get(key), dict) and isinstance(value.get(key), dict):
                if found[key] != value[key]:
                    return f"{key}: {_difference(found[key], value[key])}"
            elif found.get(key) != value.get(key):
                return f"{key}={found.get(key)!r}, here {key}={value.get(key)!r}"
    return f"{found!r}, here {value!r}"
