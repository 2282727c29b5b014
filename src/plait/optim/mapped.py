"""Tensors that live in a file: a folder's disk as room for what memory cannot hold (Linux).

[Note: the life of a mapped file]
The file is made, given its whole size and unlinked before anything is written: no name is left behind when
a job is killed, and the disk's space is free again when the mapping goes. Its size is reserved and not only
declared: a write to a page for which the disk has no room left is no exception but a SIGBUS.

Pages come in when they are touched and would stay until memory runs short. `forget` takes a tensor's pages
out of this process and starts writing them back; what the page cache still holds of them comes back without
reading. `expect` starts reading ahead. Neither changes a value.
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

_SYNC_FILE_RANGE_WRITE = 2  # starts write-back of dirty pages, waits for nothing


def mapped_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a file that `MappedFile.take` uses for a tensor: whole pages, none shared with another."""
    return -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


class MappedFile:
    """A file without a name, mapped into memory. See [Note: the life of a mapped file]."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Raises ConfigError when the folder cannot hold such a file."""
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)  # an empty file cannot be mapped
        self._taken = 0
        self._libc = ctypes.CDLL(None)
        self._file = _unnamed(folder)
        self._release = weakref.finalize(self, os.close, self._file)
        _reserve(self._file, folder, self.num_bytes)
        self._map = mmap.mmap(self._file, self.num_bytes)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, with a storage of its own, in the file's next bytes. It keeps the mapping."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        start, self._taken = self._taken, self._taken + mapped_bytes(numel, dtype)
        assert self._taken <= self.num_bytes, f"the file of {self.num_bytes} bytes was reserved too small"
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)

    def expect(self, tensor: Tensor) -> None:
        """Starts reading a tensor, or a view of one, that this file gave out."""
        self._map.madvise(mmap.MADV_WILLNEED, *self._pages(tensor))

    def forget(self, tensor: Tensor) -> None:
        """Takes its pages out of this process's memory and starts to write what changed."""
        start, length = self._pages(tensor)
        self._map.madvise(mmap.MADV_DONTNEED, start, length)
        self._libc.sync_file_range(
            self._file, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE
        )

    def close(self) -> None:
        """Lets go of the file: its space is free when the last tensor in it is gone."""
        if self._release.alive:
            self._release()
            del self._map

    def _pages(self, tensor: Tensor) -> tuple[int, int]:
        start = tensor.data_ptr() - self._address
        stop = start + tensor.nbytes
        assert 0 <= start <= stop <= self.num_bytes, "a tensor that is not in this file"
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
    """Asks for the free space first, lest a file that is too large fills the disk before it fails."""
    disk = os.fstatvfs(descriptor)
    free = disk.f_bavail * disk.f_frsize
    try:
        if num_bytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise ConfigError(
            "the folder for offloading has no room for this rank's tensors",
            given=f"{folder}: {free:,} bytes are free ({error.strerror})",
            expected=f"{num_bytes:,} bytes",
            hint="a folder on a larger disk, or more ranks to share the states",
        ) from error
