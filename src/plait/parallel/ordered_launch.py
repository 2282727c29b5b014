"""Start items in one order that all ranks share, although they become complete in any order.

[Note: one order of reductions]
Ranks match collectives by the order in which a group receives them. Gradients become ready in an order that
may differ between ranks (a branch, a parameter that is unused on one of them). So units and buckets are not
reduced when they are ready but in one order fixed beforehand, close to the one in which backward completes
them. One that is ready early waits for those before it; those never ready are started when backward is over.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class OrderedLauncher(Generic[T]):
    """Starts items in order, each when it and all before it are complete."""

    def __init__(self, order: Sequence[T], start: Callable[[T], None]) -> None:
        """`start`: called once for each item between one `begin` and the next."""
        self.order = list(order)
        self._start = start
        self._starts = False
        self._next = 0
        self._complete: dict[T, None] = {}  # in the order of completion

    def begin(self, *, starts: bool) -> None:
        """Mark all items incomplete. `starts`: whether items are to be started this time."""
        self._starts = starts
        self._next = 0
        self._complete.clear()

    @property
    def all_started(self) -> bool:
        return self._next == len(self.order)

    @property
    def next_index(self) -> int:
        """Index in `order` of the next item to start."""
        return self._next

    @property
    def starts(self) -> bool:
        return self._starts

    @property
    def completion_order(self) -> list[T]:
        """Items in the order in which they were completed, then those that were not."""
        return [*self._complete, *(item for item in self.order if item not in self._complete)]

    def complete(self, item: T) -> None:
        """Mark an item complete; start it and those that waited for it, if all before them are started."""
        self._complete[item] = None
        while self._starts and self._next < len(self.order) and self.order[self._next] in self._complete:
            self.start_next()

    def start_next(self) -> None:
        """Start the next item, complete or not."""
        self._next += 1
        self._start(self.order[self._next - 1])

    def start_remaining(self) -> None:
        """Start the items that never became complete, and those that waited for them."""
        while self._starts and self._next < len(self.order):
            self.start_next()
