"""Offloading to disk (Linux): tensors in a memory-mapped file, and blocks of it that are read and written
while another is updated.

[Note: lifetime of a mapped file]
The file is created, allocated in full and unlinked before anything is written: a killed job leaves no file,
and the disk space is free again when the mapping is gone. Its space is reserved, not only declared: writing
to a page for which the disk has no space raises no exception but SIGBUS.

Pages are loaded when they are accessed and would stay until memory runs short. `evict` removes a tensor's
pages from this process and starts to write them back; pages that are still in the page cache return without a
read. It changes no value.

[Note: direct I/O]
`read` and `write` copy full pages past the page cache (O_DIRECT), which would otherwise hold the same bytes
twice and evict what others read. Linux keeps such transfers and the mapping consistent if they follow each
other: a direct read writes back the mapping's dirty pages first, a direct write drops its pages. They must
not overlap in time. A file system without O_DIRECT gets ordinary transfers, after which the pages are dropped
from the cache.

[Note: blocks in flight]
A block's bytes are in one of DISK_BUFFERS, which are allocated once: `_NUM_READ` are being read, one is
updated, the others are being written. So resident memory does not depend on the files' size, and an
update takes the longer of the disk's time and the optimizer's, not their sum. Threads transfer the bytes:
system calls release the interpreter's lock. Blocks share no page, so transfers of two blocks may overlap.
"""

import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, RunError
from plait.fileio import start_write_back
from plait.plan.memory import DISK_BUFFERS

_NUM_READ = 2
_THREADS = 2


