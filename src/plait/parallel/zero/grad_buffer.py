"""Flat tensors whose memory comes and goes.

The flat memory that gradients come into, parameter by parameter, and a reduction reads when all have come.

Of a unit of the engine, or of a bucket of DistributedDataParallel.

How many bytes come and go, and the most that there were at a time.
"""

from collections.abc import Callable
from enum import Enum, auto

from torch import Tensor


class ByteTracker:
    """Counts bytes that are held for a while."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def drop(self, num_bytes: int) -> None:
        self.allocated_bytes -= num_bytes
        assert self.allocated_bytes >= 0, "more bytes given back than were taken"


class ResizableTensor:
    """A flat tensor whose memory can be given back and taken again, while it and its views stay."""

    def __init__(self, tensor: Tensor, *, stays: bool, meter: ByteTracker) -> None:
        """`stays`: it is never freed, and `meter` does not count it. Else: make all views, then free it."""
        self.tensor = tensor
        self.nbytes = self.tensor.nbytes
        self.stays = stays
        self.is_held = True
        self._meter = meter
        if not stays:
            self._meter.hold(self.nbytes)

    def hold(self) -> None:
        """Takes memory, if it has none; what is in it is undefined."""
        if not self.is_held:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.is_held = True
            self._meter.hold(self.nbytes)

    def free(self) -> None:
        """Gives the memory back, if it has some and does not stay.

        On CUDA work that is queued on the current stream may still use it: the memory goes back to
        that stream's pool, and what takes it from there is queued behind.
        """
        if self.is_held and not self.stays:
            self.tensor.untyped_storage().resize_(0)
            self.is_held = False
            self._meter.drop(self.nbytes)


class LeasedTensor:
    """A flat tensor that is there from `hold` to `free`, each time another one."""

    def __init__(self, take: Callable[[], Tensor], *, stays: bool, meter: ByteTracker) -> None:
        """`stays`: it is taken now, zeros, never freed, and `meter` does not count it."""
        self.stays = stays
        self._take = take
        self._meter = meter
        self.tensor: Tensor | None = take().zero_() if stays else None

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def hold(self) -> bool:
        """Takes memory, if it has none; what is in it is undefined. Whether it had none."""
        if self.tensor is not None:
            return False
        self.tensor = self._take()
        self._meter.hold(self.tensor.nbytes)
        return True

    def free(self) -> None:
        """Gives it back, if there is some and it does not stay."""
        if self.tensor is not None and not self.stays:
            self._meter.drop(self.tensor.nbytes)
            self.tensor = None


class GradientState(Enum):
    """Where a whole gradient stands."""

    EMPTY = auto()  # no gradient since the last reduction
    FILLING = auto()  # some gradients are in
    REDUCING = auto()  # the reduction reads (and may overwrite) the memory


_MOVES = {
    GradientState.EMPTY: {GradientState.FILLING, GradientState.REDUCING},
    GradientState.FILLING: {GradientState.REDUCING},
    GradientState.REDUCING: {GradientState.EMPTY},
}


class GradBuffer:
    """Memory, its view for each parameter, and which of them have come and been written."""

    def __init__(
        self, name: str, memory: LeasedTensor, count: int, views_of: Callable[[Tensor], list[Tensor]]
    ) -> None:
        """`name`: in messages. `views_of`: the memory's view for each of `count` parameters."""
        self.memory = memory
        self.state = GradientState.EMPTY
        self.views: list[Tensor] = [] if memory.tensor is None else views_of(memory.tensor)
        self.written = [False] * count  # since the last reduction: holds a gradient
        self._name = name
        self._views_of = views_of
        self._arrived = [False] * count  # in this micro-batch: it has come
        self._missing = count

    def move(self, state: GradientState) -> None:
        """The only place where the state changes, but for `reset`."""
        assert state in _MOVES[self.state], (
            f"{self._name}: from {self.state.name} to {state.name}: a gradient came after its "
            "reduction began, or a reduction began twice"
        )
        self.state = state

    def hold(self) -> bool:
        """Has memory, of undefined values where it had none. Whether it had none."""
        if not self.memory.hold():
            return False
        assert self.memory.tensor is not None
        self.views = self._views_of(self.memory.tensor)
        return True

    # --- what has come

    def begin(self) -> None:
        """A backward is about to run: nothing has come."""
        self._missing = len(self._arrived)
        self._arrived = [False] * self._missing

    def has_arrived(self, index: int) -> bool:
        return self._arrived[index]

    def arrive(self, index: int) -> None:
        if not self._arrived[index]:
            self._arrived[index] = True
            self._missing -= 1

    def expect_again(self, index: int) -> None:
        """What has come was not the last of it."""
        if self._arrived[index]:
            self._arrived[index] = False
            self._missing += 1

    @property
    def is_complete(self) -> bool:
        """Whether every parameter's gradient has come."""
        return self._missing == 0

    # --- its reduction

    def seal(self) -> Tensor:
        """No more gradients come: the memory, in which those that never came are zero."""
        for view, written in zip(self.views, self.written, strict=True):
            if not written:
                view.zero_()
        assert self.memory.tensor is not None, f"{self._name}: sealed without memory"
        return self.memory.tensor

    def landed(self) -> None:
        """The reduction is through."""
        self.move(GradientState.EMPTY)
        self.forget()

    def reset(self) -> None:
        """Whatever was under way is over."""
        self.state = GradientState.EMPTY
        self.forget()

    def forget(self) -> None:
        """What was written is read; the memory is given back, unless it stays."""
        self.written = [False] * len(self.written)
        if not self.memory.stays:
            self.views = []
        self.memory.free()
