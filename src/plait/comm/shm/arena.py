"""Memory that the ranks of one host share: each rank's arena, and tensors in it.

[Note: files in memory without names]
Segments are memfds: files that live in memory and have no name. Peers of the same user open them through
`/proc/PID/fd`, map them, and no trace is left when the last of them ends, however it ends. Unlike files in
/dev/shm, which a container often limits to 64 MB, they may be as large as memory.

[Note: the arena]
A rank's arena is one file of which every rank of the host maps more addresses than there is memory; it grows
when tensors are allocated. So a tensor's place in it is all that peers need to know to reach it, and
allocating asks nobody. Memory that is freed stays in the arena for the next tensor: the first touch of a page
costs more than anything that is ever done with it (4 KiB: a microsecond or more), so that giving pages back
and taking new ones would take longer than the communication itself.

[Note: memory that peers still read]
A tensor may be freed while peers read what it held. `Arena.defer` says until when its memory must not be used
again; it is then passed over for as long as there is other free memory, and waited for, a little, before the
arena grows. Not for longer: what peers do before they read may need something of this rank.

[Note: tensors are freed anywhere]
Python's collector may free a tensor at any line, also of the arena's own, and other threads free theirs
meanwhile. So what frees only writes down that it did; who allocates next looks, holding the lock.
"""

import ctypes
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
_PATIENCE_S = 0.1  # for memory that peers still read; once, then there is more
_LOOK_S = 0.0001


@dataclass
class _Piece:
    """A piece of an arena that is in use, or that is free but may still be read."""

    start: int
    stop: int
    reads: list[Callable[[], bool]] = field(default_factory=list)  # whether peers have read it

    def is_read(self) -> bool:
        self.reads = [is_read for is_read in self.reads if not is_read()]
        return not self.reads


@dataclass
class Ranges:
    """What is free of an arena: disjoint ranges of bytes in order, none next to another."""

    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, num_bytes: int) -> int | None:
        """The start of the first range that is long enough, which shrinks."""
        for index, (start, stop) in enumerate(self.free):
            if stop - start >= num_bytes:
                self.free[index : index + 1] = [(start + num_bytes, stop)] if stop - start > num_bytes else []
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        """Puts a range back, joined with its neighbours."""
        index = sum(other < start for other, _ in self.free)
        if index < len(self.free) and self.free[index][0] == stop:
            stop = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, stop))


class Mapping:
    """A shared file in memory, mapped as long as this object lives."""

    def __init__(self, library: ctypes.CDLL, fd: int, num_bytes: int) -> None:
        """Raises CommError where there are no addresses for it."""
        address = library.pl_map(fd, num_bytes)
        if address is None:
            raise CommError(
                "no addresses for the memory that ranks share",
                given=f"{num_bytes >> 30} GiB of addresses were refused",
                hint="ulimit -v unlimited",
            )
        self.address: int = address
        self.num_bytes = num_bytes
        weakref.finalize(self, library.pl_unmap, address, num_bytes).atexit = False  # the kernel does it


