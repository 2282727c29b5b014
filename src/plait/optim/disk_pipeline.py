"""Blocks of files: later ones are read and earlier ones written while one is updated.

[Note: blocks in flight]
A block's bytes are in one of DISK_BUFFERS, which are allocated once: `_NUM_READ` are being read, one is
updated, the others are being written. So resident memory does not depend on the files' size, and an
update takes the longer of the disk's time and the optimizer's, not their sum. Threads transfer the bytes:
system calls release the interpreter's lock. Blocks share no page, so transfers of two blocks may overlap.
"""

import mmap
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import RunError
from plait.optim.disk_tensors import MappedFile
from plait.plan.memory import DISK_BUFFERS

_NUM_READ = 2
_THREADS = 2


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
