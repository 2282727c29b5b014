"""Data parallelism over units. Stage 0: every data rank holds all of the model's state.

[Note: one order of reductions, agreed without a word]
A collective is matched across ranks by the order in which a group sees it. Gradients become ready in
an order that may differ between ranks (a parameter that is unused on one of them, a branch), so units
are not reduced when they are ready but in one order fixed beforehand: the reverse of forward's, which
is nearly the order in which backward completes them. A unit that is ready early waits for those
before it; what never becomes ready is reduced, its missing gradients as zeros, when backward is over.
The ranks hold the same model, hence the same order.

[Note: why only the last micro-batch communicates]
The reduction is linear: reducing the sum of a step's micro-batches is reducing each. So earlier
micro-batches only add to the unit's gradient, and the last one's backward overlaps with the
reduction of the units that it has completed.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from plait.comm import Group, sends_narrow, start_all_reduce, start_exchange
from plait.optim import squared_norm
from plait.parallel.units import Unit, UnitState


class DataParallel:
    """Sums the units' gradients over the data ranks, beside backward.

    `micro`: how many micro-batches give their gradients before each sum.
    """

    def __init__(self, units: list[Unit], group: Group, micro: int) -> None:
        self._order = list(reversed(units))  # see [Note: one order of reductions ...]
        self._group = group
        self._last = False
        self._complete: set[Unit] = set()
        self._started: list[tuple[Unit, Callable[[], Iterable[Tensor]]]] = []  # and what finishes it
        self._received: dict[Unit, list[Tensor]] = {}  # what peers send, where they send it unsummed
        for unit in units:
            unit.on_complete = self._on_complete
            if micro == 1 and sends_narrow(group, unit.storage.dtype, unit.gradient.dtype):
                unit.keep_incoming_narrow()
                self._received[unit] = [torch.empty_like(unit.incoming) for _ in range(group.size - 1)]

    @property
    def buffer_bytes(self) -> int:
        """Bytes held only to communicate: narrow gradients, this rank's and those received."""
        return sum(
            unit.incoming.nbytes + sum(tensor.nbytes for tensor in tensors)
            for unit, tensors in self._received.items()
        )

    def begin_micro(self, *, last: bool) -> None:
        """A micro-batch's backward is about to run; with `last`, units are reduced as they complete."""
        self._last = last
        self._complete.clear()
        for unit in self._order:
            unit.begin_micro()

    def start_rest(self) -> None:
        """Backward is over: starts what has not started. Until then no other verb may be called on the
        group, because ranks differ in how far they have come."""
        while len(self._started) < len(self._order):
            self._start_next()

    def finish(self) -> Tensor:
        """Waits until every unit's gradient is the sum over ranks; the sum of its squares, float64, ().

        Each element of the whole gradient counts once. Early units are squared while later ones travel.
        """
        assert len(self._started) == len(self._order), "finish before start_rest"
        squares = []
        for unit, finish in self._started:
            squares += [squared_norm(run) for run in finish()]
            unit.move(UnitState.REDUCED)
        self._started.clear()
        return torch.stack(squares).sum()

    def reset(self) -> None:
        """Makes ready for the next step; also after an exception, when reductions may be under way."""
        for _, finish in self._started:
            for _ in finish():
                pass
        self._started.clear()
        self._last = False
        for unit in self._order:
            unit.reset()

    def _on_complete(self, unit: Unit) -> None:
        if not self._last:
            return
        self._complete.add(unit)
        while len(self._started) < len(self._order) and self._order[len(self._started)] in self._complete:
            self._start_next()

    def _start_next(self) -> None:
        unit = self._order[len(self._started)]
        unit.zero_missing()
        unit.move(UnitState.REDUCING)
        self._started.append((unit, self._start(unit)))

    def _start(self, unit: Unit) -> Callable[[], Iterable[Tensor]]:
        """Starts the sum. What is returned waits for it and gives the gradient, in one run or many."""
        if unit in self._received:
            exchange = start_exchange(unit.incoming, self._received[unit], self._group)
            return lambda: exchange.wait_and_sum(unit.gradient)
        pending = start_all_reduce(unit.gradient, self._group)

        def finish() -> Iterable[Tensor]:
            pending.wait()
            return (unit.gradient,)

        return finish
