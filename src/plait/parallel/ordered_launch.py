"""What becomes complete in any order, started in one that all ranks share.

[Note: one order of reductions]
A collective is matched across ranks by the order in which a group sees it. Gradients become ready in an
order that may differ between ranks (a parameter that is unused on one of them, a branch), so units and
buckets are not reduced when they are ready but in one order fixed beforehand, nearly the one in which
backward completes them. One that is ready early waits for those before it; what never becomes ready is
started when backward is over.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class OrderedLauncher(Generic[T]):
    """Starts things in their order, each when it and all before it are complete."""

    def __init__(self, order: Sequence[T], start: Callable[[T], None]) -> None:
        """`start`: called once for each, between a `begin` and the next."""
        self.order = list(order)
        self._start = start
        self._starts = False
        self._next = 0
        self._complete: dict[T, None] = {}  # in the order of completion

    def begin(self, *, starts: bool) -> None:
        """Nothing is complete. `starts`: whether anything is to be started this time."""
        self._starts = starts
        self._next = 0
        self._complete.clear()

    @property
    def is_over(self) -> bool:
        """Whether everything has been started."""
        return self._next == len(self.order)

    @property
    def next_place(self) -> int:
        """In the order: of what starts next."""
        return self._next

    @property
    def starts(self) -> bool:
        return self._starts

    @property
    def completed(self) -> list[T]:
        """In the order in which they were completed; at the end those that were not."""
        return [*self._complete, *(item for item in self.order if item not in self._complete)]

    def complete(self, item: T) -> None:
        """Starts it, and what has waited for it, if it is its turn."""
        self._complete[item] = None
        while self._starts and self._next < len(self.order) and self.order[self._next] in self._complete:
            self.start_next()

    def start_next(self) -> None:
        """Whether it is complete or not."""
        self._next += 1
        self._start(self.order[self._next - 1])

    def start_rest(self) -> None:
        """What never became complete, and what had to wait for it."""
        while self._starts and self._next < len(self.order):
            self.start_next()
