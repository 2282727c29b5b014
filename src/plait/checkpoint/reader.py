"""Read a checkpoint under any plan: from every chunk the requested rows, each of them once.

[Note: verification of data read]
A chunk that one rank reads completely must have its CRC-32. Of a chunk that several ranks share, each
computes the remainder of its part (see [Note: CRC of parts]), and the XOR of these gives the CRC-32 of the
chunk: the ranks that hold one copy of the training state together read every element of it, and of elements
that several of them hold, one rank's read is counted. So no byte is read only to be verified, and every byte
that is used has been verified in the file by some rank. The result is known only at the end, after the data
has been written to its destination: callers must not use it before `finish` returns.

[Note: CRC of parts]
Apart from its initial and final XOR, CRC-32 is linear over GF(2): it is the remainder of the message, as a
polynomial, modulo one of degree 32 (W. W. Peterson, D. T. Brown, "Cyclic Codes for Error Detection", 1961,
section II). A message is the sum (XOR) of its parts, each padded with zeros, and so is its remainder;
appending a zero byte to a message multiplies the remainder by x^8. So readers of disjoint parts compute the
remainders of their parts, and the sum of these verifies the complete message. No reader has to read a byte
that it does not need.
"""

import bisect
import functools
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.manifest import Chunk, Manifest, TensorFacts, damage, open_plain, read_error
from plait.checkpoint.writer import BLOCK_BYTES, bytes_of
from plait.comm import Group, all_reduce, raise_on_all
from plait.errors import CheckpointError
from plait.parallel.zero.state_io import boxes_of, view_of
from plait.plan import Box, Boxes

# The bits of a CRC are counted, over up to 2^20 ranks, in bit fields of integers.
_FIELDS, _FIELD_BITS, _NUM_FIELDS = 3, 21, 11
_MAX_OPEN_FILES = 64
ALONE = Group((0,), 0, None)
CPU = torch.device("cpu")
_POLYNOMIAL = 0xEDB88320  # zlib's, lowest bit first: bit 31 is the coefficient of x^0
_ONES = 0xFFFFFFFF


@dataclass(frozen=True)
class _ChunkIndex:
    """The chunks of a tensor, sorted by first row."""

    chunks: list[Chunk]
    starts: list[int]
    stops: list[int]  # running maximum

    @classmethod
    def from_facts(cls, facts: TensorFacts) -> "_ChunkIndex":
        chunks = sorted(facts.chunks, key=lambda chunk: chunk.start)
        rows = [chunk.box.edges[0] if facts.shape else (0, 1) for chunk in chunks]
        return cls(chunks, [low for low, _ in rows], list(accumulate((high for _, high in rows), max)))

    def overlapping(self, box: Box) -> Iterator[Chunk]:
        """Yield the chunks that share elements with the box."""
        low, high = box.edges[0] if box.start else (0, 1)
        first, last = bisect.bisect_right(self.stops, low), bisect.bisect_left(self.starts, high)
        yield from (chunk for chunk in self.chunks[first:last] if (chunk.box & box).numel)


