"""The manifest: the contents of a checkpoint, and the location of every element.

    manifest.json               everything below, and its own hash
    rank-00000.0.safetensors    the boxes that rank 0 has written, one tensor each; large ranks continue in .1

[Note: manifest validation]
No value is used before the hash is verified and the manifest is consistent: known dtypes, file names that do
not leave the directory, chunks that are inside their tensors, do not overlap and cover them, files that
chunks fill without a gap. Every number is bounded before it is used, and memory is allocated for the model's
own tensors, never by a manifest's numbers alone. A file must be a regular file of the recorded size; data
read from it must have its checksum.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from plait.checkpoint.safetensors_format import DTYPES, HEADER_LIMIT_BYTES, is_valid_shape
from plait.errors import CheckpointError, shown
from plait.fileio import NOT_REGULAR, open_descriptor, parse_json, regular_file_bytes
from plait.plan import Box

MANIFEST = "manifest.json"
FORMAT: Literal["plait checkpoint 2"] = "plait checkpoint 2"
# Bounds of the time and memory for a manifest, whatever is in it; those of plait have thousands of entries.
MANIFEST_LIMIT_BYTES = 2**27
_MAX_ENTRIES = 2**19  # tensors and chunks
_MAX_LISTS = 4 * _MAX_ENTRIES  # in the text: three of a chunk, two of a tensor, those of the facts
_MAX_COMPARISONS = 10**6  # of boxes that no plane separates; those that plait writes always are
_TOO_MANY = f"more than {_MAX_ENTRIES:,} tensors and chunks"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileFacts(_Strict):
    bytes: int
    header_bytes: int  # up to the first tensor's first byte
    header_crc32: int


class Chunk(NamedTuple):
    """A box of a full tensor, in row-major order in one file."""

    file: int  # index in the manifest's order
    offset: int  # bytes from the start of the file
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


class RankFiles(_Strict):
    """The files that one rank has written. Chunks index these files."""

    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]


class Manifest(_Strict):
    """The contents of manifest.json. `facts` are the writer's: plan, seed, model, data..."""

    format: Literal["plait checkpoint 2"]
    step: int
    facts: dict[str, Any]
    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]

    @classmethod
    def from_ranks(cls, step: int, facts: Mapping[str, Any], ranks: Iterable[RankFiles]) -> "Manifest":
        """Merge the files of all ranks into one manifest."""
        files: dict[str, FileFacts] = {}
        tensors: dict[str, TensorFacts] = {}
        for rank in ranks:
            first = len(files)
            files |= rank.files
            for key, tensor in rank.tensors.items():
                chunks = tuple(chunk._replace(file=first + chunk.file) for chunk in tensor.chunks)
                earlier = tensors[key].chunks if key in tensors else ()
                tensors[key] = tensor.model_copy(update={"chunks": (*earlier, *chunks)})
        return cls(format=FORMAT, step=step, facts=dict(facts), files=files, tensors=tensors)

    def to_json(self) -> str:
        """Encode as JSON, a line per tensor and file; the last line has the hash of everything before it."""
        values = self.model_dump(mode="json")
        tables = [_table(name, values.pop(name)) for name in ("files", "tensors")]
        head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        body = "{\n" + ",\n".join([*head, *tables])
        return f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'

    def problem(self) -> str | None:
        """The first inconsistency; None if it is valid."""
        return next(_problems(self), None)

    @property
    def num_bytes(self) -> int:
        """Total size of all files except the manifest."""
        return sum(facts.bytes for facts in self.files.values())


def json_facts(facts: object) -> dict[str, Any]:
    """Return the facts that a user saves. Raises CheckpointError unless they are a dict of JSON values."""
    try:
        if not isinstance(facts, Mapping) or not all(isinstance(key, str) for key in facts):
            raise ValueError(f"a {type(facts).__name__}, or keys of another type")
        return dict(parse_json(json.dumps(dict(facts))))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "the facts of a checkpoint are not JSON",
            given=f"{error}: {shown(facts)}" if not isinstance(facts, Mapping) else error,
            expected="a dict with texts as keys, of texts, numbers, lists and dicts",
            hint="facts={'note': 'text'}",
        ) from error


def _table(name: str, values: dict[str, Any]) -> str:
    lines = (
        f" {json.dumps(key)}: {json.dumps(facts, separators=(',', ':'))}" for key, facts in values.items()
    )
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


_HASH = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n}\n')
_HASH_BYTES = 81


DAMAGED = "the checkpoint is damaged"


