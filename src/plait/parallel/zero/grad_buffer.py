"""The buffer that collects gradients, and the order in which such buffers are reduced.

`GradBuffer` is the flat memory into which gradients are written one parameter at a time, and from which one
reduction reads all of them: of a unit of the engine, or of a bucket of DistributedDataParallel.

[Note: one order of reductions]
Ranks match collectives by the order in which they are started on a group. Gradients become ready in an order
that may differ between ranks (a branch, a parameter that is unused on one of them). So units and buckets are
not reduced when they are ready but in one order fixed beforehand, close to the one in which backward
completes them. One that is ready early waits for those before it; those never ready are started when backward
is over.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Generic, TypeVar

from torch import Tensor

from plait.comm import add_widened
from plait.parallel.zero.buffers import LeasedTensor

T = TypeVar("T")
AddGradient = Callable[[Tensor, bool], None]  # adds to a view, or writes it if it is the first


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

    def add(self, index: int, gradient: Tensor | AddGradient) -> None:
        """Add a gradient to its view, or write it if it is the first since the last reduction."""
        view, is_first = self.views[index], not self.written[index]
        self.written[index] = True
        if not isinstance(gradient, Tensor):
            gradient(view, is_first)
            return
        if gradient.is_sparse and gradient.sparse_dim() == 1:
            rows = gradient.coalesce()  # sums of equal rows, in a dtype that does not depend on the view's
            view = view.zero_() if is_first else view
            view.index_add_(0, rows.indices()[0], rows.values().to(view.dtype))
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if is_first:
            view.copy_(gradient)
        elif not add_widened(view, gradient):
            view.add_(gradient)

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


class OrderedLauncher(Generic[T]):
    """Starts items in order: each when it and all before it are complete, or when the caller says so."""

    def __init__(self, order: Sequence[T], start: Callable[[T], None]) -> None:
        """`start`: called for each item at most once between one `begin` and the next."""
        self.order = list(order)
        self._start = start
        self.starts = False
        self.next_index = 0  # in `order`, of the next item to start
        self._complete: dict[T, None] = {}  # in the order of completion

    def begin(self, *, starts: bool) -> None:
        """Mark all items incomplete. `starts`: whether items are to be started this time."""
        self.starts = starts
        self.next_index = 0
        self._complete.clear()

    @property
    def all_started(self) -> bool:
        return self.next_index == len(self.order)

    @property
    def completion_order(self) -> list[T]:
        """Items in the order in which they were completed, then those that were not."""
        return [*self._complete, *(item for item in self.order if item not in self._complete)]

    def complete(self, item: T) -> None:
        """Mark an item complete; start it and those that waited for it, if all before them are started."""
        self._complete[item] = None
        while self.starts and not self.all_started and self.order[self.next_index] in self._complete:
            self.start_next()

    def start_next(self) -> None:
        """Start the next item, complete or not."""
        self.next_index += 1
        self._start(self.order[self.next_index - 1])

    def start_remaining(self) -> None:
        """Start the items that never became complete, and those that waited for them."""
        while self.starts and not self.all_started:
            self.start_next()
