"""Tensors in a memory-mapped file: offloading to disk (Linux).

[Note: lifetime of a mapped file]
The file is created, allocated in full and unlinked before anything is written: a killed job leaves no file,
and the disk space is free again when the mapping is gone. Its space is reserved, not only declared: writing
to a page for which the disk has no space raises no exception but SIGBUS.

Pages are loaded when they are accessed and would stay until memory runs short. `evict` removes a tensor's
pages from this process and starts to write them back; those that are still in the page cache return without a
read. `prefetch` starts to read ahead. Neither changes a value.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from plait.errors import ConfigError

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
        self._file = _unnamed(folder)
        self._release = weakref.finalize(self, os.close, self._file)
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

    def prefetch(self, tensor: Tensor) -> None:
        """Start to read the pages of a tensor in this file, or of a view of one."""
        self._map.madvise(mmap.MADV_WILLNEED, *self._pages(tensor))

    def evict(self, tensor: Tensor) -> None:
        """Remove a tensor's pages from this process's memory and start to write those that changed."""
        start, length = self._pages(tensor)
        self._map.madvise(mmap.MADV_DONTNEED, start, length)
        self._libc.sync_file_range(
            self._file, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE
        )

    def close(self) -> None:
        """Close the file: its space is free when the last tensor in it is gone."""
        if self._release.alive:
            self._release()
            del self._map

    def _pages(self, tensor: Tensor) -> tuple[int, int]:
        start = tensor.data_ptr() - self._address
        stop = start + tensor.nbytes
        assert 0 <= start <= stop <= self.num_bytes, "the tensor is not in this file"
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        return first, stop - first


def _unnamed(folder: Path) -> int:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".plait-", dir=folder)
        Path(name).unlink()
    except OSError as error:
        raise ConfigError(
            "the folder for offloading cannot be used",
            given=f"{folder}: {error.strerror}",
            expected="a folder on a local disk that this user may write to",
            hint=f"mkdir -p {folder}" if error.errno == errno.ENOENT else None,
        ) from error
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