def damage(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        DAMAGED,
        given=f"{path}: {reason}",
        expected="the files of a save that has ended, unchanged",
        hint="another checkpoint of the run, or a copy of this one",
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a folder. See [Note: manifest validation].

    Raises CheckpointError, which names the file and the reason.
    """
    path = folder / MANIFEST
    with os.fdopen(open_plain(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MANIFEST_LIMIT_BYTES:
            raise damage(path, f"larger than {MANIFEST_LIMIT_BYTES} bytes")
        try:
            text = file.read(size + 1)
        except OSError as error:
            raise read_error(path, error) from error
    recorded = _HASH.fullmatch(text[-_HASH_BYTES:])
    if recorded is None or hashlib.sha256(text[:-_HASH_BYTES]).hexdigest() != recorded[1].decode():
        raise damage(path, "its content does not have the hash in its last line")
    if text.count(b"[") > _MAX_LISTS:
        raise damage(path, _TOO_MANY)
    try:
        manifest = Manifest.model_validate_json(text[:-_HASH_BYTES] + b"}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damage(path, f"{where}: {first['msg']}" if where else first["msg"]) from error
    if (reason := manifest.problem()) is not None:
        raise damage(path, reason)
    for name, facts in manifest.files.items():
        if (size := plain_size(folder / name)) != facts.bytes:
            raise damage(folder / name, f"{size} bytes instead of {facts.bytes}")
    return manifest


def plain_size(path: Path) -> int:
    """The size of a regular file in bytes. Raises CheckpointError for anything else."""
    try:
        size = regular_file_bytes(path)
    except OSError as error:
        raise read_error(path, error) from error
    if size is None:
        raise damage(path, NOT_REGULAR)
    return size


def open_plain(path: Path) -> int:
    """Open a regular file. Raises CheckpointError for anything else; never blocks on a pipe."""
    try:
        return open_descriptor(path, follow=False)
    except OSError as error:
        raise read_error(path, error) from error


def read_error(path: Path, error: OSError) -> CheckpointError:
    """A missing file is damage, and so is a link or a folder. Another error does not mean that the contents
    are damaged."""
    if error.errno == errno.ENOENT:
        return damage(path, "missing")
    if error.errno == errno.ELOOP or error.strerror == NOT_REGULAR:
        return damage(path, NOT_REGULAR)
    return CheckpointError(
        "a checkpoint cannot be read",
        given=f"{path}: {error.strerror or error}",
        expected="files that this user can read",
        hint=f"ls -l {path}",
    )


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield the inconsistencies of a manifest whose hash is correct."""
    if len(manifest.tensors) + sum(len(tensor.chunks) for tensor in manifest.tensors.values()) > _MAX_ENTRIES:
        yield _TOO_MANY
    if manifest.step < 0:
        yield f"step {manifest.step}"
    for name, facts in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            yield f"{name!r} is not the name of a file in this directory"
        if not 8 <= facts.header_bytes <= min(facts.bytes, HEADER_LIMIT_BYTES):
            yield f"{name} has a header of {facts.header_bytes} of {facts.bytes} bytes"
    filled: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for key, tensor in manifest.tensors.items():
        yield from tensor_problems(key, tensor, len(manifest.files))
        size = tensor.torch_dtype.itemsize
        for chunk in tensor.chunks:
            filled[chunk.file].append((chunk.offset, chunk.offset + chunk.box.numel * size))
    for (name, facts), ranges in zip(manifest.files.items(), filled, strict=True):
        edges = [(0, facts.header_bytes), *sorted(ranges), (facts.bytes, facts.bytes)]
        if any(one[1] != other[0] for one, other in pairwise(edges)):
            yield f"{name} is not filled by its chunks"


def tensor_problems(key: str, tensor: TensorFacts, num_files: int) -> Iterator[str]:
    """Yield the reasons why the chunks are not all of the tensor, each element once."""
    if tensor.dtype not in DTYPES:
        yield f"{key} is of dtype {tensor.dtype!r:.40}"
        return
    if not is_valid_shape(tensor.shape):
        yield f"{key} has an invalid shape"
        return
    for chunk in tensor.chunks:
        edges = zip(chunk.start, chunk.stop, tensor.shape, strict=False)
        inside = all(0 <= start < stop <= size for start, stop, size in edges)
        if not (len(chunk.start) == len(chunk.stop) == len(tensor.shape) and inside):
            yield f"{key} has a chunk outside of it"
            return
        if not (0 <= chunk.file < num_files and chunk.offset >= 0):
            yield f"{key} has a chunk outside of the files"
            return
    numel = sum(chunk.box.numel for chunk in tensor.chunks)
    if numel != math.prod(tensor.shape):
        yield f"{key} has chunks of {numel} elements instead of {math.prod(tensor.shape)}"
    elif not _are_disjoint([chunk.box for chunk in tensor.chunks]):
        yield f"{key} has chunks that overlap"


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    """Return whether no two boxes share an element; False also if that would take too many comparisons."""
    todo, comparisons = [list(boxes)], 0
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        split = (_separate(group, dim) for dim in range(len(group[0].start)))
        if groups := next((groups for groups in split if len(groups) > 1), None):
            todo += groups
            continue
        comparisons += len(group) ** 2
        if comparisons > _MAX_COMPARISONS:
            return False
        if any((one & other).numel for n, one in enumerate(group) for other in group[:n]):
            return False
    return True


def _separate(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Split the boxes into groups that do not overlap along the dim."""
    groups: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        if not groups or box.start[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.stop[dim])
    return groups
