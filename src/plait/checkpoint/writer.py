"""A rank's files: the boxes that it owns, one behind the other."""

import ctypes
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.checkpoint.crc32 import crc32
from plait.checkpoint.manifest import Chunk, FileFacts, Part, TensorFacts
from plait.checkpoint.safetensors_format import NAMES, Entry, header_text
from plait.parallel import StateShard, view_of
from plait.plan import Box, boxes_of_range

CHUNK_BYTES = 16 * 2**20  # at most, and of at least one row
FILE_BYTES = 4 * 2**30  # about; a chunk lies in one file
_FILE_CHUNKS = 100_000  # at most: what safetensors reads of a header is bounded
BLOCK_BYTES = 2**18  # at a time to or from a file
_FLUSH_BYTES = 32 * 2**20
_START_ONLY = 2  # SYNC_FILE_RANGE_WRITE
_BUFFER_BYTES = 2**18  # norms and biases go to the file together


@dataclass(frozen=True)
class _Placed:
    """A chunk to be: box `at` of rows of what is kept, which begin with element `row`."""

    kept: StateShard
    row: int  # counted from the first that is kept
    rows: Box
    at: Box
    box: Box  # of the whole tensor
    file: int
    offset: int  # bytes from the end of its file's header

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.kept.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Of what is kept."""
        return view_of(flat[self.row : self.row + self.rows.numel].view(self.rows.shape), self.at)


def write_part(
    folder: Path,
    rank: int,
    kept: Sequence[StateShard],
    source: Callable[[StateShard], Tensor] = StateShard.cpu,
) -> Part:
    """Writes what is kept into `rank-00003.0.safetensors`, and .1 and so on, on the disk when it returns.
    `source` gives what is in it, on the CPU. Raises OSError."""
    placed = list(_place(kept))
    files = [list(chunks) for _, chunks in groupby(placed, lambda chunk: chunk.file)]
    headers = [_header(chunks) for chunks in files]
    facts: dict[str, FileFacts] = {}
    sums: list[int] = []
    held: tuple[StateShard, Tensor] | None = None
    for number, (chunks, header) in enumerate(zip(files, headers, strict=True)):
        name = f"rank-{rank:05d}.{number}.safetensors"
        with (folder / name).open("xb", buffering=_BUFFER_BYTES) as file:
            file.write(header)
            flushed = 0
            for chunk in chunks:
                if held is None or held[0] is not chunk.kept:
                    held = (chunk.kept, source(chunk.kept))
                sums.append(_write(file, bytes_of(chunk.view(held[1]))))
                flushed = _begin_to_flush(file, flushed)
            file.flush()
            os.fsync(file.fileno())
        size = len(header) + sum(chunk.num_bytes for chunk in chunks)
        facts[name] = FileFacts(bytes=size, header_bytes=len(header), header_crc32=crc32(header))
    return Part(files=facts, tensors=_tensors(kept, placed, headers, sums))


def _write(file: BinaryIO, data: memoryview) -> int:
    """The CRC-32 of what is written: both read a block at a time, while it is in cache."""
    crc = 0
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        crc = crc32(block, crc)
        file.write(block)
    return crc


@functools.cache
def _start_flush() -> Any:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def _begin_to_flush(file: BinaryIO, flushed: int) -> int:
    """The disk begins with what has come since `flushed`, once that is much, while we go on: `fsync` then has
    less to wait for. Where the C library has no such call, all is left to it. Up to where it has begun."""
    written = file.tell()
    if written - flushed < _FLUSH_BYTES or (start := _start_flush()) is None:
        return flushed
    start(file.fileno(), ctypes.c_int64(flushed), ctypes.c_int64(written - flushed), _START_ONLY)
    return written


def bytes_of(tensor: Tensor) -> memoryview:
    """A CPU tensor's elements, row by row: its own memory where they lie so."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


def _place(kept: Iterable[StateShard]) -> Iterator[_Placed]:
    """Where every chunk comes to lie; of the shapes alone."""
    file = offset = number = 0
    for each in kept:
        row = 0
        for rows in boxes_of_range(each.boxes.shape, each.start, each.stop):
            for box, at in each.boxes.parts(rows):
                for low, high in _small(box.shape, each.dtype.itemsize):
                    chunk = _Placed(
                        each, row, rows, _rows(at, low, high), _rows(box, low, high), file, offset
                    )
                    if number == _FILE_CHUNKS or (offset and offset + chunk.num_bytes > FILE_BYTES):
                        file, offset, number = file + 1, 0, 0
                        chunk = replace(chunk, file=file, offset=offset)
                    yield chunk
                    offset, number = offset + chunk.num_bytes, number + 1
            row += rows.numel


def _small(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """A box in runs of rows of at most CHUNK_BYTES."""
    if not shape:
        yield 0, 1
        return
    step = max(1, CHUNK_BYTES // (itemsize * math.prod(shape[1:])))
    for low in range(0, shape[0], step):
        yield low, min(shape[0], low + step)


def _rows(box: Box, low: int, high: int) -> Box:
    if not box.start:
        return box
    first = box.start[0]
    return Box((first + low, *box.start[1:]), (first + high, *box.stop[1:]))


def _header(chunks: Sequence[_Placed]) -> bytes:
    entries = {
        f"{chunk.kept.key}[{','.join(f'{low}:{high}' for low, high in chunk.box.edges)}]": Entry.of(
            chunk.kept.dtype, chunk.box.shape, chunk.offset
        )
        for chunk in chunks
    }
    return header_text(entries)


def _tensors(
    kept: Iterable[StateShard], placed: Sequence[_Placed], headers: Sequence[bytes], sums: Sequence[int]
) -> dict[str, TensorFacts]:
    chunks: dict[str, list[Chunk]] = {each.key: [] for each in kept}
    for chunk, crc in zip(placed, sums, strict=True):
        offset = len(headers[chunk.file]) + chunk.offset
        found = Chunk(chunk.file, offset, chunk.box.start, chunk.box.stop, crc)
        chunks[chunk.kept.key].append(found)
    return {
        each.key: TensorFacts(shape=each.full_shape, dtype=NAMES[each.dtype], chunks=tuple(chunks[each.key]))
        for each in kept
    }
