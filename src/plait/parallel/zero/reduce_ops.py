"""How gradients are added up over the data ranks: as they are, rounded, or compressed. The plan's answer.

[Note: one sum or two]
Ranks along `shard` add up into their ranges; the ranks along `replicate`, which hold copies of a range, then
add up those. Where one sum over all data ranks does it all (`reduces_over_all`), the second falls away.

[Note: what a compressed sum keeps]
What the codes and factors of a step lost is part of the next one's gradient. A step that is not taken, or
weights that come from elsewhere, make it another training's: `forget`. It is a sum like the gradient, so a
loss scale is in it: `scale` when that changes. It is not saved, see `reduce` in `plan/plan.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    is_direct,
    sends_narrow,
    start_all_reduce,
    start_exchange,
    start_scattered_sum,
)
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.grad_buffer import ByteTracker
from plait.parallel.zero.groups import DataGroups, Precision
from plait.plan import Layout, Plan, compresses, message_buffer_bytes, reduces_over_all


@dataclass(frozen=True)
class ReplicaReduction:
    """Replicas add up a range. `summed` is in use, and holds the sum when `pending` has been waited for."""

    summed: Tensor
    pending: Work
    buffer_bytes: int  # of `summed`, where it is a copy


class GradReduction(Protocol):
    """Adds up contributions of units, in one order on all ranks."""

    at_once: bool  # see [Note: one sum or two]

    scratch_bytes: int  # what an algorithm holds for what it has received

    @property
    def residual_bytes(self) -> int:
        """What lives from step to step."""

    def start(self, unit: FlatParam, contribution: Tensor) -> ReduceWork:
        """Of the range that this rank owns. `contribution` is in use, and may be overwritten, until then."""

    def start_between(self, unit: FlatParam, summed: Tensor) -> ReplicaReduction:
        """What `start` summed, over the replicas."""

    def forget(self) -> None:
        """See [Note: what a compressed sum keeps]. Nothing may be under way."""

    def scale(self, factor: float) -> None:
        """From now on gradients are `factor` times what they were."""


class DefaultReduction:
    """Gradients travel as they are, or rounded to bf16."""

    scratch_bytes = 0

    def __init__(self, groups: DataGroups, device: torch.device, *, exchanges: bool, rounded: bool) -> None:
        """`exchanges`: replicas send each other their contributions as they are. `rounded`: gradients travel
        in bf16, whatever they are."""
        self.at_once = exchanges
        self._groups = groups
        self._device = device
        self._rounded = rounded

    @property
    def residual_bytes(self) -> int:
        return 0

    def start(self, unit: FlatParam, contribution: Tensor) -> ReduceWork:
        copied = self._rounded and contribution.dtype != torch.bfloat16
        if copied:
            contribution = unit.cut.lend(contribution.numel(), torch.bfloat16).copy_(contribution)
        if self.at_once:
            summing = start_exchange(contribution, self._groups.replicate, label=unit.layout.name)
        else:
            summing = start_scattered_sum(contribution, self._groups.reductions, label=unit.layout.name)
        summing.buffer_bytes += contribution.nbytes if copied else 0
        return summing

    def start_between(self, unit: FlatParam, summed: Tensor) -> ReplicaReduction:
        if summed.device != self._device or self._rounded:
            summed = summed.to(self._device, torch.bfloat16 if self._rounded else summed.dtype)
        pending = start_all_reduce(summed, self._groups.replicate, label=unit.layout.name)
        return ReplicaReduction(summed, pending, 0 if summed is unit.gradient else summed.nbytes)

    def forget(self) -> None:
        """Nothing is kept."""

    def scale(self, factor: float) -> None:
        """Nothing is kept."""


class CompressedReduction:
    """Gradients travel in codes or as factors. See [Note: what a compressed sum keeps]."""

    scratch_bytes = 0  # a room, which is foretold with its plan

    def __init__(
        self,
        units: Sequence[FlatParam],
        plan: Plan,
        groups: DataGroups,
        device: torch.device,
        meter: ByteTracker,
    ) -> None:
        """`units`: those that train."""
        self.at_once = reduces_over_all(plan)
        self._device = device
        self._groups = groups
        first = groups.at_once if self.at_once else groups.reductions
        wanted = [first] if self.at_once else [first, groups.replicate]
        rooms = message_buffer_bytes(Layout(tuple(unit.layout for unit in units)), plan)
        self._first: dict[FlatParam, Compressor] = {}
        self._between: dict[FlatParam, Compressor] = {}
        for group, num_bytes in zip([g for g in wanted if g.size > 1], rooms, strict=True):
            room = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            meter.hold(num_bytes)  # for good
            for unit in units:
                if plan.powersgd_rank is not None:
                    self._first[unit] = PowerSGDReduce(unit.layout, plan.powersgd_rank, group, room)
                elif group is first:
                    self._first[unit] = CompressedReduce(unit.layout.numel, group, CODECS[plan.reduce], room)
                else:
                    numel = unit.layout.range_numel
                    self._between[unit] = CompressedReduce(numel, group, CODECS[plan.reduce], room)

    @property
    def residual_bytes(self) -> int:
        return sum(tensor.nbytes for summer in self._all() for tensor in summer.kept)

    def start(self, unit: FlatParam, contribution: Tensor) -> ReduceWork:
        label = unit.layout.name
        if unit in self._first:
            return self._first[unit].start(contribution, (unit.start, unit.stop), label=label)
        return start_scattered_sum(contribution, self._groups.reductions, label=label)  # of one rank

    def start_between(self, unit: FlatParam, summed: Tensor) -> ReplicaReduction:
        summed = summed.to(self._device)
        summing = self._between[unit].start(summed, (0, summed.numel()), label=unit.layout.name)
        pending = Work(lambda: [*summing.into(summed)])
        return ReplicaReduction(summed, pending, 0 if summed is unit.gradient else summed.nbytes)

    def forget(self) -> None:
        for summer in self._all():
            summer.forget()

    def scale(self, factor: float) -> None:
        for summer in self._all():
            summer.scale(factor)

    def _all(self) -> list[Compressor]:
        return [*self._first.values(), *self._between.values()]


class AlgorithmReduction:
    """Gradients are added up by an algorithm that the plan names."""

    def __init__(
        self,
        units: Sequence[FlatParam],
        plan: Plan,
        groups: DataGroups,
        device: torch.device,
        meter: ByteTracker,
    ) -> None:
        """`units`: those that train."""
        self.at_once = plan.algorithm_reduces_all
        self._device = device
        self._dtype = torch.bfloat16 if rounds(plan, groups) else Precision.of(plan).master
        self._over = {
            g: AlgorithmReduce(plan.algorithm, g) for g in (groups.reductions, groups.replicate) if g.size > 1
        }
        self._groups = groups
        largest = max((unit.layout.numel for unit in units), default=0)  # a stage may be frozen
        ranged = largest if self.at_once else largest // groups.reductions.size
        self.scratch_bytes = 0
        for group, numel in ((groups.reductions, largest), (groups.replicate, ranged)):
            if group in self._over:
                scratch_numel = self._over[group].scratch_numel(numel, scatter=group is groups.reductions)
                self._over[group].reserve(scratch_numel * self._dtype.itemsize)
                self.scratch_bytes += scratch_numel * self._dtype.itemsize
        meter.hold(self.scratch_bytes)  # for good

    @property
    def residual_bytes(self) -> int:
        return 0

    def start(self, unit: FlatParam, contribution: Tensor) -> ReduceWork:
        given = contribution.to(self._dtype)
        label = unit.layout.name
        group = self._groups.replicate if self.at_once else self._groups.reductions
        if group not in self._over:
            return start_scattered_sum(given, group, label=label)  # of one rank
        summing = self._over[group].start_sum(given, scatter=not self.at_once, label=label)
        summing.buffer_bytes += 0 if given is contribution else given.nbytes
        return summing

    def start_between(self, unit: FlatParam, summed: Tensor) -> ReplicaReduction:
        summed = summed.to(self._device, self._dtype)
        pending = self._over[self._groups.replicate].start_all_reduce(summed, label=unit.layout.name)
        return ReplicaReduction(summed, pending, 0 if summed is unit.gradient else summed.nbytes)

    def forget(self) -> None:
        """Nothing is kept."""

    def scale(self, factor: float) -> None:
        """Nothing is kept."""


def receives(plan: Plan, groups: DataGroups) -> bool:
    """Whether who adds up takes each peer's contribution as it is."""
    return exchanges(plan, groups) or (plan.algorithm == "auto" and is_direct(groups.reductions))


