"""Start items in one order that all ranks share, although they become complete in any order.

[Note: one order of reductions]
Ranks match collectives by the order in which they are started on a group. Gradients become ready in an order
that may differ between ranks (a branch, a parameter that is unused on one of them). So units and buckets are
not reduced when they are ready but in one order fixed beforehand, close to the one in which backward
completes them. One that is ready early waits for those before it; those never ready are started when backward
is over.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


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
