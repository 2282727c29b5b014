"""Gradients on their way from every data rank's backward to the owners of their ranges.

[Note: the order of units]
Units are reduced in one order (see [Note: one order of reductions] in `in_order.py`): the reverse of
forward's. What never becomes ready is reduced, its missing gradients as zeros, when backward is over. At
stage 3 all ranks take, after the first step, the order in which the first rank completed its units: a unit
far from its place would be late every time.

[Note: which micro-batches communicate]
The reduction is linear: reducing the sum of a step's micro-batches is reducing each. With whole
gradients, earlier micro-batches only add to `incoming`, and the last one's backward overlaps with the
reduction of the units that it has completed. With cut ones every micro-batch reduces, `incoming` lives
only from a unit's first gradient to its reduction's end, and `gradient` adds up the sums. Either way
the replicas (hybrid sharding) add their `gradient`s once a step.

[Note: who frees a travelling gradient]
`incoming` is read by the transport until the sum has landed. Landing waits, so it is put off: the
reduction of unit i lands when that of unit i + TRAVELLING has started. At most three whole gradients are
held at a time: one that fills, or has just started, and two that travel. Where whole gradients stay,
nothing is freed, and what peers have not given by then lands at the end.

[Note: one queue for all stages of a pipeline]
A transport whose ranks read each other's contributions ends sums in their order: what this rank has given is
free when all ranks have read it and all before it. A rank with several stages reduces them in turns; a sum
of one that had not landed would keep the next ones of another from ever being free. So they land in the
order in which they were started, whichever stage they are of, and no more of them travel at a time.

[Note: late gradients]
At stage 3 a reduction starts when its unit is complete or due, so that nobody waits in a circle: see the
note of that name in `plan/turns.py`.
A gradient that comes after its reduction has started is *late*. It fills `incoming` anew, and after the
step's last backward the ranks vote on which units are reduced once more.
"""

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from plait.comm import Group, ReduceWork, all_reduce
from plait.optim import squared_norm
from plait.parallel.ordered_launch import OrderedLauncher
from plait.parallel.zero.copy_stream import CopyStream
from plait.parallel.zero.flat_param import FlatParam, FlatParamConfig
from plait.parallel.zero.grad_buffer import ByteTracker, GradientState
from plait.parallel.zero.groups import ReplicatedGradReduce
from plait.parallel.zero.reduce_ops import GradReduction, ReplicaReduction
from plait.plan.prefetch import MAX_IN_FLIGHT, reduction_deadlines

_MOST_TRAVELLING = 256  # of whole gradients that stay; transports have room for some hundreds


class InFlightReductions:
    """The sums of a rank that have not landed. See [Note: one queue for all stages of a pipeline]."""

    def __init__(self) -> None:
        self._queue: deque[tuple[GradReducer, FlatParam, ReduceWork]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, unit: FlatParam) -> bool:
        return any(unit is travelling for _, travelling, _ in self._queue)

    @property
    def oldest(self) -> ReduceWork:
        return self._queue[0][2]

    def add(self, reducer: "GradReducer", unit: FlatParam, summing: ReduceWork) -> None:
        self._queue.append((reducer, unit, summing))

    def land_oldest(self) -> None:
        """Its gradient is its unit's."""
        reducer, unit, summing = self._queue.popleft()
        reducer.take(unit, summing)

    def drop_oldest(self) -> None:
        """Waits for it, and forgets it."""
        reducer, unit, summing = self._queue.popleft()
        reducer.drop(unit, summing)


