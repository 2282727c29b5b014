"""The manifest: what a checkpoint holds, and where every element of it lies.

    manifest.json               all below; its own hash is part of it
    rank-00000.0.safetensors    the boxes that rank 0 has written, one tensor each; a large one goes on in .1

[Note: what a manifest is believed]
Nothing before its hash is right and it fits itself: known dtypes, file names without a way out of the
directory, chunks that are inside their tensors, do not overlap and leave nothing out, files that chunks fill
without a gap. Every number has a bound before it is used, and nothing is allocated by what a number says
alone: what is allocated is the model's own. A file must be a plain one, of the size that is said; what is
read from it has to have its checksum.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from plait.checkpoint.safetensors_format import DTYPES, HEADER_LIMIT_BYTES, is_shape
from plait.errors import CheckpointError
from plait.fileio import regular_file_bytes
from plait.plan import Box

MANIFEST = "manifest.json"
FORMAT: Literal["plait checkpoint 2"] = "plait checkpoint 2"
MANIFEST_LIMIT_BYTES = 2**30
_MOST_COMPARISONS = 10**6  # of boxes that no cut through all of them separates: ours are always separated
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileFacts(_Strict):
    bytes: int
    header_bytes: int  # up to the first tensor's first byte
    header_crc32: int


class Chunk(NamedTuple):
    """A box of a whole tensor, row by row in one file."""

    file: int  # in the manifest's order
    offset: int  # bytes from the file's beginning
    start: tuple[int, ...]
    stop: tuple[int, ...]
    crc32: int

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


class TensorFacts(_Strict):
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class Part(_Strict):
    """What one rank has written. Chunks count its own files."""

    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]


class Manifest(_Strict):
    """What stands in manifest.json. `facts` are the writer's own: plan, seed, model, data..."""

    format: Literal["plait checkpoint 2"]
    step: int
    facts: dict[str, Any]
    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]

    @classmethod
    def of(cls, step: int, facts: Mapping[str, Any], parts: Iterable[Part]) -> "Manifest":
        """Of what all ranks have written."""
        files: dict[str, FileFacts] = {}
        tensors: dict[str, TensorFacts] = {}
        for part in parts:
            first = len(files)
            files |= part.files
            for key, facts_of in part.tensors.items():
                chunks = tuple(chunk._replace(file=first + chunk.file) for chunk in facts_of.chunks)
                known = tensors[key].chunks if key in tensors else ()
                tensors[key] = facts_of.model_copy(update={"chunks": (*known, *chunks)})
        return cls(format=FORMAT, step=step, facts=dict(facts), files=files, tensors=tensors)

    def text(self) -> str:
        """JSON, a line per tensor and file, the hash of all that comes before it in the last."""
        values = self.model_dump(mode="json")
        tables = [_table(name, values.pop(name)) for name in ("files", "tensors")]
        head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        body = "{\n" + ",\n".join([*head, *tables])
        return f'{body},\n"sha256": "{_sha256(body.encode())}"\n}}\n'

    def problem(self) -> str | None:
        """What does not fit in it; None for a manifest that can be believed."""
        return next(_problems(self), None)

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(facts.bytes for facts in self.files.values())


def _table(name: str, values: dict[str, Any]) -> str:
    lines = [
        f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in values.items()
    ]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


_HASH = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n}\n')
_HASH_BYTES = 81


DAMAGED = "the checkpoint is damaged"


@dataclass(frozen=True)
class Damage:
    """Where a checkpoint is not what it should be, and why."""

    path: Path
    reason: str

    def error(self, hint: str | None = None) -> CheckpointError:
        return CheckpointError(DAMAGED, given=f"{self.path}: {self.reason}", hint=hint)


