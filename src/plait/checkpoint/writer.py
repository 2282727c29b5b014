"""Write a rank's files: the boxes that it owns, contiguously."""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.checkpoint.manifest import Chunk, FileFacts, RankFiles, TensorFacts
from plait.checkpoint.safetensors_format import DTYPE_NAMES, TensorEntry, encode_header
from plait.fileio import start_write_back
from plait.parallel.zero.state_io import StateShard, view_of
from plait.plan import Box
from plait.plan.sharding import boxes_of_range

CHUNK_BYTES = 16 * 2**20  # at most, and of at least one row
FILE_BYTES = 4 * 2**30  # about; a chunk is in one file
_FILE_CHUNKS = 100_000  # at most: safetensors limits the size of a header
BLOCK_BYTES = 2**18  # per read or write
_FLUSH_BYTES = 32 * 2**20
_BUFFER_BYTES = 2**18  # norms and biases are written together


@dataclass(frozen=True)
class _PlacedChunk:
    """A chunk and its place in the files. The shard's elements are runs of boxes; the chunk is in one run."""

    shard: StateShard
    run_start: int  # the run's first element, counted from the shard's
    run: Box
    box_in_run: Box
    box: Box  # of the full tensor
    file: int
    offset: int  # bytes from the end of its file's header

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.shard.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """The chunk as a view of the shard's flat tensor."""
        run = flat[self.run_start : self.run_start + self.run.numel].view(self.run.shape)
        return view_of(run, self.box_in_run)


def write_rank_files(
    folder: Path,
    rank: int,
    shards: Sequence[StateShard],
    source: Callable[[StateShard], Tensor] = StateShard.cpu,
) -> RankFiles:
    """Write the shards to `rank-00003.0.safetensors`, .1 and so on, and sync them to the disk. `source`
    returns a shard's elements on the CPU. Raises OSError."""
    files: dict[str, FileFacts] = {}
    written: dict[str, list[Chunk]] = {shard.key: [] for shard in shards}
    current: tuple[StateShard, Tensor] | None = None
    for number, group in groupby(_place_chunks(shards), lambda chunk: chunk.file):
        chunks = list(group)
        header, name = _header(chunks), f"rank-{rank:05d}.{number}.safetensors"
        with (folder / name).open("xb", buffering=_BUFFER_BYTES) as file:
            file.write(header)
            flushed = 0
            for chunk in chunks:
                if current is None or current[0] is not chunk.shard:
                    current = (chunk.shard, source(chunk.shard))
                crc = _write(file, bytes_of(chunk.view(current[1])))
                place = Chunk(number, len(header) + chunk.offset, chunk.box.start, chunk.box.stop, crc)
                written[chunk.shard.key].append(place)
                flushed = _start_flush(file, flushed)
            file.flush()
            os.fsync(file.fileno())
        size = len(header) + sum(chunk.num_bytes for chunk in chunks)
        files[name] = FileFacts(bytes=size, header_bytes=len(header), header_crc32=zlib.crc32(header))
    tensors = {
        shard.key: TensorFacts(
            shape=shard.full_shape, dtype=DTYPE_NAMES[shard.dtype], chunks=tuple(written[shard.key])
        )
        for shard in shards
    }
    return RankFiles(files=files, tensors=tensors)


def _write(file: BinaryIO, data: memoryview) -> int:
    """Write `data` and return its CRC-32, block by block, so that both read it from cache."""
    crc = 0
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc


def _start_flush(file: BinaryIO, flushed: int) -> int:
    """Start writing back the data since `flushed` once there is enough of it, so that `fsync` takes less
    time. Return the offset up to which it has started."""
    written = file.tell()
    if written - flushed < _FLUSH_BYTES:
        return flushed
    start_write_back(file.fileno(), flushed, written - flushed)
    return written


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a CPU tensor's elements in row-major order: its own memory if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


def _place_chunks(shards: Iterable[StateShard]) -> Iterator[_PlacedChunk]:
    """Yield every chunk with its place in the files, computed from shapes alone."""
    file = offset = number = 0
    for shard in shards:
        run_start = 0
        for run in boxes_of_range(shard.boxes.shape, shard.start, shard.stop):
            for box, box_in_run in shard.boxes.parts(run):
                for low, high in _row_ranges(box.shape, shard.dtype.itemsize):
                    rows, rows_in_run = (_slice_rows(each, low, high) for each in (box, box_in_run))
                    num_bytes = rows.numel * shard.dtype.itemsize
                    if number == _FILE_CHUNKS or (offset and offset + num_bytes > FILE_BYTES):
                        file, offset, number = file + 1, 0, 0
                    yield _PlacedChunk(shard, run_start, run, rows_in_run, rows, file, offset)
                    offset, number = offset + num_bytes, number + 1
            run_start += run.numel


def _row_ranges(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Split a box into ranges of rows of at most CHUNK_BYTES."""
    if not shape:
        yield 0, 1
        return
    num_rows = max(1, CHUNK_BYTES // (itemsize * math.prod(shape[1:])))
    for low in range(0, shape[0], num_rows):
        yield low, min(shape[0], low + num_rows)


def _slice_rows(box: Box, low: int, high: int) -> Box:
    if not box.start:
        return box
    first = box.start[0]
    return Box((first + low, *box.start[1:]), (first + high, *box.stop[1:]))


def _header(chunks: Sequence[_PlacedChunk]) -> bytes:
    entries = {}
    for chunk in chunks:
        edges = ",".join(f"{low}:{high}" for low, high in chunk.box.edges)
        entry = TensorEntry.from_start(chunk.shard.dtype, chunk.box.shape, chunk.offset)
        entries[f"{chunk.shard.key}[{edges}]"] = entry
    return encode_header(entries)
