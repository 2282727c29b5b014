"""Which units a pass gathers, and when: see [Note: one order of gathers] in `parallel/walk.py`.

Who may wait for whom: when reductions have to start so that no ranks wait in a circle.

[Note: nobody waits in a circle]
At stage 3 a rank's backward walks a list of uses; to go to use q it starts the gathers up to q + prefetch
and waits for that of q. Units that are complete are reduced in an order of their own; when a reduction
starts, the one TRAVELLING places before it has to land. Both waits end when all ranks have started.
Rank A waits for unit i to land, but rank B has not started that reduction: a parameter of i gives B no
gradient, so B would start it when backward is over. B has gone on and waits for a gather that A, who
stands still, has not started.

So a reduction has a deadline: a rank that goes to use q first starts those with a deadline up to q,
complete or not. A unit is complete after its last use at the earliest. Let M(j) be the latest last use
among units 0 to j of the reductions' order. Then the deadline of unit i is M(i + TRAVELLING) + prefetch + 1,
and units without an i + TRAVELLING have none.

Why that is enough: suppose that all ranks wait. Let A be least far, at p. The gathers up to p + prefetch have
been started by all, so A waits for no gather, but for some i to land: it has started i + TRAVELLING.
If that was complete, so were all before it, and M(i + TRAVELLING) <= p; if it was due, its deadline had
passed, which is later than that. Of all who wait for landings let i be the smallest such unit, and B a
rank that has not started it. B waits for no landing, as it would be that of an earlier unit. So it waits for
a gather at some q that is less than the deadline of i: q <= M(i + TRAVELLING) + prefetch <= p' + prefetch for
every rank at p' that waits for i or for a later unit, which all others do or they wait for gathers further
on. So all have started that gather. Contradiction.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_IN_FLIGHT = 2  # reductions under way at a time, where whole gradients are freed after them


def reduction_deadlines(last_uses: Sequence[int], prefetch: int) -> list[int | None]:
    """Of each unit in the order of reductions: the use before which its reduction has to start.

    `last_uses`: of each unit, its last place in backward's walk; -1 for one that is not in it.
    """
    found: list[int | None] = []
    for index in range(len(last_uses)):
        behind = index + MAX_IN_FLIGHT
        latest = max(last_uses[: behind + 1]) if behind < len(last_uses) else None
        found.append(None if latest is None else latest + prefetch + 1)
    return found


S = TypeVar("S")
T = TypeVar("T")


class PrefetchWalk(Generic[T]):
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
class ExecOrder(Generic[T]):
    """In which order a stage's passes use what is gathered. What is `pinned` is whole from the beginning of
    forward to the end of its use in backward, and walked over by neither."""

    forward: Sequence[T]
    backward: Sequence[T]
    pinned: Set[T] = frozenset()

    def of(self, *, backward: bool) -> Sequence[T]:
        uses = self.backward if backward else self.forward
        return [bundle for bundle in uses if bundle not in self.pinned]

    def map(self, name: Callable[[T], S]) -> "ExecOrder[S]":
        """The same of what `name` makes of each."""
        forward, backward = ([name(bundle) for bundle in uses] for uses in (self.forward, self.backward))
        return ExecOrder(forward, backward, {name(bundle) for bundle in self.pinned})

    def kept_after_forward(self) -> set[T]:
        """What is whole from a forward with gradients to what comes next: the last in forward is the first in
        backward."""
        return {*self.forward[-1:], *self.pinned}


def planned_gathers(uses: ExecOrder[T], passes: Iterable[bool], prefetch: int, *, keeps: bool) -> list[T]:
    """All that a stage's passes gather after an update. `passes`: of each, whether it is a backward. `keeps`:
    what a pass gathered stays for the next one."""
    found: list[T] = []
    whole: Set[T] = frozenset()
    for backward in passes:
        found += [bundle for bundle in uses.pinned if bundle not in whole]
        walk = PrefetchWalk(uses.of(backward=backward), prefetch, whole, frees=not keeps)
        for _ in walk.uses:
            found += walk.step()
        used = {*walk.uses, *uses.pinned}
        whole = used if keeps else frozenset() if backward else used & uses.kept_after_forward()
    return found
