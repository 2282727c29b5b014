"""A CUDA stream for copies between device and host that overlap with computation."""

from collections.abc import Callable

import torch
from torch import Tensor


class CopyStream:
    """Asynchronous copies: on CUDA in a stream of their own, on the CPU immediate."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy after the work queued so far. Call the result to make the current stream wait for the copy.

        One of the two may be in (pinned) host memory. The tensor on the device may be freed at once: its
        memory is not reused before the copy has completed.
        """
        if self._stream is None:
            out.copy_(source)
            return _nothing
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        for tensor in (out, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def synchronize(self) -> None:
        """Block the CPU until all copies have completed; streams do not order its own reads and writes."""
        if self._stream is not None:
            self._stream.synchronize()


def _nothing() -> None:
    """Wait for nothing."""
