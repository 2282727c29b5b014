"""Memory shared by the ranks of one host: each rank's arena, and tensors in it.

[Note: anonymous shared files]
Segments are memfds: files that live in memory and have no name. Peers of the same user open them through
`/proc/PID/fd` and map them, and no trace is left when the last of them ends, however it ends. Unlike files in
/dev/shm, which a container often limits to 64 MB, they may be as large as memory.

[Note: the arena]
A rank's arena is one file, of which every rank of the host maps more addresses than there is memory; it grows
when tensors are allocated. So peers need only a tensor's offset to reach it, and allocation needs no
communication. Freed memory stays in the arena for the next tensor: the first touch of a page costs more than
any later use of it (4 KiB: a microsecond or more), so returning pages and taking new ones would take longer
than the communication itself.

[Note: memory in use by peers]
A tensor may be freed while peers still read it. `Arena.defer` registers a condition for the reuse of its
memory, which is then skipped as long as there is other free memory, and waited for, briefly, before the arena
grows. Not for longer: peers may need something of this rank before they read.

[Note: deferred frees]
Python's collector may free a tensor at any line, also inside the arena's own code, and other threads free
theirs meanwhile. So freeing only appends to a queue; the next allocation processes it, holding the lock.
"""

import ctypes
import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CommError

_PAGE = 4096
_MAX_WAIT_S = 0.1  # for memory that peers still read; then the arena grows
_POLL_S = 0.0001


@dataclass
class _Allocation:
    """A range of an arena that is in use, or freed but maybe still read by peers."""

    start: int
    stop: int
    readers_done: list[Callable[[], bool]] = field(default_factory=list)  # one per pending read

    def is_read(self) -> bool:
        self.readers_done = [is_done for is_done in self.readers_done if not is_done()]
        return not self.readers_done


@dataclass
class FreeList:
    """The free ranges of an arena, in bytes: disjoint, ordered, not adjacent."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the start of the first range that is long enough, and shrink it."""
        for index, (start, stop) in enumerate(self.ranges):
            if stop - start >= num_bytes:
                rest = [(start + num_bytes, stop)] if stop - start > num_bytes else []
                self.ranges[index : index + 1] = rest
                return start
        return None

    def free(self, start: int, stop: int) -> None:
        """Return a range, merged with its neighbors."""
        index = sum(other < start for other, _ in self.ranges)
        if index < len(self.ranges) and self.ranges[index][0] == stop:
            stop = self.ranges.pop(index)[1]
        if index and self.ranges[index - 1][1] == start:
            index -= 1
            start = self.ranges.pop(index)[0]
        self.ranges.insert(index, (start, stop))


class Mapping:
    """A shared file in memory, mapped for the lifetime of this object."""

    def __init__(self, library: ctypes.CDLL, fd: int, num_bytes: int) -> None:
        """Raises CommError if there are no addresses for it."""
        address = library.pl_map(fd, num_bytes)
        if address is None:
            raise CommError(
                "no address space for the memory that ranks share",
                given=f"{num_bytes >> 30} GiB of address space were refused",
                expected="no limit of the address space",
                hint="ulimit -v unlimited",
            )
        self.address: int = address
        self.num_bytes = num_bytes
        weakref.finalize(self, library.pl_unmap, address, num_bytes).atexit = False  # the kernel unmaps


