"""The flat memory that gradients come into, parameter by parameter, and a reduction reads when all have come.

Of a unit of the engine, or of a bucket of DistributedDataParallel.
"""

from collections.abc import Callable
from enum import Enum, auto

from torch import Tensor

from plait.parallel.memory import Loan


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


class Incoming:
    """Memory, its view for each parameter, and which of them have come and been written."""

    def __init__(
        self, name: str, memory: Loan, count: int, views_of: Callable[[Tensor], list[Tensor]]
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
