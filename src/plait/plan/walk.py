"""Which units a pass gathers, and when: see [Note: one order of gathers] in `parallel/walk.py`."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Walk(Generic[T]):
    """One pass over a list of uses, of whatever is gathered together."""

    def __init__(self, uses: Sequence[T], prefetch: int, whole: Iterable[T], *, frees: bool) -> None:
        """`whole`: what is whole on every rank when the pass begins. `frees`: what is used is freed after."""
        self.uses = uses
        self._ahead = prefetch
        self.at = -1  # the place of the use that goes on
        self._started = 0
        last = dict.fromkeys(whole, -1)
        self._needs = []
        for index, bundle in enumerate(uses):
            freed = frees and index - last.get(bundle, index) > prefetch + 1
            self._needs.append(bundle not in last or freed)
            last[bundle] = index

    def find(self, bundle: T) -> int | None:
        """The place of its next use, which may be the one that goes on. None: it is not in the list."""
        return next((i for i in range(max(0, self.at), len(self.uses)) if self.uses[i] is bundle), None)

    def step(self) -> list[T]:
        """The next use begins: what is to be gathered now, in this order."""
        self.at += 1
        stop = min(self.at + 1 + self._ahead, len(self.uses))
        found = [self.uses[i] for i in range(self._started, stop) if self._needs[i]]
        self._started = max(self._started, stop)
        return found

    @property
    def window(self) -> Sequence[T]:
        """The use that goes on and those that are gathered ahead of it."""
        return self.uses[max(0, self.at) : self.at + 1 + self._ahead]


@dataclass(frozen=True)
class Uses(Generic[T]):
    """In which order a stage's passes use what is gathered. What is `pinned` is whole from the beginning of
    forward to the end of its use in backward, and walked over by neither."""

    forward: Sequence[T]
    backward: Sequence[T]
    pinned: Set[T] = frozenset()

    def of(self, *, backward: bool) -> Sequence[T]:
        uses = self.backward if backward else self.forward
        return [bundle for bundle in uses if bundle not in self.pinned]

    def map(self, name: Callable[[T], S]) -> "Uses[S]":
        """The same of what `name` makes of each."""
        forward, backward = ([name(bundle) for bundle in uses] for uses in (self.forward, self.backward))
        return Uses(forward, backward, {name(bundle) for bundle in self.pinned})

    def staying(self) -> set[T]:
        """What is whole from a forward with gradients to what comes next: the last in forward is the first in
        backward."""
        return {*self.forward[-1:], *self.pinned}


def gathers(uses: Uses[T], passes: Iterable[bool], prefetch: int, *, keeps: bool) -> list[T]:
    """All that a stage's passes gather after an update. `passes`: of each, whether it is a backward. `keeps`:
    what a pass gathered stays for the next one."""
    found: list[T] = []
    whole: Set[T] = frozenset()
    for backward in passes:
        found += [bundle for bundle in uses.pinned if bundle not in whole]
        walk = Walk(uses.of(backward=backward), prefetch, whole, frees=not keeps)
        for _ in walk.uses:
            found += walk.step()
        used = {*walk.uses, *uses.pinned}
        whole = used if keeps else frozenset() if backward else used & uses.staying()
    return found
