"""Reading under any plan: of every chunk the rows that are asked for, and each of them once.

[Note: how what is read is verified]
A chunk that a reader reads wholly has to have its CRC-32. Of one that several share, each adds up its part's
remainder (see [Note: sums of parts] in `crc.py`), and together these give the CRC-32 of the whole: the ranks
that hold one copy of the training state read every element of it, and of those that several of them hold, one
rank's reading is counted. So no byte is read for the sake of being verified, and every byte that is used has
been found right in the file by somebody. That is known at the end, when all lies where it belongs: whoever
reads must not use it before `finish` has let it pass.
"""

import bisect
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from plait.checkpoint.crc32 import Remainder, crc32, crc_of_remainder
from plait.checkpoint.manifest import (
    Chunk,
    Damage,
    Manifest,
    TensorFacts,
    cannot_be_read,
    open_plain,
)
from plait.checkpoint.writer import BLOCK_BYTES, bytes_of
from plait.comm import Group, all_reduce, raise_on_all
from plait.errors import CheckpointError
from plait.parallel import boxes_of, view_of
from plait.plan import Box, Boxes

# A CRC's bits are counted, by up to 2^20 ranks, in fields of integers.
_FIELDS, _FIELD_BITS, _NUM_FIELDS = 3, 21, 11
_MOST_OPEN = 64  # files
ALONE = Group((0,), 0, None)
CPU = torch.device("cpu")


@dataclass
class _Seen:
    """Of a chunk that was not read wholly, what this rank has read so far."""

    numel: int = 0
    remainder: int = 0


@dataclass
class _Rows:
    """The chunks of a tensor in the order of their first rows."""

    chunks: list[Chunk]
    starts: list[int]
    stops: list[int] = field(default_factory=list)  # the furthest of those up to here

    @classmethod
    def of(cls, facts: TensorFacts) -> "_Rows":
        found = sorted(facts.chunks, key=lambda chunk: chunk.start)
        if not facts.shape:
            return cls(found, [0] * len(found), [1] * len(found))
        rows = cls(found, [chunk.start[0] for chunk in found])
        for chunk in found:
            rows.stops.append(max(chunk.stop[0], rows.stops[-1] if rows.stops else 0))
        return rows

    def meeting(self, box: Box) -> Iterator[Chunk]:
        """Those that share elements with the box."""
        low, high = box.edges[0] if box.start else (0, 1)
        for chunk in self.chunks[
            bisect.bisect_right(self.stops, low) : bisect.bisect_left(self.starts, high)
        ]:
            if (chunk.box & box).numel:
                yield chunk


