"""Assign parameters to buckets."""

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
    """Constructor options about gradients. `limits`: bucket sizes in bytes, see `plan/ddp_buckets.py`."""

    limits: Sequence[int]
    find_unused: bool = False
    as_views: bool = False
    skips_unused: bool = False


def build_buckets(
    parameters: Sequence[nn.Parameter],
    are_sparse: Sequence[bool],
    names: Mapping[int, str],
    options: Options,
    attached: AttachedGroup,
    order: Sequence[int],
    is_reverse: bool,
) -> list[AnyBucket]:
    """Build the buckets of all parameters, filled in `order`. `is_reverse`: reverse their order."""
    specs = [
        GradSpec(p.numel() * p.dtype.itemsize, (p.dtype, p.device), alone)
        for p, alone in zip(parameters, are_sparse, strict=True)
    ]
    assignment = assign_buckets(specs, options.limits, order)
    if is_reverse:
        assignment.sort(key=min, reverse=True)
    buckets: list[AnyBucket] = []
    for index, param_indices in enumerate(assignment):
        bucket_names = [names.get(param_index, f"parameter {param_index}") for param_index in param_indices]
        bucket_params = [parameters[param_index] for param_index in param_indices]
        if are_sparse[param_indices[0]]:
            buckets.append(SparseBucket(index, param_indices[0], bucket_params[0], bucket_names[0]))
        else:
            buckets.append(
                Bucket(
                    index,
                    param_indices,
                    bucket_params,
                    bucket_names,
                    partial(_allocate, attached),
                    as_views=options.as_views,
                )
            )
    return buckets


def build_slots(buckets: Sequence[AnyBucket]) -> list[ParamSlot]:
    """Slots by parameter index."""
    slots = {
        param_index: ParamSlot(bucket, position, bucket.grad_bytes[position], bucket.pending)
        for bucket in buckets
        for position, param_index in enumerate(bucket.param_indices)
    }
    return [slots[param_index] for param_index in range(len(slots))]


def _allocate(attached: AttachedGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return empty(numel, dtype, device, attached.group)
