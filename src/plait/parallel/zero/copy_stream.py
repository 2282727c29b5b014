"""A stream beside the one that computes: copies to and from the host that nobody waits for yet."""

from collections.abc import Callable

import torch
from torch import Tensor


class CopyStream:
    """On CUDA a stream of its own; on the CPU everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, out: Tensor, source: Tensor) -> Callable[[], None]:
        """Copies after what is queued so far. What is returned makes the current stream wait for it.

        One of the two may be in (pinned) host memory. The tensor on the device may be freed at once: its
        memory is not reused before the copy is through.
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

    def drain(self) -> None:
        """Returns when all copies are through: before the CPU itself reads or writes what they write or read,
        for which no stream waits."""
        if self._stream is not None:
            self._stream.synchronize()


def _nothing() -> None:
    """There is nothing to wait for."""
