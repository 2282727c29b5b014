"""static_graph=True: the first backward tells how often each parameter's hook runs in every later one.

A parameter's gradient is complete with the last of its hooks: with reentrant checkpoints around one layer
several times, or parameters used outside of forward, it has more than one.
"""


class StaticGraph:
    """Counts hooks."""

    def __init__(self, count: int) -> None:
        self._counts = [0] * count
        self._left = [0] * count
        self.is_known = False

    def count(self, index: int) -> None:
        """A hook of the first backward (or of one in `no_sync` before it)."""
        self._counts[index] += 1

    def learn(self) -> list[int]:
        """The first backward is over. Returns the parameters that have no part in it."""
        self.is_known = True
        return [index for index, number in enumerate(self._counts) if number == 0]

    def begin(self) -> None:
        self._left = list(self._counts)

    def has_changed(self, index: int) -> bool:
        """A hook runs: whether it is one more than in the first backward."""
        return self._left[index] == 0

    def is_last_of(self, index: int) -> bool:
        """A hook runs: whether the gradient is complete."""
        self._left[index] -= 1
        return self._left[index] == 0
