"""The order of all-gathers in a pass, and the deadlines by which reductions have to start.

See [Note: all-gather order] in `parallel/zero/exec_order.py` for how ranks agree on the order.

[Note: reduction deadlines]
At stage 3 a rank's backward walks a list of uses; before use q it starts the gathers up to q + prefetch and
waits for that of q. Complete units are reduced in an order of their own; when a reduction has started, the
rank waits for the one MAX_IN_FLIGHT positions earlier. A gather or a reduction finishes once all ranks have
started it. Without deadlines this deadlocks: rank A waits for the reduction of unit i, which rank B has not
started, because on B a parameter of i gets no gradient and B would start it only at the end of backward. B
has gone on and waits for a gather that A, which is blocked, has not started.

So a reduction has a deadline: before use q, a rank starts all reductions whose deadline is at most q, whether
the unit is complete or not. A unit is complete after its last use at the earliest. Let M(j) be the latest
last use among units 0 to j in reduction order. The deadline of unit i is M(i + MAX_IN_FLIGHT) + prefetch + 1;
the last MAX_IN_FLIGHT units have none: no rank waits for them within backward.

Proof that this suffices: suppose that all ranks block. Let A be the least advanced, at p. All ranks have
started the gathers up to p + prefetch, so A waits not for a gather but for the reduction of some i: it has
started i + MAX_IN_FLIGHT. If that unit was complete, so were all before it, and M(i + MAX_IN_FLIGHT) <= p; if
it was started by its deadline, p is at least that deadline, which is larger than M(i + MAX_IN_FLIGHT). Of all
reductions that some rank waits for, let i be the first, and B a rank that has not started it. B does not wait
for a reduction, as it would be one before i. So it waits for the gather of some q less than the deadline of
i: q <= M(i + MAX_IN_FLIGHT) + prefetch <= p' + prefetch for every rank at p' that waits for i or a later
reduction. Every other rank waits for a gather, of q or of a later use. So all ranks have started the gather
of q. Contradiction.

A rank also waits when a gradient of a unit whose reduction is in flight arrives late. The reduction was then
started by its deadline, so the rank is at least there. A rank that has not started it is at an earlier use,
whose gather this rank has started: it does not wait for this one.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_IN_FLIGHT = 2  # concurrent reductions, if full gradients are freed after reduction


def reduction_deadlines(last_uses: Sequence[int], prefetch: int) -> list[int | None]:
    """Return, per unit in reduction order, the use before which its reduction has to start; None: no
    deadline.

    `last_uses`: the last position of each unit in the backward walk; -1 if it is not in it.
    """
    reduction_deadlines: list[int | None] = []
    for index in range(len(last_uses)):
        later = index + MAX_IN_FLIGHT
        latest = max(last_uses[: later + 1]) if later < len(last_uses) else None
        reduction_deadlines.append(None if latest is None else latest + prefetch + 1)
    return reduction_deadlines


S = TypeVar("S")
T = TypeVar("T")


class PrefetchWalk(Generic[T]):
    """One pass over a list of uses; each entry is a group of parameters that are gathered together."""

    def __init__(self, uses: Sequence[T], prefetch: int, unsharded: Iterable[T], *, reshards: bool) -> None:
        """`unsharded`: what is unsharded on every rank when the pass begins. `reshards`: free after use."""
        self.uses = uses
        self._ahead = prefetch
        self.position = -1  # of the current use
        self._started = 0
        last = dict.fromkeys(unsharded, -1)
        self._needs_gather = []
        for index, group in enumerate(uses):
            freed = reshards and index - last.get(group, index) > prefetch + 1
            self._needs_gather.append(group not in last or freed)
            last[group] = index

    def find(self, group: T) -> int | None:
        """Position of the next use of `group`, possibly the current one. None: not in the list."""
        return next((i for i in range(max(0, self.position), len(self.uses)) if self.uses[i] is group), None)

    def advance(self) -> list[T]:
        """Begin the next use; return what to gather now, in this order."""
        self.position += 1
        stop = min(self.position + 1 + self._ahead, len(self.uses))
        to_gather = [self.uses[i] for i in range(self._started, stop) if self._needs_gather[i]]
        self._started = max(self._started, stop)
        return to_gather

    @property
    def window(self) -> Sequence[T]:
        """The current use and those that are prefetched."""
        return self.uses[max(0, self.position) : self.position + 1 + self._ahead]


@dataclass(frozen=True)
class ExecOrder(Generic[T]):
    """The order in which a stage's passes use parameter groups. Those in `always_unsharded` stay unsharded
    from the beginning of forward to the end of their use in backward, and are not part of the walks."""

    forward: Sequence[T]
    backward: Sequence[T]
    always_unsharded: Set[T] = frozenset()

    def walk_order(self, *, backward: bool) -> Sequence[T]:
        """The uses of a pass that are gathered one by one."""
        uses = self.backward if backward else self.forward
        return [group for group in uses if group not in self.always_unsharded]

    def map(self, name: Callable[[T], S]) -> "ExecOrder[S]":
        """The same order with every entry replaced by `name(entry)`."""
        forward, backward = ([name(group) for group in uses] for uses in (self.forward, self.backward))
        return ExecOrder(forward, backward, {name(group) for group in self.always_unsharded})

    def kept_after_forward(self) -> set[T]:
        """The entries that stay unsharded from a forward with gradients to the next pass: the last use of
        forward is the first of backward."""
        return {*self.forward[-1:], *self.always_unsharded}


def planned_gathers(
    uses: ExecOrder[T], passes: Iterable[bool], prefetch: int, *, keeps: bool, counting: int = 0
) -> list[T]:
    """Return all gathers of a stage's passes after an update. `passes`: whether each is a backward. `keeps`:
    what a pass gathers stays unsharded for the next one. `counting`: the first passes, without gradients."""
    planned_gathers: list[T] = []
    unsharded: Set[T] = frozenset()
    for number, backward in enumerate(passes):
        planned_gathers += [group for group in uses.always_unsharded if group not in unsharded]
        walk = PrefetchWalk(uses.walk_order(backward=backward), prefetch, unsharded, reshards=not keeps)
        for _ in walk.uses:
            planned_gathers += walk.advance()
        used = {*walk.uses, *uses.always_unsharded}
        kept = frozenset() if backward or number < counting else used & uses.kept_after_forward()
        unsharded = used if keeps else kept
    return planned_gathers
