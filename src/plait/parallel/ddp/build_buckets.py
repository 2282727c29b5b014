"""Parameters are dealt to buckets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from plait.comm.attach import AttachedGroup
from plait.comm.collectives import empty
from plait.parallel.ddp.allreduce import AnyBucket
from plait.parallel.ddp.bucket import Bucket, ParamSlot, SparseBucket
from plait.plan.ddp_buckets import GradSpec, assign_buckets


@dataclass(frozen=True)
class Options:
    """Of the constructor, as far as they concern gradients. `limits`: of buckets, see `plan/buckets.py`."""

    limits: Sequence[int]
    find_unused: bool = False
    as_views: bool = False
    skips_unused: bool = False


def build_buckets(
    parameters: Sequence[nn.Parameter],
    are_sparse: Sequence[bool],
    names: Mapping[int, str],
    options: Options,
    behind: AttachedGroup,
    order: Sequence[int],
    is_reverse: bool,
) -> list[AnyBucket]:
    """Buckets of all parameters, filled in `order`. `is_reverse`: the last bucket of it comes first."""
    travellers = [
        GradSpec(p.numel() * p.dtype.itemsize, (p.dtype, p.device), alone)
        for p, alone in zip(parameters, are_sparse, strict=True)
    ]
    hands = assign_buckets(travellers, options.limits, order)
    if is_reverse:
        hands.sort(key=min, reverse=True)
    buckets: list[AnyBucket] = []
    for index, numbers in enumerate(hands):
        told = [names.get(number, f"parameter {number}") for number in numbers]
        own = [parameters[number] for number in numbers]
        if are_sparse[numbers[0]]:
            buckets.append(SparseBucket(index, numbers[0], own[0], told[0]))
        else:
            buckets.append(
                Bucket(index, numbers, own, told, partial(_lend, behind), as_views=options.as_views)
            )
    return buckets


def slots_of(buckets: Sequence[AnyBucket]) -> list[ParamSlot]:
    """By number of the parameter."""
    slots = {
        number: ParamSlot(bucket, place, bucket.bytes_of[place], bucket.waiting)
        for bucket in buckets
        for place, number in enumerate(bucket.numbers)
    }
    return [slots[number] for number in range(len(slots))]


def _lend(behind: AttachedGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return empty(numel, dtype, device, behind.group)
