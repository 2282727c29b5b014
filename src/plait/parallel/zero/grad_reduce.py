"""Reduction of gradients: each unit is reduce-scattered when its gradients are complete, during backward.

[Note: reduction order of units]
Units are reduced in one order (see [Note: one order of reductions] in `grad_buffer.py`): the reverse of
forward's. Units that never become complete are reduced when backward is over, missing gradients as zeros. At
stage 3 all ranks adopt, after the first step, the order in which rank 0 completed its units: a unit far from
its position would miss its deadline in every step.

[Note: reduction of micro-batches]
The reduction is linear: reducing the sum of a step's micro-batches equals reducing each. With
`accumulate=unsharded`, earlier micro-batches only add to `grad_buffer`, and the last one's backward overlaps
with the reduction of units that it has completed. With `accumulate=sharded` every micro-batch is reduced,
`grad_buffer` is allocated only from a unit's first gradient to the end of its reduction, and `grad_shard`
accumulates the results. Either way the replicas (hybrid sharding) all-reduce their `grad_shard`s once a step.

[Note: reduction over replicas]
A unit's all-reduce over replicas starts when its reduce-scatter is finished, during backward; it is waited
for after backward. On CUDA, and on a tensor-parallel grid, the all-reduces need one order among themselves
and with the other reductions. So reduce-scatters are finished at a fixed distance: that of unit i when unit
i + MAX_IN_FLIGHT starts, or at once if it is over one rank. Otherwise they are also finished when they are
found ready. If the all-reduces need copies of the gradients (rounded ones, or of gradients on the host) and
unsharded gradients are freed, they start after backward, when its memory is free again.

[Note: lifetime of an unsharded gradient]
The transport reads `grad_buffer` until the reduction has completed. Completion needs a wait, so it is
delayed: the reduction of unit i is waited for when that of unit i + MAX_IN_FLIGHT has started. If units are
completed one after the other, in the order of reductions, at most three unsharded gradients are allocated at
a time: one that fills or has just started, and two in flight. `finish` frees them (through
`FlatParam.on_reduced`). If unsharded gradients are kept, nothing is freed, and reductions whose peers'
contributions have not arrived during backward are waited for at its end.

[Note: one queue for all pipeline stages]
A transport whose ranks read each other's contributions completes reductions in order: a contribution is free
when all ranks have read it and all contributions before it. A rank with several stages reduces them in turn;
an unfinished reduction of one would keep the later ones of another from ever being freed. So reductions are
waited for in the order in which they were started, across stages, and the limit on reductions in flight holds
for all stages together.

[Note: late gradients]
If parameters are freed after each pass and gradients after each reduction (stage 3 by default), a reduction
starts when its unit is complete or its deadline is reached, so that ranks cannot deadlock: see
`plan/prefetch.py`. A gradient that arrives after its unit's reduction has started is *late*. If the reduction
is in flight, it is waited for first. The gradient is written to the emptied `grad_buffer`. If another
micro-batch follows, its reduction includes it. After the step's last backward, the totals of the step tell
all ranks whether there are late gradients; if so, they vote on which units to reduce once more. By then the
gradients may be sums over replicas and over stages (tied parameters): one rank's stays, the others become
zero, and all are summed again.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.comm import Mesh, ReduceWork, Work, all_reduce
from plait.optim.clip import squared_norm
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.grad_buffer import GradientState, OrderedLauncher
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.reduce_ops import GradReduction
from plait.plan import Layout, UnitLayout
from plait.plan.axes import FEATURES
from plait.plan.compression import rounds_to_bf16
from plait.plan.prefetch import MAX_IN_FLIGHT, reduction_deadlines

_MAX_IN_FLIGHT_IF_KEPT = 256  # of unsharded gradients; transports can queue some hundreds


class ColumnGradReduce:
    """Sums over columns the gradients of parameters that are replicated over `col` but see partial inputs.

    [Note: reduction over columns]
    All ranks of a tensor-parallel grid run the same program on the same data, so units complete in the same
    order on all of them. The all-reduce runs where a unit's reduction starts, at the same point of every
    rank's program, on its own connections. It sums a step's micro-batches together, with one message per unit
    and set of columns.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        column_sets = {sharers for unit in layout.units if unit.trains for sharers, _, _ in unit.partial}
        in_order = sorted(column_sets, key=lambda sharers: (len(sharers), sharers))
        self._groups = {
            sharers: mesh.subgroup(FEATURES, sharers, channel="gradients") for sharers in in_order
        }

    def reduce(self, layout: UnitLayout, gradient: Tensor) -> None:
        """All-reduce in place, in float32 at least. `gradient` is laid out like the unit's storage."""
        for sharers, start, stop in layout.partial:
            partial_sums = gradient[start:stop]
            wide = partial_sums.to(torch.promote_types(partial_sums.dtype, torch.float32))
            all_reduce(wide, self._groups[sharers], label=f"parts of {layout.name}")
            if wide is not partial_sums:
                partial_sums.copy_(wide)