class GradReducer:
    """Sums the units' gradients over the data ranks, beside backward."""

    def __init__(
        self,
        units: list[FlatParam],
        sums: GradReduction,
        partial: ReplicatedGradReduce,
        under_way: InFlightReductions,
        *,
        cut: FlatParamConfig,
        grid: int,
        replicas: int,
        everyone: Group,
        whole: bool,
        hurries: bool,
        meter: ByteTracker,
    ) -> None:
        """`under_way`: of all reducers of this rank. `cut`: of all units. `grid`: how many ranks cut the same
        layers. `whole`: whole gradients stay, and one reduction a step is made of them. `hurries`: reductions
        have deadlines, see [Note: late gradients]. Where whole gradients stay, backward lands what needs no
        waiting (and, beyond some hundreds of units, the oldest), so nobody waits in a circle, and a late
        gradient would meet its own sum."""
        self._queue = OrderedLauncher(units[::-1], self._start)  # see [Note: the order of units]
        self._sums = sums
        self._partial = partial
        self._has_between = replicas > 1 and not sums.at_once
        self._all = everyone
        self._every_micro = not whole
        self._frees = not cut.full_gradients
        self._may_land_early = not self._frees and (grid == 1 or not self._has_between)
        self._hurries = hurries
        self._meter = meter
        self._last = False
        self._deadlines: list[int | None] = [None] * len(units)
        self._under_way = under_way
        self._replicating: list[tuple[FlatParam, ReplicaReduction]] = []
        self._read: list[ReduceWork] = []  # the last: peers may still read what it, and those before, are of
        self._squares: dict[FlatParam, Tensor] = {}
        self._device = cut.device
        self._lane = CopyStream(self._device)
        for unit in units:
            unit.on_complete.append(self._on_complete)
            unit.on_late = self._on_late

    def order_by(self, units: list[FlatParam], last_uses: Mapping[FlatParam, int], prefetch: int) -> None:
        """From now on units are reduced in this order, the same on every rank. `last_uses`: places in
        backward's walk, of units that are in it."""
        assert set(units) == set(self._order), "an order of other units"
        self._queue = OrderedLauncher(units, self._start)
        self._deadlines = reduction_deadlines([last_uses.get(unit, -1) for unit in units], prefetch)

    @property
    def completed(self) -> list[FlatParam]:
        """In the order in which the last backward completed them; at the end those that it did not."""
        return self._queue.completed

    def begin_micro(self, *, last: bool, half: bool = False) -> None:
        """A micro-batch's backward is about to run. `half`: its other half comes later, see `begin_rest`."""
        for unit in self._order:
            unit.begin_micro()
        self._begin(last=last, reduces=not half and (last or self._every_micro))

    def begin_rest(self, *, last: bool) -> None:
        """The second half of a backward is about to run, of which units have been told what to expect."""
        self._begin(last=last, reduces=last or self._every_micro)

    def _begin(self, *, last: bool, reduces: bool) -> None:
        for summing in self._read:
            summing.release()
        self._read.clear()
        self._last = last
        self._queue.begin(starts=reduces)

    def start_due(self, use: int) -> None:
        """Backward goes to this place of its walk: starts what is due. See [Note: late gradients]."""
        queue = self._queue
        while self._hurries and queue.starts and not queue.is_over:
            deadline = self._deadlines[queue.next_place]
            if deadline is None or deadline > use:
                return
            queue.start_next()

    def end_micro(self) -> None:
        """Backward is over: starts what has not started. Until then no other verb may be called on the
        groups, because ranks differ in how far they have come."""
        for unit in self._order:
            unit.end_micro()
        self._queue.start_rest()
        if self._queue.starts and not self._last:
            self._land_all()

    def land(self) -> None:
        """Waits until every unit's gradient is the sum over ranks. The step may have had fewer micro-batches
        than planned."""
        if not self._last:
            self.begin_micro(last=True)
            self.end_micro()
        self._land_all()
        if self._hurries:
            self._reduce_late()
            self._lane.drain()  # replicas start from the gradients on the host
            for unit in self._order if self._replicates else []:
                self._start_replicating(unit, unit.gradient)
        for unit, between in self._replicating:
            between.pending.wait()
            self._squares[unit] = squared_norm(between.summed.to(unit.gradient.dtype))
            if between.summed is not unit.gradient:
                self._lane.copy(unit.gradient, between.summed)
            self._meter.drop(between.buffer_bytes)
        self._replicating.clear()
        self._lane.drain()  # the CPU will read the gradients that are on their way to it

    def square(self) -> Tensor:
        """After `land`: the sum of the squares of this rank's gradients, float64. Over the ranks that hold
        one copy each element of the whole gradient counts once. Early units were squared while later ones
        travelled."""
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._order:
            square = torch.stack([self._squares[unit] for unit in self._order]).sum()
        self._squares.clear()
        for unit in self._order:  # what other ranks of the grid hold too is counted there
            for repeated in unit.repeated_gradients():
                square -= squared_norm(repeated).to(square.device)
        return square

    def square_again(self, unit: FlatParam) -> None:
        """After `land`: its gradient has changed."""
        self._squares[unit] = squared_norm(unit.gradient).to(self._device)

    def reset(self) -> None:
        """Makes ready for the next step; also after an exception, when reductions may be under way."""
        while self._under_way:
            self._under_way.drop_oldest()
        for _, between in self._replicating:
            between.pending.wait()
            self._meter.drop(between.buffer_bytes)
        self._lane.drain()
        self._replicating.clear()
        self._squares.clear()
        self._last = False
        self._queue.begin(starts=False)
        for unit in self._order:
            unit.reset()

    @property
    def _order(self) -> list[FlatParam]:
        return self._queue.order

    @property
    def _replicates(self) -> bool:
        """Whether replicas add up their gradients after this reduction."""
        return self._last and self._has_between

    def _on_complete(self, unit: FlatParam) -> None:
        self._queue.complete(unit)
        while self._under_way and self._lands_early(self._under_way.oldest):
            self._under_way.land_oldest()

    def _lands_early(self, summing: ReduceWork) -> bool:
        """Whole gradients that stay could land later; but what peers have given too may be in the cache now.
        How much memory a step takes does not depend on how ranks hurry: what holds buffers does not. Nor does
        a grid whose ranks add up for replicas when they land: beside the sums of its layers, in one order."""
        return self._may_land_early and not summing.buffer_bytes and summing.is_ready

    def _on_late(self, unit: FlatParam) -> None:
        """A gradient comes while the unit's reduction travels: that has to land first."""
        while unit in self._under_way:
            self._under_way.land_oldest()

    def _reduce_late(self) -> None:
        """Once more, what is late on any rank. See [Note: late gradients]."""
        late = [float(unit.incoming.state is GradientState.FILLING) for unit in self._order]
        votes = torch.tensor(late, device=self._device)
        all_reduce(votes, self._all, "max")
        for unit, vote in zip(self._order, votes.tolist(), strict=True):
            if vote:
                self._start(unit)
        self._land_all()

    def _start(self, unit: FlatParam) -> None:
        contribution = unit.seal()
        self._partial.add_up(unit.layout, contribution)  # see [Note: when parts are summed]
        unit.incoming.move(GradientState.REDUCING)
        summing = self._sums.start(unit, contribution)
        self._under_way.add(self, unit, summing)
        self._meter.hold(summing.buffer_bytes)
        while len(self._under_way) > (MAX_IN_FLIGHT if self._frees else _MOST_TRAVELLING):
            self._under_way.land_oldest()

    def _land_all(self) -> None:
        while self._under_way:
            self._under_way.land_oldest()

    def drop(self, unit: FlatParam, summing: ReduceWork) -> None:
        """Waits for a sum that nobody wants."""
        for _ in summing.into(torch.empty_like(unit.gradient, device=self._device)):
            pass
        self._meter.drop(summing.buffer_bytes)

    def take(self, unit: FlatParam, summing: ReduceWork) -> None:
        """The sum goes into `gradient`; then, once a step, the replicas add theirs up."""
        target = unit.gradient
        if unit.cut.offloads:
            target = torch.empty_like(unit.gradient, device=self._device)
            if unit.has_sum:
                self._lane.copy(target, unit.gradient)()
        squares = []
        for run in summing.into(target, add=unit.has_sum):
            if self._last and not self._replicates:
                squares.append(squared_norm(run) if summing.squares is None else summing.squares)
        self._meter.drop(summing.buffer_bytes)
        self._read = [summing]
        unit.landed()
        if squares:
            self._squares[unit] = torch.stack(squares).sum()
        if self._replicates and not self._hurries:
            self._start_replicating(unit, target)
        elif unit.cut.offloads:
            self._lane.copy(unit.gradient, target)

    def _start_replicating(self, unit: FlatParam, summed: Tensor) -> None:
        between = self._sums.start_between(unit, summed)
        self._meter.hold(between.buffer_bytes)
        self._replicating.append((unit, between))
