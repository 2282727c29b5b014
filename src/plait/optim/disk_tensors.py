"""Tensors in a memory-mapped file: offloading to disk (Linux).

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
"""

import ctypes
import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, RunError

_SYNC_FILE_RANGE_WRITE = 2  # start write-back of dirty pages without waiting


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
        self._libc = ctypes.CDLL(None)
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
        self._start_write_back(start, stop - start)

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
            self._start_write_back(start, len(memory))
            os.posix_fadvise(self._file, start, len(memory), os.POSIX_FADV_DONTNEED)

    def _start_write_back(self, start: int, length: int) -> None:
        self._libc.sync_file_range(
            self._file, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE
        )

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
