"""The contents of a checkpoint, and the differences between two."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.checkpoint import Checkpoint
from plait.checkpoint.directory import steps
from plait.checkpoint.manifest import MANIFEST, TensorFacts
from plait.checkpoint.reader import Reader
from plait.errors import CheckpointError
from plait.plan import Boxes

_CHUNK_ELEMENTS = 2**20


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a run or folder, oldest first, or the one at `path`. Raises CheckpointError."""
    for folder in (path / "checkpoints", path):
        if checkpoints := steps(folder):
            return checkpoints
    if (path / MANIFEST).exists() or not path.is_dir():
        return [path]
    raise CheckpointError(
        "there is no checkpoint",
        given=path,
        expected="a directory step-00000120, or that of a run with checkpoints",
        hint=f"ls {path}",
    )


# --- one


@dataclass(frozen=True)
class TensorGroup:
    """The tensors with keys `name/...`."""

    name: str
    dtypes: tuple[str, ...]
    tensors: int
    elements: int
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, by its manifest. `written`: bytes by rank. `at`: time of completion."""

    path: Path
    step: int
    at: str
    bytes: int
    facts: Mapping[str, Any]
    kinds: tuple[TensorGroup, ...]
    written: Mapping[str, int]
    files: Mapping[str, int]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Contents":
        manifest = checkpoint.manifest
        groups: dict[str, list[TensorFacts]] = {}
        for key, tensor in manifest.tensors.items():
            groups.setdefault(key.partition("/")[0], []).append(tensor)
        written: Counter[str] = Counter()
        files = {name: facts.bytes for name, facts in manifest.files.items()}
        for name, size in files.items():
            written[name.partition(".")[0]] += size
        written_at = datetime.fromtimestamp((checkpoint.path / MANIFEST).stat().st_mtime).astimezone()
        at = written_at.isoformat(timespec="seconds")
        kinds = tuple(_tensor_group(name, tensors) for name, tensors in groups.items())
        size = manifest.num_bytes
        return cls(checkpoint.path, manifest.step, at, size, manifest.facts, kinds, dict(written), files)


def _tensor_group(name: str, tensors: Sequence[TensorFacts]) -> TensorGroup:
    elements = [math.prod(facts.shape) for facts in tensors]
    return TensorGroup(
        name,
        tuple(sorted({facts.dtype for facts in tensors})),
        len(tensors),
        sum(elements),
        sum(n * facts.torch_dtype.itemsize for n, facts in zip(elements, tensors, strict=True)),
        sum(len(facts.chunks) for facts in tensors),
    )


# --- two


@dataclass(frozen=True)
class TensorDifference:
    """The difference of a tensor that both have.

    given     differing shapes or dtypes, if any
    largest   largest absolute difference of an element; NaN if one element is NaN and the other is not
    relative  2-norm of the difference, relative to that of the first checkpoint's tensor
    elements  number of elements that differ
    """

    key: str
    given: str | None = None
    largest: float = 0.0
    relative: float = 0.0
    elements: int = 0


@dataclass(frozen=True)
class Comparison:
    """The differences of two checkpoints.

    facts   (dotted name, value in the first, value in the second)
    only    the keys that only the first has, and only the second
    same    number of equal tensors
    """

    facts: tuple[tuple[str, Any, Any], ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    differ: tuple[TensorDifference, ...]
    same: int

    @property
    def is_same(self) -> bool:
        """Return whether all tensors are equal, element by element. Facts, such as the plan, may differ."""
        return not (self.differ or any(self.only))


def compare(one: Checkpoint, other: Checkpoint, *, at_a_time: int = _CHUNK_ELEMENTS) -> Comparison:
    """Compare full tensors, with `at_a_time` elements of each in memory. Raises CheckpointError."""
    tensors, others = one.manifest.tensors, other.manifest.tensors
    shared = [key for key in tensors if key in others]
    with one.reader() as left, other.reader() as right:
        compared = [_difference(key, left, right, at_a_time) for key in shared]
        left.finish()
        right.finish()
    differ = tuple(difference for difference in compared if difference is not None)
    only = (
        tuple(key for key in tensors if key not in others),
        tuple(key for key in others if key not in tensors),
    )
    facts = tuple(_fact_differences("", one.facts, other.facts))
    return Comparison(facts, only, differ, len(shared) - len(differ))


def _difference(key: str, left: Reader, right: Reader, at_a_time: int) -> TensorDifference | None:
    one_facts, other_facts = left.manifest.tensors[key], right.manifest.tensors[key]
    if one_facts.shape != other_facts.shape:
        return TensorDifference(key, f"shapes {list(one_facts.shape)} and {list(other_facts.shape)}")
    boxes, numel = Boxes.full(one_facts.shape), math.prod(one_facts.shape)
    largest, elements, squares, norm = 0.0, 0, 0.0, 0.0
    for start in range(0, numel, at_a_time):
        count = min(at_a_time, numel - start)
        a, b = (torch.empty(count, dtype=facts.torch_dtype) for facts in (one_facts, other_facts))
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
            difference = (a - b)[unequal].abs()
            largest = max(largest, float(difference.max())) if not difference.isnan().any() else math.nan
            elements += int(unequal.sum())
            squares += float(difference.square().sum())
    names = one_facts.dtype, other_facts.dtype
    dtypes = None if names[0] == names[1] else f"dtypes {names[0]} and {names[1]}"
    if not elements and dtypes is None:
        return None
    relative = math.sqrt(squares / norm) if norm else (math.inf if squares else 0.0)
    return TensorDifference(key, dtypes, largest, relative, elements)


def _fact_differences(name: str, one: object, other: object) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _fact_differences(f"{name}.{key}" if name else key, one.get(key), other.get(key))
    elif one != other:
        yield name, one, other