def read_manifest(folder: Path) -> Manifest:
    """What the folder holds, as its manifest says. See [Note: what a manifest is believed].

    Raises CheckpointError, which names the file and the reason.
    """
    path = folder / MANIFEST
    descriptor = open_plain(path)
    with os.fdopen(descriptor, "rb") as file:
        if (size := os.fstat(descriptor).st_size) > MANIFEST_LIMIT_BYTES:
            raise Damage(path, f"larger than {MANIFEST_LIMIT_BYTES} bytes").error()
        try:
            text = file.read(size + 1)
        except OSError as error:
            raise cannot_be_read(path, error) from error
    said = _HASH.fullmatch(text[-_HASH_BYTES:])
    if said is None or _sha256(text[:-_HASH_BYTES]) != said[1].decode():
        raise Damage(path, "its content does not have the hash that it says").error()
    try:
        manifest = Manifest.model_validate_json(text[:-_HASH_BYTES] + b"}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damage(path, f"{where}: {first['msg']}" if where else first["msg"]).error() from error
    if (reason := manifest.problem()) is not None:
        raise Damage(path, reason).error()
    for name, facts in manifest.files.items():
        if (found := plain_size(folder / name)) != facts.bytes:
            raise Damage(folder / name, f"{found} bytes instead of {facts.bytes}").error()
    return manifest


def plain_size(path: Path) -> int:
    """Of a plain file. Raises CheckpointError for what is none."""
    try:
        size = regular_file_bytes(path)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if size is None:
        raise Damage(path, "not a plain file").error()
    return size


def open_plain(path: Path) -> int:
    """A descriptor of a plain file. Raises CheckpointError for what is none; it never waits for a pipe."""
    plain_size(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damage(path, "not a plain file").error()
    return descriptor


def cannot_be_read(path: Path, error: OSError) -> CheckpointError:
    """A missing file is damage. Another error says nothing of what is in it: that may be whole."""
    if error.errno == errno.ENOENT:
        return Damage(path, "missing").error()
    return CheckpointError("a checkpoint cannot be read", given=f"{path}: {error.strerror or error}")


def _problems(manifest: Manifest) -> Iterator[str]:
    """What does not fit in a manifest whose hash is right."""
    if manifest.step < 0:
        yield f"step {manifest.step}"
    for name, facts in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            yield f"{name!r} is not the name of a file in this directory"
        if not 8 <= facts.header_bytes <= min(facts.bytes, HEADER_LIMIT_BYTES):
            yield f"{name} has a header of {facts.header_bytes} of {facts.bytes} bytes"
    filled: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for key, tensor in manifest.tensors.items():
        yield from _problems_of(key, tensor, len(manifest.files))
        size = tensor.torch_dtype.itemsize
        for chunk in tensor.chunks:
            filled[chunk.file].append((chunk.offset, chunk.offset + chunk.box.numel * size))
    for (name, facts), ranges in zip(manifest.files.items(), filled, strict=True):
        edges = [(0, facts.header_bytes), *sorted(ranges), (facts.bytes, facts.bytes)]
        if any(one[1] != other[0] for one, other in pairwise(edges)):
            yield f"{name} is not filled by what is in it"


def _problems_of(key: str, tensor: TensorFacts, num_files: int) -> Iterator[str]:
    if tensor.dtype not in DTYPES:
        yield f"{key} is of dtype {tensor.dtype!r:.40}"
        return
    if not is_shape(tensor.shape):
        yield f"{key} is of a shape that no tensor has"
        return
    for chunk in tensor.chunks:
        edges = zip(chunk.start, chunk.stop, tensor.shape, strict=False)
        inside = all(0 <= start < stop <= size for start, stop, size in edges)
        if not (len(chunk.start) == len(chunk.stop) == len(tensor.shape) and inside):
            yield f"{key} has a chunk that is not in it"
            return
        if not (0 <= chunk.file < num_files and chunk.offset >= 0):
            yield f"{key} has a chunk in no file"
            return
    numel = sum(chunk.box.numel for chunk in tensor.chunks)
    if numel != math.prod(tensor.shape):
        yield f"{key} has chunks of {numel} elements, not of {math.prod(tensor.shape)}"
    elif not _are_apart([chunk.box for chunk in tensor.chunks]):
        yield f"{key} has chunks that overlap"


def _are_apart(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes share an element; False also where that would be long to find out."""
    todo, comparisons = [list(boxes)], 0
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        parts = next(
            (parts for dim in range(len(group[0].start)) if len(parts := _cut(group, dim)) > 1), None
        )
        if parts is not None:
            todo += parts
            continue
        comparisons += len(group) ** 2
        if comparisons > _MOST_COMPARISONS:
            return False
        if any((one & other).numel for n, one in enumerate(group) for other in group[:n]):
            return False
    return True


def _cut(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """The boxes in groups, between which lies a place of the dim that none of them spans."""
    found: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        if not found or box.start[dim] >= end:
            found.append([])
        found[-1].append(box)
        end = max(end, box.stop[dim])
    return found