def mapped_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that `MappedFile.allocate` uses for a tensor: a multiple of the page size; tensors share no
    page."""
    return -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


class MappedFile:
    """An unlinked file, mapped into memory. See [Note: lifetime of a mapped file]."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Raises ConfigError if the folder cannot hold such a file."""
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)  # an empty file cannot be mapped
        self._allocated = 0
        self._folder = folder
        self._file, self._direct = _unnamed(folder)
        self._release = weakref.finalize(self, _close, self._file, self._direct)
        _reserve(self._file, folder, self.num_bytes)
        self._map = mmap.mmap(self._file, self.num_bytes)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in the file's next bytes, with a storage of its own that keeps the
        mapping."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        start, self._allocated = self._allocated, self._allocated + mapped_bytes(numel, dtype)
        assert self._allocated <= self.num_bytes, f"the file of {self.num_bytes} bytes was reserved too small"
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)

    def evict(self, tensor: Tensor) -> None:
        """Remove a tensor's pages from this process's memory and start to write those that changed."""
        start, stop = self.pages(tensor)
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        start_write_back(self._file, start, stop - start)

    def offset(self, tensor: Tensor) -> int:
        """The position in the file of a tensor in it, or of a view of one."""
        start = tensor.data_ptr() - self._address
        assert 0 <= start <= start + tensor.nbytes <= self.num_bytes, "the tensor is not in this file"
        return start

    def pages(self, tensor: Tensor) -> tuple[int, int]:
        """The range of bytes of the pages that contain it."""
        start = self.offset(tensor)
        stop = -(-(start + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        return start // mmap.PAGESIZE * mmap.PAGESIZE, stop

    def read(self, into: memoryview, start: int) -> None:
        """Read full pages into memory that begins with a page. See [Note: direct I/O]. Raises RunError."""
        self._transfer(os.preadv, "read", into, start)

    def write(self, source: memoryview, start: int) -> None:
        """Write full pages from memory that begins with a page. See [Note: direct I/O]. Raises RunError."""
        self._transfer(os.pwritev, "written", source, start)

    def _transfer(self, call: Callable[..., int], done: str, memory: memoryview, start: int) -> None:
        descriptor, moved = self._file if self._direct is None else self._direct, 0
        try:
            while moved < len(memory):
                count = call(descriptor, [memory[moved:]], start + moved)
                if not count:
                    raise OSError(errno.EIO, f"{len(memory) - moved:,} bytes are missing")
                moved += count
        except OSError as error:
            raise RunError(
                f"the file for offloading cannot be {done}: this step's update is incomplete",
                given=f"{self._folder}: {error.strerror}, in {len(memory):,} bytes at {start:,}",
                expected="a local disk that works, with the space that was reserved",
                hint="resume from the last checkpoint, with a folder on another disk",
            ) from error
        if self._direct is None:
            start_write_back(self._file, start, len(memory))
            os.posix_fadvise(self._file, start, len(memory), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file: its space is free when the last tensor in it is gone."""
        if self._release.alive:
            self._release()
            del self._map


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _unnamed(folder: Path) -> tuple[int, int | None]:
    """Create a file without a name; return its descriptor and one for direct I/O."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".plait-", dir=folder)
        try:
            direct = _open_direct(name)
        finally:
            Path(name).unlink()
    except OSError as error:
        raise ConfigError(
            "the folder for offloading cannot be used",
            given=f"{folder}: {error.strerror}",
            expected="a folder on a local disk that this user may write to",
            hint=f"mkdir -p {folder}" if error.errno == errno.ENOENT else f"ls -ld {folder}; df -h {folder}",
        ) from error
    if direct is None:
        warnings.warn(
            f"{folder} is on a file system without direct I/O (O_DIRECT): offload=disk goes through the page "
            "cache, and is slower",
            stacklevel=2,
        )
    return descriptor, direct


def _open_direct(name: str) -> int | None:
    """Open a file for direct I/O; None if its file system cannot, or not in units of a page."""
    page: Any = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    try:
        os.pwritev(descriptor, [page], 0)
        os.preadv(descriptor, [page], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _reserve(descriptor: int, folder: Path, num_bytes: int) -> None:
    """Reserve the space; check the free space first, so that a file too large does not fill the disk."""
    disk = os.fstatvfs(descriptor)
    free = disk.f_bavail * disk.f_frsize
    try:
        if num_bytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise ConfigError(
            "the folder for offloading has no space for this rank's tensors",
            given=f"{folder}: {free:,} bytes are free ({error.strerror})",
            expected=f"{num_bytes:,} bytes",
            hint="a folder on a larger disk, or more ranks to share the states",
        ) from error


@dataclass(frozen=True)
class PageSpan:
    """A range of complete pages of a file."""

    file: MappedFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass
class _InFlight:
    block: int
    buffer: mmap.mmap
    transfers: list[Future[None]]


class DiskPipeline:
    """Reads blocks ahead of their update and writes them after it. See [Note: blocks in flight]."""

    def __init__(self, blocks: Sequence[Sequence[PageSpan]]) -> None:
        """`blocks`: in the order in which they are updated."""
        self._blocks = blocks
        self._buffer_bytes = max(sum(span.num_bytes for span in spans) for spans in blocks)
        self._free: list[mmap.mmap] = []
        self._num_buffers = 0
        self._current: _InFlight | None = None  # between `load` and `store`
        self._reads: deque[_InFlight] = deque()
        self._writes: deque[_InFlight] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, "plait-disk")

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._num_buffers * self._buffer_bytes

    def load(self, block: int) -> Tensor:
        """Return the block's bytes, span after span, for updating; start to read the blocks after it.

        Raises RunError if a transfer has failed, of this block or an earlier one.
        """
        assert self._current is None, "the last block was not stored"
        if not self._reads or self._reads[0].block != block:
            self.finish()  # another order than expected, or a block that is being written
            self._reads.append(self._start(block, self._take_buffer(), reads=True))
        self._current = current = self._reads.popleft()
        first = self._reads[-1].block + 1 if self._reads else block + 1
        for later in range(first, min(block + 1 + _NUM_READ, len(self._blocks))):
            self._reads.append(self._start(later, self._take_buffer(), reads=True))
        _raise_errors(current)
        return torch.frombuffer(current.buffer, dtype=torch.uint8)

    def store(self) -> None:
        """Start to write the block that was loaded last."""
        assert self._current is not None, "no block was loaded"
        self._writes.append(self._start(self._current.block, self._current.buffer, reads=False))
        self._current = None

    def finish(self) -> None:
        """Wait for all writes, and drop what was read ahead. Raises RunError if a write has failed; then none
        is in flight either: it would overwrite a state that is loaded next."""
        while self._reads:
            self._release(self._reads.popleft())
        try:
            while self._writes:
                self._finish_oldest_write()
        except RunError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait for all transfers, whether they fail or not."""
        if self._current is not None:
            self._reads.append(self._current)
            self._current = None
        for in_flight in (*self._reads, *self._writes):
            self._release(in_flight)
        self._reads.clear()
        self._writes.clear()

    def close(self) -> None:
        """End the threads."""
        self.abandon()
        self._threads.shutdown()

    def _start(self, block: int, buffer: mmap.mmap, *, reads: bool) -> _InFlight:
        transfers, offset = [], 0
        for span in self._blocks[block]:
            call = span.file.read if reads else span.file.write
            memory = memoryview(buffer)[offset : offset + span.num_bytes]
            transfers.append(self._threads.submit(call, memory, span.start))
            offset += span.num_bytes
        return _InFlight(block, buffer, transfers)

    def _take_buffer(self) -> mmap.mmap:
        if not self._free and self._num_buffers < DISK_BUFFERS:
            self._num_buffers += 1
            # Aligned to pages, as direct I/O requires.
            return mmap.mmap(-1, self._buffer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not self._free:
            self._finish_oldest_write()
        return self._free.pop()

    def _finish_oldest_write(self) -> None:
        oldest = self._writes.popleft()
        self._release(oldest)
        _raise_errors(oldest)

    def _release(self, in_flight: _InFlight) -> None:
        wait(in_flight.transfers)
        self._free.append(in_flight.buffer)


def _raise_errors(in_flight: _InFlight) -> None:
    for transfer in in_flight.transfers:
        transfer.result()
