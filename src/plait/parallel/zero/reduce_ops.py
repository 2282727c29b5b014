"""Gradient reductions over the data ranks, as chosen by the plan: as they are, rounded, compressed, or by a
named algorithm.

[Note: one or two reductions]
The ranks along `shard` reduce-scatter into their ranges; the ranks along `replicate`, which hold copies of a
range, then all-reduce those. If one reduction over all data ranks does everything (`is_single`), there is no
second one.

[Note: residuals of compressed reductions]
The error that codecs and factors made in a step is added to the next step's gradient (error feedback). After
a skipped step, or when weights are loaded, residuals belong to another training and are discarded. They are
sums like the gradient and contain the loss scale: they are scaled when it changes. They are not saved, see
`reduce` in `plan/plan.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import (
    CODECS,
    AlgorithmReduce,
    CompressedReduce,
    Compressor,
    PowerSGDReduce,
    ReduceWork,
    Work,
    start_all_reduce,
    start_exchange,
    start_scattered_sum,
)
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.rank_context import RankContext
from plait.plan import Layout, compresses
from plait.plan.compression import Factors, message_buffer_bytes, reduces_over_all, rounds_to_bf16


class GradReduction(Protocol):
    """Reduces units' gradients, in one order on all ranks."""

    is_single: bool  # see [Note: one or two reductions]
    scratch_bytes: int  # receive buffers of a named algorithm
    compressors: Sequence[Compressor]  # their `state` lives from step to step

    def start(self, unit: FlatParam, grads: Tensor) -> ReduceWork:
        """Start the reduction into this rank's range. Until it has finished `grads`, the unsharded gradient,
        is in use and may be overwritten."""

    def start_replica_reduction(self, unit: FlatParam, reduced: Tensor) -> tuple[Tensor, Work]:
        """Start the all-reduce over replicas of the result of `start`. Return the tensor that is in use until
        the work is done, and holds the sum then."""


class DefaultReduction:
    """Gradients are sent as they are, or rounded to bf16."""

    scratch_bytes = 0
    compressors: Sequence[Compressor] = ()

    def __init__(self, context: RankContext) -> None:
        self.is_single = context.exchanges_contributions
        self._device = context.device
        self._rounds = rounds_to_bf16(context.plan)

    def start(self, unit: FlatParam, grads: Tensor) -> ReduceWork:
        copied = self._rounds and grads.dtype != torch.bfloat16
        if copied:
            grads = unit.context.allocate_grad(grads.numel(), torch.bfloat16, unit.groups).copy_(grads)
        if self.is_single:
            work = start_exchange(grads, unit.groups.replicate, label=unit.layout.name)
        else:
            work = start_scattered_sum(grads, unit.groups.reduce_scatter, label=unit.layout.name)
        work.buffer_bytes += grads.nbytes if copied else 0
        return work

    def start_replica_reduction(self, unit: FlatParam, reduced: Tensor) -> tuple[Tensor, Work]:
        if reduced.device != self._device or self._rounds:
            dtype = torch.bfloat16 if self._rounds else reduced.dtype
            reduced = reduced.to(self._device, dtype, non_blocking=True)
        return reduced, start_all_reduce(reduced, unit.groups.replicate, label=unit.layout.name)