class Arena:
    """A rank's memory that its peers read and write. See [Note: the arena]."""

    def __init__(self, library: ctypes.CDLL, span_bytes: int) -> None:
        """`span_bytes`: address range, larger than the arena can ever be."""
        self.fd = os.memfd_create("plait-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, span_bytes)  # fails if the system limits file sizes
            os.ftruncate(self.fd, 0)
            self.mapping = Mapping(library, self.fd, span_bytes)
        except (CommError, OSError):
            os.close(self.fd)
            raise
        self._free_list = FreeList()
        self._size = 0  # of the file: the peak so far
        self._allocations: dict[int, _Allocation] = {}  # by start
        self._pending_free: list[_Allocation] = []  # see [Note: memory in use by peers]
        self._freed: deque[int] = deque()  # see [Note: deferred frees]
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory taken from the system."""
        return self._size

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._reclaim()
            return sum(allocation.stop - allocation.start for allocation in self._allocations.values())

    def owns(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.mapping.address < self.mapping.num_bytes

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor in this arena. Raises CommError without memory for it."""
        num_bytes = max(1, math.ceil(numel * dtype.itemsize / _PAGE)) * _PAGE
        start = self._allocate(num_bytes)
        return as_tensor(self.mapping.address + start, numel, dtype, _AllocationRef(self, start))

    def defer(self, tensor: Tensor, reader_done: Callable[[], bool]) -> None:
        """Do not reuse the memory of `tensor` before `reader_done`, which must not reference the tensor."""
        offset = tensor.data_ptr() - self.mapping.address
        with self._lock:
            allocation = next((a for a in self._allocations.values() if a.start <= offset < a.stop), None)
            if allocation is not None:
                allocation.is_read()  # drops finished readers
                allocation.readers_done.append(reader_done)

    def close(self) -> None:
        """Close the file: it can be mapped no more. Tensors stay valid until they are freed."""
        os.close(self.fd)
        with self._lock:
            self._pending_free.clear()
            for allocation in self._allocations.values():
                allocation.readers_done.clear()

    def _reclaim(self) -> None:
        """Make freed memory that no peer reads available again."""
        while self._freed:
            self._pending_free.append(self._allocations.pop(self._freed.popleft()))
        for allocation in [allocation for allocation in self._pending_free if allocation.is_read()]:
            self._pending_free.remove(allocation)
            self._free_list.free(allocation.start, allocation.stop)

    def _allocate(self, num_bytes: int) -> int:
        """See [Note: memory in use by peers]."""
        deadline_s = time.monotonic() + _MAX_WAIT_S
        while True:
            with self._lock:
                self._reclaim()
                start = self._free_list.allocate(num_bytes)
                if start is None and (not self._pending_free or time.monotonic() > deadline_s):
                    start = self._grow(num_bytes)
                if start is not None:
                    self._allocations[start] = _Allocation(start, start + num_bytes)
                    return start
            time.sleep(_POLL_S)

    def _grow(self, num_bytes: int) -> int:
        start = self._size
        last = self._free_list.ranges[-1] if self._free_list.ranges else (0, -1)
        if last[1] == self._size:  # extends the free range at the end
            start = self._free_list.ranges.pop()[0]
        try:
            reserve(self.fd, self._size, start + num_bytes - self._size)
        except CommError:
            if start < self._size:
                self._free_list.free(start, self._size)
            raise
        self._size = start + num_bytes
        return start


def reserve(fd: int, start: int, num_bytes: int) -> None:
    """Allocate memory for a range of a file in memory. Raises CommError if there is too little."""
    available = available_bytes()
    try:
        if num_bytes > available:
            raise OSError
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        raise CommError(
            "too little memory for the ranks' shared memory",
            given=f"{_mib(num_bytes)} more are needed, {_mib(available)} are free",
            expected="memory for the shards of all ranks of this host",
            hint="a higher zero stage, fewer ranks on this host, or a higher memory limit of the container",
        ) from error


def available_bytes() -> int:
    """Return the memory that this host, or the control group of this process, has available."""
    available = next(
        int(line.split()[1]) << 10 for line in _read_lines("/proc/meminfo") if "MemAvailable" in line
    )
    for folder in _memory_groups():
        limit, used = (_read_lines(folder / name) for name in ("memory.max", "memory.current"))
        if limit and used and limit[0].strip().isdigit():
            stat = dict(line.split() for line in _read_lines(folder / "memory.stat"))
            cache = int(stat.get("file", 0)) - int(stat.get("shmem", 0))
            available = min(available, int(limit[0]) - int(used[0]) + cache)
    return max(0, available)


@functools.cache
def _memory_groups() -> tuple[Path, ...]:
    """Return the folders of this process's control group and of those that contain it, as far as they may
    limit memory. Looked for once: each unit's storage asks for the memory that is available."""
    names = [line.rpartition(":")[2].strip().lstrip("/") for line in _read_lines("/proc/self/cgroup")]
    folders = [Path("/sys/fs/cgroup") / name for name in names]
    found = dict.fromkeys(each for folder in folders for each in (folder, *folder.parents))
    return tuple(folder for folder in found if (folder / "memory.max").exists())


def _read_lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


class _AllocationRef:
    """Keeps a range of an arena allocated for as long as a tensor refers to it."""

    def __init__(self, arena: Arena, start: int) -> None:
        self._arena = arena  # and its mapping
        self._start = start

    def __del__(self) -> None:
        self._arena._freed.append(self._start)


def as_tensor(address: int, numel: int, dtype: torch.dtype, owner: object) -> Tensor:
    """Return a flat tensor over memory that `owner` keeps alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = _ArrayInterface(address, numel * dtype.itemsize, owner)
    return torch.from_numpy(np.asarray(memory)).view(dtype)


class _ArrayInterface:
    """numpy's array interface for an address; references the owner."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