# This rank's reductions in flight, oldest first. See [Note: one queue for all pipeline stages].
InFlightReductions = deque["tuple[GradReducer, FlatParam, ReduceWork]"]


class GradReducer:
    """Reduces the units' gradients over the data ranks, overlapped with backward."""

    def __init__(
        self,
        units: list[FlatParam],
        context: RankContext,
        reduction: GradReduction,
        column_reduce: ColumnGradReduce,
        in_flight: InFlightReductions,
    ) -> None:
        """`in_flight`: shared by all reducers of this rank.

        If unsharded gradients are kept, there are no deadlines and no late gradients. Unless the order is
        fixed, backward then finishes only reductions that need no waiting (and, beyond some hundreds of
        units, the oldest).
        """
        self._launcher = OrderedLauncher(units[::-1], self._start)  # see [Note: reduction order of units]
        self._reduction = reduction
        self._column_reduce = column_reduce
        self._has_replica_reduction = context.groups.dense.replicate.size > 1 and not reduction.is_single
        self._dp_group = context.groups.dense.gradient_sum
        self._reduces_every_micro = not context.plan.accumulates_full
        self._frees = not context.keeps_grads_unsharded
        # See [Note: reduction over replicas].
        is_ordered = context.groups.tp.size > 1 or context.device.type == "cuda"
        has_fixed_order = is_ordered and self._has_replica_reduction
        self._may_finish_early = not self._frees and not has_fixed_order
        self._max_in_flight = MAX_IN_FLIGHT if self._frees or has_fixed_order else _MAX_IN_FLIGHT_IF_KEPT
        if has_fixed_order and context.groups.dense.reduce_scatter.size == 1:
            self._max_in_flight = 0
        # See [Note: late gradients].
        self._has_deadlines = self._frees and context.reshards_every_pass
        self._defers_replicas = self._has_deadlines and (rounds_to_bf16(context.plan) or context.offloads)
        self._tracker = context.tracker
        self._last = False  # the step's last micro-batch
        self._deadlines: list[int | None] = [None] * len(units)
        self._in_flight = in_flight
        # Tensors in use, which hold the sum over replicas when the work is done.
        self._replica_reductions: list[tuple[FlatParam, Tensor, Work]] = []
        # The last one finished: peers may still read its contribution, and those before it.
        self._to_release: list[ReduceWork] = []
        self._squared_norms: dict[FlatParam, Tensor] = {}
        self._device = context.device
        self._copy_stream = context.copy_stream
        self._staged = context.staged_grads

    def set_order(self, units: list[FlatParam], last_uses: Mapping[FlatParam, int], prefetch: int) -> None:
        """Reduce units in this order from now on, the same on every rank. `last_uses`: indices in backward's
        walk, for units that are in it."""
        assert set(units) == set(self._units), "an order of other units"
        self._launcher = OrderedLauncher(units, self._start)
        self._deadlines = reduction_deadlines([last_uses.get(unit, -1) for unit in units], prefetch)

    def reduce_with(self, reduction: GradReduction) -> None:
        """Use another reduction, over one rank, before the first step."""
        self._reduction = reduction

    @property
    def completion_order(self) -> list[FlatParam]:
        """Units in the order in which the last backward completed them, then those that it did not."""
        return self._launcher.completion_order

    def begin_micro(self, *, last: bool, split: bool = False) -> None:
        """Prepare for a micro-batch's backward. `split`: weight gradients follow, see `begin_deferred`."""
        for unit in self._units:
            unit.begin_micro()
        self._begin(last=last, reduces=not split and (last or self._reduces_every_micro))

    def begin_deferred(self, *, last: bool) -> None:
        """Prepare for deferred weight gradients, which the units already expect."""
        self._begin(last=last, reduces=last or self._reduces_every_micro)

    def _begin(self, *, last: bool, reduces: bool) -> None:
        for work in self._to_release:
            work.release()
        self._to_release.clear()
        self._last = last
        self._launcher.begin(starts=reduces)

    def start_due(self, use: int) -> None:
        """Start reductions that are due at this index of backward's walk. See [Note: late gradients]."""
        launcher = self._launcher
        while self._has_deadlines and launcher.starts and not launcher.all_started:
            deadline = self._deadlines[launcher.next_index]
            if deadline is None or deadline > use:
                return
            launcher.start_next()

    def end_micro(self) -> None:
        """Start the remaining reductions when backward is over. Until then no other collective may be called
        on the groups, because ranks differ in how many they have started."""
        for unit in self._units:
            unit.end_micro()
        self._launcher.start_remaining()
        if self._launcher.starts and not self._last:
            self._finish_all()

    def start_remaining(self) -> None:
        """Start all reductions. The step may have had fewer micro-batches than planned."""
        if not self._last:
            self.begin_micro(last=True)
            self.end_micro()

    @property
    def num_late(self) -> int:
        """After `start_remaining`: the number of units with a late gradient on this rank."""
        return sum(unit.has_late_gradient for unit in self._units) if self._has_deadlines else 0

    def wait(self) -> None:
        """Wait until every unit's gradient is the sum over ranks, of all but late gradients."""
        self._finish_all()
        self._finish_replicas(self._units)

    def reduce_late(self) -> None:
        """After `wait`, on all ranks: add late gradients to the sums. See [Note: late gradients]."""
        votes = torch.tensor([float(unit.has_late_gradient) for unit in self._units], device=self._device)
        all_reduce(votes, self._dp_group, "max")
        late = [unit for unit, vote in zip(self._units, votes.tolist(), strict=True) if vote]
        for unit in late:
            if self._has_replica_reduction and unit.groups.replicate.rank:
                unit.grad_shard.zero_()  # it is already the sum over replicas
            self._start(unit)
        self._finish_all()
        self._finish_replicas(late)

    def _finish_replicas(self, units: Sequence[FlatParam]) -> None:
        """Sum the gradients of these units, which have been reduced, over the replicas."""
        if self._reduces_replicas and self._defers_replicas:
            self._copy_stream.synchronize()  # they start from gradients on the host
            for unit in units:
                self._start_replica_reduction(unit, unit.grad_shard)
        for unit, total, work in self._replica_reductions:
            work.wait()
            self._squared_norms[unit] = squared_norm(total.to(unit.grad_shard.dtype))
            if total is not unit.grad_shard:
                self._copy_stream.copy(unit.grad_shard, total)
        self._drop_replica_reductions()

    def _drop_replica_reductions(self) -> None:
        """After waiting for them: free their tensors when these have been copied to the host."""
        # The CPU reads copied gradients now, and overwrites weights that may still be read.
        self._copy_stream.synchronize()
        for unit, total, _ in self._replica_reductions:
            self._tracker.subtract(0 if total is unit.grad_shard else total.nbytes)
        self._replica_reductions.clear()

    def squared_norm(self) -> Tensor:
        """After `wait`: the squared norm of this rank's gradient shards, float64. Each element of the full
        gradient counts once over the ranks that hold one copy. Each unit's was computed when its reduction
        finished, while later ones were in flight."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        counted = [unit for unit in self._units if unit.groups.counts]
        if counted:
            total = torch.stack([self._squared_norms[unit] for unit in counted]).sum()
        for unit in counted:
            for uncounted in unit.uncounted_grads():
                total -= squared_norm(uncounted).to(total.device)
        return total

    def update_squared_norm(self, unit: FlatParam) -> None:
        """After `wait`: recompute it for a unit whose gradient has changed."""
        self._squared_norms[unit] = squared_norm(unit.grad_shard).to(self._device)

    def reset(self) -> None:
        """Prepare for the next step; also after an exception, with reductions in flight."""
        while self._in_flight:
            reducer, unit, work = self._in_flight.popleft()
            reducer.discard(unit, work)
        for *_, replica_work in self._replica_reductions:
            replica_work.wait()
        if self._replica_reductions:
            self._drop_replica_reductions()
        self._squared_norms.clear()
        self._last = False
        self._launcher.begin(starts=False)
        for unit in self._units:
            unit.reset()

    @property
    def _units(self) -> list[FlatParam]:
        """In the order of reductions."""
        return self._launcher.order

    @property
    def _reduces_replicas(self) -> bool:
        """True if this reduction is followed by one over the replicas."""
        return self._last and self._has_replica_reduction

    def on_complete(self, unit: FlatParam) -> None:
        self._launcher.complete(unit)
        while self._in_flight and self._finishes_early(self._in_flight[0][-1]):
            self._finish_oldest()

    def _finishes_early(self, work: ReduceWork) -> bool:
        """Decide whether to finish a reduction during backward, while CPU caches may hold the contributions.

        Only if unsharded gradients are kept. Peak memory must not depend on the ranks' timing, so a reduction
        with buffers is not finished early; nor must the order of reductions over replicas, where it matters.
        """
        return self._may_finish_early and not work.buffer_bytes and work.is_ready

    def on_late(self, unit: FlatParam) -> None:
        """Finish the unit's reduction in flight before a late gradient is accumulated."""
        while any(unit is other for _, other, _ in self._in_flight):
            self._finish_oldest()

    def _start(self, unit: FlatParam) -> None:
        """Start the reduce-scatter of a unit; finish the oldest ones beyond the limit in flight."""
        grads = unit.finalize()
        self._column_reduce.reduce(unit.layout, grads)  # see [Note: reduction over columns]
        unit.grad_buffer.move(GradientState.REDUCING)
        work = self._reduction.start(unit, grads)
        self._in_flight.append((self, unit, work))
        self._tracker.add(work.buffer_bytes)
        while len(self._in_flight) > self._max_in_flight:
            self._finish_oldest()

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reducer, unit, work = self._in_flight.popleft()
        reducer.finish(unit, work)

    def discard(self, unit: FlatParam, work: ReduceWork) -> None:
        """Wait for a reduction and discard its result."""
        for _ in work.into(torch.empty_like(unit.grad_shard, device=self._device)):
            pass
        self._tracker.subtract(work.buffer_bytes)

    def finish(self, unit: FlatParam, work: ReduceWork) -> None:
        """Wait for a reduction, write or add the result to `grad_shard`, and free `grad_buffer` unless kept;
        then, once a step, start the reduction over replicas (with deadlines, `wait` does)."""
        target = unit.grad_shard
        is_staged = target.device != self._device  # the sum is in host memory
        starts_replicas = self._reduces_replicas and not self._defers_replicas
        if is_staged:
            target = self._staging_tensor(unit, is_kept=starts_replicas)
        squares = []
        for chunk in work.into(target, add=unit.has_sum):
            if self._last and not self._reduces_replicas:
                squares.append(squared_norm(chunk) if work.squares is None else work.squares)
        self._tracker.subtract(work.buffer_bytes)
        self._to_release = [work]
        unit.on_reduced()
        if squares:
            self._squared_norms[unit] = squares[0] if len(squares) == 1 else torch.stack(squares).sum()
        if starts_replicas:
            self._start_replica_reduction(unit, target)
        elif is_staged:
            self._staged.in_use_by(self._copy_stream.copy(unit.grad_shard, target))

    def _staging_tensor(self, unit: FlatParam, *, is_kept: bool) -> Tensor:
        """A tensor on the device for the unit's reduced gradient, with the sum of earlier ones, if any.

        Unless `is_kept`, the unit after the next one overwrites it when it has been copied to the host.
        """
        shard = unit.grad_shard
        if is_kept:
            staged = torch.empty_like(shard, device=self._device)
        else:
            staged = self._staged.take(shard.numel(), shard.dtype)
        if unit.has_sum:
            self._copy_stream.copy(staged, shard).wait()
        return staged

    def _start_replica_reduction(self, unit: FlatParam, reduced: Tensor) -> None:
        total, work = self._reduction.start_replica_reduction(unit, reduced)
        self._tracker.add(0 if total is unit.grad_shard else total.nbytes)
        self._replica_reductions.append((unit, total, work))