class Reader:
    """Reader of one checkpoint's files, and a context that keeps them open. Raises CheckpointError.

    `has_checksums`: chunks have checksums; files of other programs have none.
    """

    def __init__(self, path: Path, manifest: Manifest, *, has_checksums: bool = True) -> None:
        self._path = path
        self.manifest = manifest
        self._has_checksums = has_checksums
        self._names = list(manifest.files)
        self._open: dict[int, int] = {}
        self._indices: dict[str, _ChunkIndex] = {}
        self._valid_headers: set[int] = set()
        self._partial_reads: dict[tuple[int, int], tuple[int, int]] = {}  # (elements, remainder) by place
        self.bytes_read = 0

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of every tensor, by key."""
        return {key: facts.shape for key, facts in self.manifest.tensors.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of every tensor, by key."""
        return {key: facts.torch_dtype for key, facts in self.manifest.tensors.items()}

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        """Fill flat `into` from element `start` on of the tensor that holds the boxes of tensor `key`.
        `counted`: of the ranks in `finish`, only this one reads these elements."""
        facts = self.manifest.tensors[key]
        if key not in self._indices:
            self._indices[key] = _ChunkIndex.from_facts(facts)
        for box, view in boxes_of(into, boxes, start):
            for chunk in self._indices[key].overlapping(box):
                shared = chunk.box & box
                target = view_of(view, shared.within(box))
                is_direct = target.is_contiguous() and target.dtype == facts.torch_dtype
                is_direct = is_direct and target.device.type == "cpu"
                buffer = target if is_direct else torch.empty(shared.shape, dtype=facts.torch_dtype)
                self._read(key, chunk, shared.within(chunk.box), buffer, counted)
                if not is_direct:
                    target.copy_(buffer)

    def read_full(self, key: str) -> Tensor:
        """Read a full tensor on the CPU, on each rank separately."""
        facts = self.manifest.tensors[key]
        full = torch.empty(facts.shape, dtype=facts.torch_dtype)
        self.read(key, Boxes.full(facts.shape), 0, full.view(-1), counted=False)
        return full

    def check_header(self, file: int) -> None:
        """Read and verify a file's header. Thread-safe, like `check`."""
        os.close(self._open_verified(file))

    def check(self, key: str, chunk: Chunk) -> None:
        """Read and verify one chunk."""
        num_bytes = chunk.box.numel * self.manifest.tensors[key].torch_dtype.itemsize
        buffer, crc = memoryview(bytearray(min(num_bytes, BLOCK_BYTES))), 0
        descriptor = open_plain(self._path / self._names[chunk.file])
        try:
            for at in range(0, num_bytes, BLOCK_BYTES):
                block = buffer[: num_bytes - at]
                self._read_from(descriptor, chunk.file, chunk.offset + at, block)
                crc = zlib.crc32(block, crc)
        finally:
            os.close(descriptor)
        if crc != chunk.crc32:
            raise self._checksum_error(key, chunk)

    def _read(self, key: str, chunk: Chunk, part: Box, buffer: Tensor, counted: bool) -> None:
        """Read a box of a chunk into a contiguous buffer."""
        into, itemsize = bytes_of(buffer), buffer.element_size()
        descriptor, remainder, at = self._descriptor(chunk.file), _Remainder(), 0
        for first, length in _segments(part, chunk.box.shape):
            for begin in range(first * itemsize, (first + length) * itemsize, BLOCK_BYTES):
                row = into[at : at + min(BLOCK_BYTES, (first + length) * itemsize - begin)]
                self._read_from(descriptor, chunk.file, chunk.offset + begin, row)
                if self._has_checksums:
                    remainder.add(begin, row)
                at += len(row)
        if not self._has_checksums:
            return
        num_bytes = chunk.box.numel * itemsize
        value = remainder.in_message_of(num_bytes)
        if part.numel == chunk.box.numel:
            if _crc_of_remainder(value, num_bytes) != chunk.crc32:
                raise self._checksum_error(key, chunk)
        elif counted:
            numel, earlier = self._partial_reads.get((chunk.file, chunk.offset), (0, 0))
            assert numel + part.numel <= chunk.box.numel, f"elements of {key} were read twice"
            self._partial_reads[chunk.file, chunk.offset] = numel + part.numel, earlier ^ value

    def _read_from(self, descriptor: int, file: int, offset: int, into: memoryview) -> None:
        while into:
            try:
                count = os.preadv(descriptor, [into], offset)
            except OSError as error:
                raise read_error(self._path / self._names[file], error) from error
            if count == 0:
                raise self._damage(file, f"ends at byte {offset}")
            self.bytes_read += count
            into, offset = into[count:], offset + count

    def _descriptor(self, file: int) -> int:
        """The descriptor of a file with a verified header. A limited number of files is open at a time."""
        if file not in self._open:
            while len(self._open) >= _MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = self._open_verified(file)
        return self._open[file]

    def _open_verified(self, file: int) -> int:
        facts = self.manifest.files[self._names[file]]
        descriptor = open_plain(self._path / self._names[file])
        try:
            if (size := os.fstat(descriptor).st_size) != facts.bytes:
                raise self._damage(file, f"{size} bytes instead of {facts.bytes}")
            if file not in self._valid_headers:
                header = bytearray(facts.header_bytes)
                self._read_from(descriptor, file, 0, memoryview(header))
                if zlib.crc32(header) != facts.header_crc32:
                    raise self._damage(file, "its header does not have its checksum")
                self._valid_headers.add(file)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _damage(self, file: int, reason: str) -> CheckpointError:
        return damage(self._path / self._names[file], reason)

    # --- verified

    def finish(
        self,
        copy: Group = ALONE,
        everyone: Group = ALONE,
        device: torch.device = CPU,
        error: CheckpointError | None = None,
    ) -> None:
        """Raise CheckpointError on every rank if any data read is damaged: see [Note: verification of data
        read]. `copy`: the ranks that together read one copy of the state. `error`: this rank's error, if it
        could not read everything."""
        raise_on_all(error, everyone, device)
        if self._has_checksums:
            raise_on_all(self._check_shared(copy, device), everyone, device)

    def _check_shared(self, group: Group, device: torch.device) -> CheckpointError | None:
        """All-reduce the counts and remainders of all chunks, so that all ranks get the same result."""
        chunks = [(key, chunk) for key, facts in self.manifest.tensors.items() for chunk in facts.chunks]
        table = torch.zeros(len(chunks), 1 + _NUM_FIELDS, dtype=torch.int64)
        for row, (_, chunk) in enumerate(chunks):
            if read := self._partial_reads.get((chunk.file, chunk.offset)):
                table[row] = torch.tensor([read[0], *_bits_to_fields(read[1])])
        table = table.to(device)
        all_reduce(table, group, label="remainders of chunks")
        for (key, chunk), (numel, *fields) in zip(chunks, table.tolist(), strict=True):
            if numel:
                assert numel == chunk.box.numel, (
                    f"{numel} elements read of a chunk of {chunk.box.numel}: {key}"
                )
                num_bytes = numel * self.manifest.tensors[key].torch_dtype.itemsize
                if _crc_of_remainder(_parity_of_fields(fields), num_bytes) != chunk.crc32:
                    return self._checksum_error(key, chunk)
        return None

    def _checksum_error(self, key: str, chunk: Chunk) -> CheckpointError:
        edges = ", ".join(f"{low}:{high}" for low, high in chunk.box.edges)
        reason = f"{key}[{edges}], from byte {chunk.offset} on, does not have the checksum of the manifest"
        return self._damage(chunk.file, reason)