class CompressedReduction:
    """Gradients are sent encoded or as low-rank factors. See [Note: residuals of compressed reductions]."""

    scratch_bytes = 0  # its scratch is part of the memory estimate of compression

    def __init__(self, units: Sequence[FlatParam], context: RankContext) -> None:
        """`units`: the trainable ones."""
        plan, groups = context.plan, context.groups.dense
        self.is_single = reduces_over_all(plan)
        self._device = context.device
        first = groups.first_reduction if self.is_single else groups.reduce_scatter
        wanted = [first] if self.is_single else [first, groups.replicate]
        scratch_sizes = message_buffer_bytes(Layout(tuple(unit.layout for unit in units)), plan)
        uncompressed = plan.uncompressed_steps * (1 if plan.accumulates_full else plan.micro)
        self._first: dict[FlatParam, Compressor] = {}
        self._over_replicas: dict[FlatParam, Compressor] = {}
        for group, num_bytes in zip([g for g in wanted if g.size > 1], scratch_sizes, strict=True):
            scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
            context.tracker.add(num_bytes)  # never freed
            for unit in units:
                if plan.powersgd_rank is not None:
                    layout = unit.layout
                    factors = Factors.of_unit(layout, plan.powersgd_rank)
                    self._first[unit] = PowerSGDReduce(
                        layout.name, layout.numel, factors, group, scratch, uncompressed
                    )
                elif group is first:
                    self._first[unit] = CompressedReduce(
                        unit.layout.numel, group, CODECS[plan.reduce], scratch
                    )
                else:
                    numel = unit.layout.range_numel
                    self._over_replicas[unit] = CompressedReduce(numel, group, CODECS[plan.reduce], scratch)
        self.compressors: Sequence[Compressor] = [*self._first.values(), *self._over_replicas.values()]

    def start(self, unit: FlatParam, grads: Tensor) -> ReduceWork:
        label = unit.layout.name
        if unit in self._first:
            return self._first[unit].start(grads, (unit.start, unit.stop), label=label)
        return start_scattered_sum(grads, unit.groups.reduce_scatter, label=label)  # over one rank

    def start_replica_reduction(self, unit: FlatParam, reduced: Tensor) -> tuple[Tensor, Work]:
        reduced = reduced.to(self._device, non_blocking=True)
        reduce_work = self._over_replicas[unit].start(reduced, (0, reduced.numel()), label=unit.layout.name)
        return reduced, Work(lambda: [*reduce_work.into(reduced)])


class AlgorithmReduction:
    """Gradients are reduced by the algorithm that the plan names."""

    compressors: Sequence[Compressor] = ()

    def __init__(self, units: Sequence[FlatParam], context: RankContext) -> None:
        """`units`: the trainable ones."""
        plan, groups = context.plan, context.groups.dense
        self.is_single = plan.algorithm_reduces_all
        self._device = context.device
        self._dtype = torch.bfloat16 if rounds_to_bf16(context.plan) else context.precision.master
        self._over = {
            g: AlgorithmReduce(plan.algorithm, g)
            for g in (groups.reduce_scatter, groups.replicate)
            if g.size > 1
        }
        largest = max((unit.layout.numel for unit in units), default=0)  # a stage may be frozen
        largest_range = largest if self.is_single else largest // groups.reduce_scatter.size
        self.scratch_bytes = 0
        for group, numel in ((groups.reduce_scatter, largest), (groups.replicate, largest_range)):
            if group in self._over:
                scratch_numel = self._over[group].scratch_numel(numel, scatter=group is groups.reduce_scatter)
                self._over[group].reserve(scratch_numel * self._dtype.itemsize)
                self.scratch_bytes += scratch_numel * self._dtype.itemsize
        context.tracker.add(self.scratch_bytes)  # never freed

    def start(self, unit: FlatParam, grads: Tensor) -> ReduceWork:
        cast = grads.to(self._dtype)
        label = unit.layout.name
        group = unit.groups.replicate if self.is_single else unit.groups.reduce_scatter
        if group not in self._over:
            return start_scattered_sum(cast, group, label=label)  # over one rank
        work = self._over[group].start_sum(cast, scatter=not self.is_single, label=label)
        work.buffer_bytes += 0 if cast is grads else cast.nbytes
        return work

    def start_replica_reduction(self, unit: FlatParam, reduced: Tensor) -> tuple[Tensor, Work]:
        reduced = reduced.to(self._device, self._dtype)
        return reduced, self._over[unit.groups.replicate].start_all_reduce(reduced, label=unit.layout.name)


def make_reduction(units: Sequence[FlatParam], context: RankContext) -> GradReduction:
    """Build the plan's reduction. `units`: the trainable ones."""
    plan = context.plan
    if compresses(plan):
        return CompressedReduction(units, context)
    if plan.algorithm != "auto" and plan.token_ranks > 1:
        return AlgorithmReduction(units, context)
    return DefaultReduction(context)