class Reader:
    """Of one checkpoint's files. A context: it holds them open. Raises CheckpointError.

    `has_sums`: chunks have their checksums; somebody else's files have none.
    """

    def __init__(self, path: Path, manifest: Manifest, *, has_sums: bool = True) -> None:
        self._path = path
        self._manifest = manifest
        self._has_sums = has_sums
        self._names = list(manifest.files)
        self._open: dict[int, int] = {}
        self._rows: dict[str, _Rows] = {}
        self._right_headers: set[int] = set()
        self._seen: dict[tuple[int, int], _Seen] = {}
        self.bytes_read = 0

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every whole tensor, by key."""
        return {key: facts.shape for key, facts in self._manifest.tensors.items()}

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        """Fills `into`, flat, with what lies from element `start` on in the tensor that holds the boxes of
        tensor `key`. `counted`: of the ranks that `finish` meets, only this one reads it."""
        for box, view in boxes_of(into, boxes, start):
            self._fill(key, box, view, counted)

    def whole(self, key: str) -> Tensor:
        """All of a tensor, on the CPU; every rank by itself."""
        facts = self._manifest.tensors[key]
        found = torch.empty(facts.shape, dtype=facts.torch_dtype)
        self.read(key, Boxes.full(facts.shape), 0, found.view(-1), counted=False)
        return found

    def check_header(self, file: int) -> None:
        """Reads it, to see that it is as it was written. As `check`, also in several threads."""
        os.close(self._opened(file))

    def check(self, key: str, chunk: Chunk) -> None:
        """Reads one chunk, to see that it is as it was written."""
        num_bytes = chunk.box.numel * self._manifest.tensors[key].torch_dtype.itemsize
        block, crc = memoryview(bytearray(min(num_bytes, BLOCK_BYTES))), 0
        descriptor = open_plain(self._path / self._names[chunk.file])
        try:
            for at in range(0, num_bytes, BLOCK_BYTES):
                part = block[: num_bytes - at]
                self._read_from(descriptor, chunk.file, chunk.offset + at, part)
                crc = crc32(part, crc)
        finally:
            os.close(descriptor)
        if crc != chunk.crc32:
            raise self._wrong(key, chunk)

    def _fill(self, key: str, box: Box, view: Tensor, counted: bool) -> None:
        facts = self._manifest.tensors[key]
        if key not in self._rows:
            self._rows[key] = _Rows.of(facts)
        for chunk in self._rows[key].meeting(box):
            shared = chunk.box & box
            to = view_of(view, shared.within(box))
            direct = to.is_contiguous() and to.dtype == facts.torch_dtype and to.device.type == "cpu"
            buffer = to if direct else torch.empty(shared.shape, dtype=facts.torch_dtype)
            self._read(key, chunk, shared.within(chunk.box), bytes_of(buffer), buffer.element_size(), counted)
            if not direct:
                to.copy_(buffer)

    def _read(
        self, key: str, chunk: Chunk, part: Box, into: memoryview, itemsize: int, counted: bool
    ) -> None:
        """A box of a chunk, of which the rows lie one behind the other in `into`."""
        remainder, at = Remainder(), 0
        descriptor, add = self._descriptor(chunk.file), remainder.add if self._has_sums else _nothing
        for first, length in _segments(part, chunk.box.shape):
            for begin in range(first * itemsize, (first + length) * itemsize, BLOCK_BYTES):
                row = into[at : at + min(BLOCK_BYTES, (first + length) * itemsize - begin)]
                self._read_from(descriptor, chunk.file, chunk.offset + begin, row)
                add(begin, row)
                at += len(row)
        if not self._has_sums:
            return
        found = remainder.of(chunk.box.numel * itemsize)
        if part.numel == chunk.box.numel:
            if crc_of_remainder(found, chunk.box.numel * itemsize) != chunk.crc32:
                raise self._wrong(key, chunk)
        elif counted:
            seen = self._seen.setdefault((chunk.file, chunk.offset), _Seen())
            seen.numel += part.numel
            seen.remainder ^= found
            assert seen.numel <= chunk.box.numel, f"elements of {key} were read twice"

    def _read_from(self, descriptor: int, file: int, offset: int, into: memoryview) -> None:
        while into:
            try:
                count = os.preadv(descriptor, [into], offset)
            except OSError as error:
                raise cannot_be_read(self._path / self._names[file], error) from error
            if count == 0:
                raise self._damage(file, f"ends at byte {offset}")
            self.bytes_read += count
            into, offset = into[count:], offset + count

    def _descriptor(self, file: int) -> int:
        """Of a file whose header is as it was written. Some are open at a time."""
        if file not in self._open:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = self._opened(file)
        return self._open[file]

    def _opened(self, file: int) -> int:
        facts = self._manifest.files[self._names[file]]
        descriptor = open_plain(self._path / self._names[file])
        try:
            if (size := os.fstat(descriptor).st_size) != facts.bytes:
                raise self._damage(file, f"{size} bytes instead of {facts.bytes}")
            if file not in self._right_headers:
                header = bytearray(facts.header_bytes)
                self._read_from(descriptor, file, 0, memoryview(header))
                if crc32(header) != facts.header_crc32:
                    raise self._damage(file, "its header is not the one that was written")
                self._right_headers.add(file)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _damage(self, file: int, reason: str) -> CheckpointError:
        return Damage(self._path / self._names[file], reason).error()

    # --- verified

    def finish(
        self,
        copy: Group = ALONE,
        everyone: Group = ALONE,
        device: torch.device = CPU,
        error: CheckpointError | None = None,
    ) -> None:
        """Raises CheckpointError, on every rank, for what was read and is not what was written: see [Note:
        how what is read is verified]. `copy`: the ranks that together read one copy of the state. `error`:
        what has kept this rank from reading all."""
        raise_on_all(error, everyone, device)
        if self._has_sums:
            raise_on_all(self._check_shared(copy, device), everyone, device)

    def _check_shared(self, group: Group, device: torch.device) -> CheckpointError | None:
        """One sum over the ranks, of all chunks' counts and remainders: all of them see the same."""
        chunks = [(key, chunk) for key, facts in self._manifest.tensors.items() for chunk in facts.chunks]
        table = torch.zeros(len(chunks), 1 + _NUM_FIELDS, dtype=torch.int64)
        for line, (_, chunk) in enumerate(chunks):
            seen = self._seen.get((chunk.file, chunk.offset))
            if seen is not None:
                table[line] = torch.tensor([seen.numel, *_spread(seen.remainder)])
        table = table.to(device)
        all_reduce(table, group, label="remainders of chunks")
        for (key, chunk), (numel, *fields) in zip(chunks, table.tolist(), strict=True):
            if numel:
                assert numel == chunk.box.numel, (
                    f"{numel} elements read of a chunk of {chunk.box.numel}: {key}"
                )
                num_bytes = numel * self._manifest.tensors[key].torch_dtype.itemsize
                if crc_of_remainder(_gathered(fields), num_bytes) != chunk.crc32:
                    return self._wrong(key, chunk)
        return None

    def _wrong(self, key: str, chunk: Chunk) -> CheckpointError:
        edges = ", ".join(f"{low}:{high}" for low, high in chunk.box.edges)
        reason = (
            f"{key}[{edges}], from byte {chunk.offset} on, does not have the checksum that it should have"
        )
        return self._damage(chunk.file, reason)


def _nothing(at: int, data: memoryview) -> None:
    """What is not verified."""


def _segments(part: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first element, length) of the runs that a box of a tensor is, in its memory."""
    dims = len(shape)
    while dims and part.edges[dims - 1] == (0, shape[dims - 1]):
        dims -= 1
    inner = math.prod(shape[dims:])
    if dims == 0:
        yield 0, inner
        return
    low, high = part.edges[dims - 1]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(dims)]
    firsts = [0]
    for dim in range(dims - 1):
        firsts = [first + n * strides[dim] for first in firsts for n in range(*part.edges[dim])]
    for first in firsts:
        yield first + low * inner, (high - low) * inner


def _spread(value: int) -> list[int]:
    """A CRC's bits, each in a field of its own, so that sums over ranks count them."""
    fields = []
    for first in range(0, _FIELDS * _NUM_FIELDS, _FIELDS):
        bits = (value >> first & 1, value >> first + 1 & 1, value >> first + 2 & 1)
        fields.append(bits[0] | bits[1] << _FIELD_BITS | bits[2] << 2 * _FIELD_BITS)
    return fields


def _gathered(fields: list[int]) -> int:
    """The sum modulo 2 of what `_spread` gave."""
    found = 0
    for number, counts in enumerate(fields):
        for bit in range(_FIELDS):
            found |= (counts >> bit * _FIELD_BITS & 1) << number * _FIELDS + bit
    return found
