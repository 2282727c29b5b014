"""Flat tensors whose memory is allocated and freed repeatedly, and the buffer that collects gradients.

`ResizableTensor` holds unsharded parameters, `LeasedTensor` unsharded gradients. `GradBuffer` is the flat
memory into which gradients are written one parameter at a time, and from which one reduction reads all of
them: of a unit of the engine, or of a bucket of DistributedDataParallel. `ByteTracker` counts current and
peak bytes.
"""

from collections.abc import Callable
from enum import Enum, auto

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


class GradientState(Enum):
    """State of an unsharded gradient."""

    EMPTY = auto()  # no gradient since the last reduction
    FILLING = auto()  # some gradients are written
    REDUCING = auto()  # the reduction reads (and may overwrite) the memory


_TRANSITIONS = {
    GradientState.EMPTY: {GradientState.FILLING, GradientState.REDUCING},
    GradientState.FILLING: {GradientState.REDUCING},
    GradientState.REDUCING: {GradientState.EMPTY},
}


class GradBuffer:
    """Flat gradient memory, its view for each parameter, and which gradients have arrived and are written."""

    def __init__(
        self,
        name: str,
        memory: LeasedTensor,
        num_params: int,
        make_views: Callable[[Tensor], list[Tensor]],
    ) -> None:
        """`name`: for messages. `make_views`: returns the memory's `num_params` views."""
        self.memory = memory
        self.state = GradientState.EMPTY
        self.views: list[Tensor] = [] if memory.tensor is None else make_views(memory.tensor)
        self.written = [False] * num_params  # since the last reduction: the view holds a gradient
        self._name = name
        self._make_views = make_views
        self._arrived = [False] * num_params  # in this micro-batch
        self._num_missing = num_params

    def move(self, state: GradientState) -> None:
        """Change the state. The only place that does, except `reset`."""
        assert state in _TRANSITIONS[self.state], (
            f"{self._name}: from {self.state.name} to {state.name}: a gradient was written "
            "during its reduction, or a reduction started twice"
        )
        self.state = state

    def allocate(self) -> bool:
        """Allocate memory unless there is some, with undefined contents. Return True if this call did."""
        if not self.memory.allocate():
            return False
        assert self.memory.tensor is not None
        self.views = self._make_views(self.memory.tensor)
        return True

    # --- arrival of gradients

    def begin(self) -> None:
        """Start a micro-batch's backward: no gradient has arrived."""
        self._num_missing = len(self._arrived)
        self._arrived = [False] * self._num_missing

    def has_arrived(self, index: int) -> bool:
        return self._arrived[index]

    def mark_arrived(self, index: int) -> None:
        if not self._arrived[index]:
            self._arrived[index] = True
            self._num_missing -= 1

    def expect_again(self, index: int) -> None:
        """Wait for one more contribution to this gradient."""
        if self._arrived[index]:
            self._arrived[index] = False
            self._num_missing += 1

    @property
    def is_complete(self) -> bool:
        """True if the gradients of all parameters have arrived."""
        return self._num_missing == 0

    # --- the reduction

    def finalize(self) -> Tensor:
        """Zero the gradients that never arrived and return the memory, the reduction's input."""
        for view, written in zip(self.views, self.written, strict=True):
            if not written:
                view.zero_()
        assert self.memory.tensor is not None, f"{self._name}: finalized without memory"
        return self.memory.tensor

    def on_reduced(self) -> None:
        """Empty the buffer after its reduction has completed, and free its memory unless persistent."""
        self.move(GradientState.EMPTY)
        self.discard()

    def reset(self) -> None:
        """Empty the buffer from any state; the caller has waited for its reduction."""
        self.state = GradientState.EMPTY
        self.discard()

    def discard(self) -> None:
        """Mark all views as not written; free the memory unless persistent."""
        self.written = [False] * len(self.written)
        if not self.memory.persistent:
            self.views = []
        self.memory.free()
