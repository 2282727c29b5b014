"""The CUDA stream for copies between device and host that overlap with computation, and buffers for them.

[Note: lifetimes across streams]
All memory is allocated and freed on the current stream. Before a tensor that the copy stream uses is freed or
overwritten, the current stream waits for that use. `Tensor.record_stream` would need no wait, but the caching
allocator then reuses the memory only after the CPU has seen the copy's event complete, at a later allocation:
the CPU queues work far ahead, so each all-gather of a pass would take new memory (the reason why FSDP2 was
written without it).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Copy:
    """Work queued on the copy stream; on the CPU, complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the current stream wait for it."""
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        """Block the CPU until it has completed."""
        if self.event is not None:
            self.event.synchronize()


class CopyStream:
    """Asynchronous copies, in order: on CUDA in a stream of their own, created at first use, on the CPU
    immediate. One per rank: torch has 32 streams, and those that two users share by chance may deadlock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._is_idle = True  # nothing was queued since the last `synchronize`

    @contextmanager
    def after_current(self) -> Iterator[Copy]:
        """Queue what this context queues on the copy stream, after the current stream's work so far.

        The result completes with it. See [Note: lifetimes across streams].
        """
        copy = Copy(self._device)
        if self._device.type != "cuda":
            yield copy
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_idle = False
        with torch.cuda.stream(self._stream):
            yield copy
            copy.event = self._stream.record_event()

    def copy(self, out: Tensor, source: Tensor) -> Copy:
        """Copy between the device and pinned host memory, after the current stream's work so far."""
        with self.after_current() as copy:
            out.copy_(source, non_blocking=True)
        return copy

    def synchronize(self) -> None:
        """Block the CPU until all copies have completed; streams do not order its own reads and writes."""
        if self._stream is not None and not self._is_idle:
            self._stream.synchronize()
            self._is_idle = True


class StagingBuffers:
    """Two flat buffers on one device, used in turn for copies to or from another; they are allocated at first
    use, grow to the largest tensor that any of them was for, and are never freed."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the CPU for pinned host memory."""
        self._device = device
        self._buffers: list[Tensor | None] = [None, None]
        self._copies: list[Copy | None] = [None, None]
        self._index = 0
        self._num_bytes = 0  # of each

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next buffer, whose contents are undefined, when the copy of the tensor before the last
        one is over: the current stream waits for it, or the CPU for one in host memory."""
        is_host = self._device.type == "cpu"
        self._index = index = 1 - self._index
        if (copy := self._copies[index]) is not None:
            copy.synchronize() if is_host else copy.wait()
            self._copies[index] = None
        buffer, num_bytes = self._buffers[index], numel * dtype.itemsize
        self._num_bytes = max(self._num_bytes, num_bytes)
        if buffer is None or buffer.numel() < self._num_bytes:
            buffer = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device, pin_memory=is_host)
            self._buffers[index] = buffer
        return buffer[:num_bytes].view(dtype)

    def in_use_by(self, copy: Copy) -> None:
        """Keep the tensor that was taken last until this copy is over."""
        self._copies[self._index] = copy
