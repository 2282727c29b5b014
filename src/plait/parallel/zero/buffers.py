"""Memory that is allocated and freed repeatedly, or used in turn, and copies between device and host.

`ResizableTensor` holds unsharded parameters, `LeasedTensor` unsharded gradients, `StagingBuffers` what is
copied between device and host, on the `CopyStream`. `ByteTracker` counts current and peak bytes.

[Note: lifetimes across streams]
All memory is allocated and freed on the current stream. Before a tensor that the copy stream uses is freed or
overwritten, the current stream waits for that use. `Tensor.record_stream` would need no wait, but the caching
allocator then reuses the memory only after the CPU has seen the copy's event complete, at a later allocation:
the CPU queues work far ahead, so each all-gather of a pass would take new memory (the reason why FSDP2 was
written without it).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ByteTracker:
    """Current and peak bytes of temporary buffers."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def subtract(self, num_bytes: int) -> None:
        self.allocated_bytes -= num_bytes
        assert self.allocated_bytes >= 0, "more bytes freed than allocated"


class ResizableTensor:
    """A flat tensor whose memory can be freed and allocated again, while it and its views stay.

    Its storage is resized to 0 and back, as those of FSDP2's all-gather outputs.
    """

    def __init__(self, tensor: Tensor, *, persistent: bool, tracker: ByteTracker) -> None:
        """`persistent`: never freed, not counted by `tracker`. Otherwise create all views, then free it."""
        self.tensor = tensor
        self.nbytes = self.tensor.nbytes
        self.persistent = persistent
        self.is_allocated = True
        self._tracker = tracker
        if not persistent:
            self._tracker.add(self.nbytes)

    def allocate(self) -> None:
        """Allocate the memory unless it is allocated; its contents are undefined."""
        if not self.is_allocated:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.is_allocated = True
            self._tracker.add(self.nbytes)

    def free(self) -> None:
        """Free the memory if it is allocated and not persistent.

        On CUDA, kernels queued on the current stream may still use it: the caching allocator returns the
        memory to that stream's pool, and whatever reuses it is queued after them.
        """
        if self.is_allocated and not self.persistent:
            self.tensor.untyped_storage().resize_(0)
            self.is_allocated = False
            self._tracker.subtract(self.nbytes)


class LeasedTensor:
    """A flat tensor that exists from `allocate` to `free`, a new one each time."""

    def __init__(self, lease: Callable[[], Tensor], *, persistent: bool, tracker: ByteTracker) -> None:
        """`persistent`: leased now, zeroed, never freed, and not counted by `tracker`."""
        self.persistent = persistent
        self._lease = lease
        self._tracker = tracker
        self.tensor: Tensor | None = lease().zero_() if persistent else None

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def allocate(self) -> bool:
        """Lease memory unless there is some; its contents are undefined. Return True if it was leased now."""
        if self.tensor is not None:
            return False
        self.tensor = self._lease()
        self._tracker.add(self.tensor.nbytes)
        return True

    def free(self) -> None:
        """Drop the tensor if there is one and it is not persistent."""
        if self.tensor is not None and not self.persistent:
            self._tracker.subtract(self.tensor.nbytes)
            self.tensor = None


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