def exchanges(plan: Plan, groups: DataGroups) -> bool:
    """Whether replicas send each other their contributions as they are."""
    if groups.reductions.size > 1 or plan.micro > 1 or compresses(plan) or plan.algorithm != "auto":
        return False
    precision = Precision.of(plan)
    narrow = torch.bfloat16 if plan.reduce == "bf16" else precision.compute
    return sends_narrow(groups.replicate, narrow, precision.master)


def rounds(plan: Plan, groups: DataGroups) -> bool:
    """Whether gradients are rounded to bf16. What travels nowhere is not."""
    return plan.reduce == "bf16" and groups.all.size > 1


def incoming(plan: Plan, groups: DataGroups) -> torch.dtype:
    """Whole gradients are narrow where each reduction takes one contribution per rank and they travel so.

    See [Note: narrow tensors on the wire ...] in `comm/torch_link.py`. Compression adds to them what it has
    kept, and leaves sums in them.
    """
    precision = Precision.of(plan)
    if compresses(plan) or (plan.accumulates_full and plan.micro > 1):
        return precision.master
    if rounds(plan, groups):
        return torch.bfloat16
    return precision.compute if receives(plan, groups) else precision.master


def reduction_of_plan(
    units: Sequence[FlatParam], plan: Plan, groups: DataGroups, device: torch.device, meter: ByteTracker
) -> GradReduction:
    """`units`: those that train."""
    if compresses(plan):
        return CompressedReduction(units, plan, groups, device, meter)
    if plan.algorithm != "auto" and plan.dp > 1:
        return AlgorithmReduction(units, plan, groups, device, meter)
    return DefaultReduction(groups, device, exchanges=exchanges(plan, groups), rounded=rounds(plan, groups))