class Arena:
    """A rank's memory that its peers read and write. See [Note: the arena]."""

    def __init__(self, library: ctypes.CDLL, span_bytes: int) -> None:
        """`span_bytes`: of addresses; more than it can ever hold."""
        self.fd = os.memfd_create("plait-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, span_bytes)  # refused where the system limits the sizes of files
            os.ftruncate(self.fd, 0)
            self.mapping = Mapping(library, self.fd, span_bytes)
        except (CommError, OSError):
            os.close(self.fd)
            raise
        self._ranges = Ranges()
        self._size = 0  # of the file: all that was ever needed at a time
        self._used: dict[int, _Piece] = {}  # by start
        self._busy: list[_Piece] = []  # see [Note: memory that peers still read]
        self._freed: deque[int] = deque()  # see [Note: tensors are freed anywhere]
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that it has taken from the system."""
        return self._size

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(piece.stop - piece.start for piece in self._used.values())

    def owns(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.mapping.address < self.mapping.num_bytes

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in this arena; what is in it is undefined. Raises CommError without memory for it."""
        num_bytes = max(1, math.ceil(numel * dtype.itemsize / _PAGE)) * _PAGE
        start = self._take(num_bytes)
        return as_tensor(self.mapping.address + start, numel, dtype, _Block(self, start))

    def defer(self, tensor: Tensor, is_read: Callable[[], bool]) -> None:
        """The memory of `tensor`, once freed, is not used again before `is_read`, which must not hold on to
        the tensor."""
        place = tensor.data_ptr() - self.mapping.address
        with self._lock:
            piece = next((p for p in self._used.values() if p.start <= place < p.stop), None)
            if piece is not None:
                piece.is_read()  # forgets those who have
                piece.reads.append(is_read)

    def close(self) -> None:
        """Nobody will map it any more. Tensors stay until they are freed."""
        os.close(self.fd)
        with self._lock:
            self._busy.clear()
            for piece in self._used.values():
                piece.reads.clear()

    def _take_back(self) -> None:
        """What was freed, and what peers have read, can be used again."""
        while self._freed:
            self._busy.append(self._used.pop(self._freed.popleft()))
        for piece in [piece for piece in self._busy if piece.is_read()]:
            self._busy.remove(piece)
            self._ranges.give(piece.start, piece.stop)

    def _take(self, num_bytes: int) -> int:
        """See [Note: memory that peers still read]."""
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            with self._lock:
                self._take_back()
                start = self._ranges.take(num_bytes)
                if start is None and (not self._busy or time.monotonic() > until_s):
                    start = self._grow(num_bytes)
                if start is not None:
                    self._used[start] = _Piece(start, start + num_bytes)
                    return start
            time.sleep(_LOOK_S)

    def _grow(self, num_bytes: int) -> int:
        start = self._size
        last = self._ranges.free[-1] if self._ranges.free else (0, -1)
        if last[1] == self._size:  # free memory at the end is a part of it
            start = self._ranges.free.pop()[0]
        try:
            reserve(self.fd, self._size, start + num_bytes - self._size)
        except CommError:
            if start < self._size:
                self._ranges.give(start, self._size)
            raise
        self._size = start + num_bytes
        return start


def reserve(fd: int, start: int, num_bytes: int) -> None:
    """Takes memory for a range of a file in memory. Raises CommError where there is too little."""
    found = available_bytes()
    try:
        if num_bytes > found:
            raise OSError
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        raise CommError(
            "there is too little memory for what the ranks share",
            given=f"{_mib(num_bytes)} more are needed, {_mib(found)} are free",
            hint="a higher zero stage, fewer ranks on this host, or a higher memory limit of the container",
        ) from error


def available_bytes() -> int:
    """Memory of this host, or of the control group that limits this process, that can still be taken."""
    found = next(int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if "MemAvailable" in line)
    for line in _lines("/proc/self/cgroup"):
        folder = Path("/sys/fs/cgroup") / line.rpartition(":")[2].strip().lstrip("/")
        for place in (folder, *folder.parents):
            limit, used = (_lines(place / name) for name in ("memory.max", "memory.current"))
            if limit and used and limit[0].strip().isdigit():
                cache = next(
                    (int(x.split()[1]) for x in _lines(place / "memory.stat") if x.startswith("file ")), 0
                )
                shmem = next(
                    (int(x.split()[1]) for x in _lines(place / "memory.stat") if x.startswith("shmem ")), 0
                )
                found = min(found, int(limit[0]) - int(used[0]) + cache - shmem)
    return max(0, found)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


class _Block:
    """Keeps a piece of an arena in use, for as long as a tensor refers to it."""

    def __init__(self, arena: Arena, start: int) -> None:
        self._arena = arena  # and with it the mapping
        self._start = start

    def __del__(self) -> None:
        self._arena._freed.append(self._start)


def as_tensor(address: int, numel: int, dtype: torch.dtype, keeper: object) -> Tensor:
    """A flat tensor over memory that `keeper` keeps."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = _Memory(address, numel * dtype.itemsize, keeper)
    return torch.from_numpy(np.asarray(memory)).view(dtype)


class _Memory:
    """What numpy needs to know to see an array in memory; it holds on to this."""

    def __init__(self, address: int, num_bytes: int, keeper: object) -> None:
        self._keeper = keeper
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
