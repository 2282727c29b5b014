"""What is in a checkpoint, and what two differ in."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.checkpoint import Checkpoint
from plait.checkpoint.directory import steps
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.reader import Reader
from plait.errors import CheckpointError
from plait.plan import Boxes

_ELEMENTS = 2**20


def places(path: Path) -> list[Path]:
    """The checkpoints of a run, of its folder, or the one that is named; oldest first. Raises
    CheckpointError where there is none."""
    for folder in (path / "checkpoints", path):
        if found := steps(folder):
            return found
    if (path / MANIFEST).exists() or not path.is_dir():
        return [path]
    raise CheckpointError(
        "there is no checkpoint", given=path, expected="a directory step-00000120, or a run's directory"
    )


# --- one


@dataclass(frozen=True)
class TensorGroup:
    """Tensors with keys `name/...`."""

    name: str
    dtypes: tuple[str, ...]
    tensors: int
    elements: int
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, by its manifest. `written`: bytes by rank. `at`: when it was complete."""

    path: Path
    step: int
    at: str
    bytes: int
    facts: Mapping[str, Any]
    kinds: tuple[TensorGroup, ...]
    written: Mapping[str, int]
    files: Mapping[str, int]

    @classmethod
    def of(cls, found: Checkpoint) -> "Contents":
        groups: dict[str, list[str]] = {}
        for key in found.manifest.tensors:
            groups.setdefault(key.partition("/")[0], []).append(key)
        written: dict[str, int] = {}
        files = {name: facts.bytes for name, facts in found.manifest.files.items()}
        for name, size in files.items():
            rank = name.partition(".")[0]
            written[rank] = written.get(rank, 0) + size
        at = datetime.fromtimestamp((found.path / MANIFEST).stat().st_mtime).astimezone()
        kinds = tuple(_kind(found, name, keys) for name, keys in groups.items())
        return cls(
            found.path,
            found.step,
            at.isoformat(timespec="seconds"),
            found.manifest.num_bytes,
            found.facts,
            kinds,
            written,
            files,
        )


def _kind(found: Checkpoint, name: str, keys: list[str]) -> TensorGroup:
    tensors = [found.manifest.tensors[key] for key in keys]
    elements = [math.prod(facts.shape) for facts in tensors]
    return TensorGroup(
        name,
        tuple(sorted({facts.dtype for facts in tensors})),
        len(tensors),
        sum(elements),
        sum(n * facts.torch_dtype.itemsize for n, facts in zip(elements, tensors, strict=True)),
        sum(len(facts.chunks) for facts in tensors),
    )


@dataclass(frozen=True)
class Verified:
    """What was read of a checkpoint that is whole."""

    path: Path
    files: int
    tensors: int
    bytes: int
    seconds: float


def verified(found: Checkpoint) -> Verified:
    """Reads every byte. Raises CheckpointError, which names what is damaged."""
    began_s = time.perf_counter()
    found.verify()
    manifest, seconds = found.manifest, time.perf_counter() - began_s
    return Verified(found.path, len(manifest.files), len(manifest.tensors), manifest.num_bytes, seconds)


# --- two


@dataclass(frozen=True)
class Difference:
    """Of a tensor that both have. Where only `given` differs, it is what: shapes or dtypes.

    largest   of any element's absolute differences; NaN where one is NaN and the other is not
    relative  the 2-norm of the difference to that of the first one's tensor
    """

    key: str
    given: str | None = None
    largest: float = 0.0
    relative: float = 0.0
    elements: int = 0  # that differ


@dataclass(frozen=True)
class Comparison:
    """facts: (name, of one, of the other), by their dotted names; only: the keys that one alone has"""

    facts: tuple[tuple[str, Any, Any], ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    differ: tuple[Difference, ...]
    same: int  # tensors

    @property
    def is_same(self) -> bool:
        """All tensors, element by element. Facts may differ: the plan, for one."""
        return not (self.differ or any(self.only))


def compare(one: Checkpoint, other: Checkpoint, *, at_a_time: int = _ELEMENTS) -> Comparison:
    """Whole tensors, however either was cut; of each `at_a_time` elements in memory. Raises CheckpointError
    for what is damaged."""
    shared = [key for key in one.shapes if key in other.shapes]
    found = []
    with one.reader() as left, other.reader() as right:
        for key in shared:
            found.append(_difference(key, one, other, left, right, at_a_time))
        left.finish()
        right.finish()
    differ = tuple(each for each in found if each is not None)
    only = tuple(
        tuple(key for key in mine.shapes if key not in its.shapes)
        for mine, its in ((one, other), (other, one))
    )
    facts = tuple(_facts("", one.facts, other.facts))
    return Comparison(facts, (only[0], only[1]), differ, len(shared) - len(differ))


def _difference(
    key: str, one: Checkpoint, other: Checkpoint, left: Reader, right: Reader, at_a_time: int
) -> Difference | None:
    mine, its = one.manifest.tensors[key], other.manifest.tensors[key]
    if mine.shape != its.shape:
        return Difference(key, f"shapes {list(mine.shape)} and {list(its.shape)}")
    boxes, numel = Boxes.full(mine.shape), math.prod(mine.shape)
    largest, elements, squares, norm = 0.0, 0, 0.0, 0.0
    for start in range(0, numel, at_a_time):
        count = min(at_a_time, numel - start)
        a, b = (torch.empty(count, dtype=facts.torch_dtype) for facts in (mine, its))
        left.read(key, boxes, start, a)
        right.read(key, boxes, start, b)
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        is_same = a.dtype == b.dtype and torch.equal(a, b)
        a = a.to(wide)
        norm += float(a.abs().square().sum())
        if is_same:
            continue
        b = b.to(wide)
        unequal = ~((a == b) | (a.isnan() & b.isnan()))
        if unequal.any():
            off = (a - b)[unequal].abs()
            largest = max(largest, float(off.max())) if not off.isnan().any() else math.nan
            elements += int(unequal.sum())
            squares += float(off.square().sum())
    dtypes = None if mine.dtype == its.dtype else f"dtypes {mine.dtype} and {its.dtype}"
    if not elements and dtypes is None:
        return None
    relative = math.sqrt(squares / norm) if norm else (math.inf if squares else 0.0)
    return Difference(key, dtypes, largest, relative, elements)


def _facts(name: str, one: object, other: object) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _facts(f"{name}.{key}" if name else key, one.get(key), other.get(key))
    elif one != other:
        yield name, one, other