def _segments(part: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (first element, length) of the contiguous runs of a box in its tensor's memory."""
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


def _bits_to_fields(value: int) -> list[int]:
    """Put each bit of a CRC in a separate field, so that sums over ranks count them."""
    return [
        sum((value >> first + bit & 1) << bit * _FIELD_BITS for bit in range(_FIELDS))
        for first in range(0, _FIELDS * _NUM_FIELDS, _FIELDS)
    ]


def _parity_of_fields(fields: list[int]) -> int:
    """Return the sum modulo 2 of the bits in fields from `_bits_to_fields`."""
    return sum(
        (counts >> bit * _FIELD_BITS & 1) << number * _FIELDS + bit
        for number, counts in enumerate(fields)
        for bit in range(_FIELDS)
    )


class _Remainder:
    """The remainder of one part of a message, or of several added in order, padded with zeros."""

    def __init__(self) -> None:
        self._at = 0
        self._value = 0

    def add(self, at: int, data: memoryview) -> None:
        """Add `data`, which starts `at` bytes into the message, after everything added before."""
        assert at >= self._at, f"byte {at} after byte {self._at}"
        self._value = zlib.crc32(data, _multiply_by_x8n(self._value, at - self._at) ^ _ONES) ^ _ONES
        self._at = at + len(data)

    def in_message_of(self, num_bytes: int) -> int:
        """Return the remainder, padded to a message of `num_bytes`."""
        return _multiply_by_x8n(self._value, num_bytes - self._at)


def _crc_of_remainder(remainder: int, num_bytes: int) -> int:
    """Return the CRC-32 of a message from the XOR of its parts' remainders."""
    return remainder ^ _multiply_by_x8n(_ONES, num_bytes) ^ _ONES


def _multiply_by_x8n(value: int, num_bytes: int) -> int:
    if not (value and num_bytes):
        return value
    first, second, third, fourth = _table(num_bytes)
    return first[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ fourth[value >> 24]


@functools.lru_cache(maxsize=1024)  # 1024 numbers each; the rows of a box have equal distances
def _table(num_bytes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    factor, power, left = 1 << 31, 1 << 23, num_bytes  # x^0, x^8
    while left:
        factor = _multiply(factor, power) if left & 1 else factor
        power, left = _multiply(power, power), left >> 1
    bits = [_multiply(1 << bit, factor) for bit in range(32)]
    first, second, third, fourth = ([0] * 256 for _ in range(4))
    for byte, table in enumerate((first, second, third, fourth)):
        for value in range(1, 256):
            low = value & -value
            table[value] = table[value ^ low] ^ bits[8 * byte + low.bit_length() - 1]
    return first, second, third, fourth


def _multiply(one: int, other: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            result ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result
