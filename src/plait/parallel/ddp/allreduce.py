"""Reduction of a bucket: an all-reduce, or the user's communication hook.

[Note: gradient division]
The mean over p ranks is taken where it is cheapest: in the transport if that reads every element anyway
(shared memory, NCCL), else while gradients are copied into the bucket, which also avoids overflow in float16
sums. Inside `join()` the divisor is the number of ranks that still have data, which each rank receives after
its forward; ranks that have joined contribute zeros, and do not divide. Hooks receive gradients before any
division.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.comm.collectives import Group, all_gather, start_all_reduce
from plait.errors import DDPError
from plait.parallel.ddp.bucket import Bucket, GradBucket, SparseBucket

AnyBucket = Bucket | SparseBucket
Hook = Callable[..., "torch.futures.Future[Tensor]"]


class GradientGroup(Protocol):
    """The ranks whose gradients are reduced. Implemented by AttachedGroup and by Horovod's GradientRanks."""

    @property
    def rank(self) -> int: ...

    @property
    def group(self) -> Group: ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized flat tensor for the group's collectives."""


@dataclass(frozen=True)
class Reduction:
    """How the ranks' gradients are combined: the mean, or with `scale` the sum times the second factor of
    contributions times the first. `message_dtype`: of messages, if it is narrower than the gradients'."""

    scale: tuple[float, float] | None = None
    message_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Options:
    """Constructor options about gradients. `limits`: bucket sizes in bytes, see `assign_buckets`.

    `passes`: gradients of each parameter per reduction, see [Note: an optimizer's backwards]. `groups`: for
    each parameter, the number of the parameters that share its bucket, or -1."""

    limits: Sequence[int]
    passes: int | None = None
    groups: Sequence[int] = ()
    reduction: Reduction = field(default_factory=Reduction)
    find_unused: bool = False
    as_views: bool = False
    skips_unused: bool = False


class BucketReducer:
    """Starts the reductions of buckets, and waits for them in the same order."""

    def __init__(self, attached: GradientGroup, reduction: Reduction = Reduction()) -> None:
        self.attached = attached
        self._reduction = reduction
        self._hook: Hook | None = None
        self._state: object = None
        # By bucket, until its next future: a thread of the process group may still run a callback of a
        # completed future, and must not be the one that frees it.
        self._futures: dict[int, Any] = {}
        self._divisor: float | None = None  # of this backward, once known
        self._active: Any = None  # work whose result is the number of ranks with data
        self._is_in_join = False

    @property
    def group(self) -> Group:
        return self.attached.group

    # --- the divisor: see [Note: gradient division]

    def reset(self) -> None:
        """Clear the divisor after a backward."""
        self._divisor = None

    def enter_join(self) -> None:
        """Enter `join()`: some ranks may contribute zeros."""
        self._is_in_join = True

    def expect_active(self, work: Any, *, is_static: bool) -> None:
        """Set the work that counts ranks with data in `join()`. `is_static`: divide by all ranks instead."""
        self._active = None if is_static else work

    def factor(self) -> float | None:
        """Factor applied to gradients when they are copied into buckets; None for 1."""
        if self._hook is not None or self._takes_mean:
            return None
        if self._reduction.scale is not None:
            return None if self._reduction.scale[0] == 1.0 else self._reduction.scale[0]
        if self._divisor is None:
            self._divisor = float(self.group.size)
            if self._active is not None:
                self._divisor = float(self._active.get_future().wait()[0].item())
        return None if self._divisor == 1.0 else 1.0 / self._divisor

    @property
    def _takes_mean(self) -> bool:
        transport = self.group.transport_or_none
        is_mean = self._reduction.scale is None and not self._is_in_join
        return is_mean and transport is not None and transport.takes_mean

    def leave_join(self) -> None:
        """Leave `join()`, until `expect_active` is called."""
        self._is_in_join, self._active = False, None

    # --- reductions

    def register(self, hook: Hook, state: object) -> None:
        """Set the communication hook. Raises DDPError if there already is one."""
        if self._hook is not None:
            raise DDPError(
                "register_comm_hook or register_builtin_comm_hook can only be called once.",
                given="a second hook",
                expected="one hook",
                hint="one hook that does both",
            )
        self._hook, self._state = hook, state

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    def start(self, bucket: AnyBucket, buffer: Tensor, *, is_last: bool) -> Callable[[], Tensor]:
        """Start the reduction of `buffer`. Return a function that waits for the result."""
        if self._hook is not None:
            return self.run_hook(as_grad_bucket(bucket, buffer, is_last=is_last))
        return self.start_sum(bucket, buffer, divides=self._takes_mean)

    def start_sum(self, bucket: AnyBucket, buffer: Tensor, *, divides: bool) -> Callable[[], Tensor]:
        """Start a reduction without hook. `divides`: by the number of ranks, in the transport."""
        factor = 1.0 if self._reduction.scale is None else self._reduction.scale[1]
        if isinstance(bucket, SparseBucket):
            factor = 1 / self.group.size if divides else factor
            return lambda: all_reduce_sparse(buffer, self.group, f"bucket {bucket.index}") * factor
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        message = real if self._reduction.message_dtype is None else real.to(self._reduction.message_dtype)
        op, label = "mean" if divides else "sum", f"bucket {bucket.index} of gradients"
        work = start_all_reduce(message, self.group, op, label=label)

        def wait() -> Tensor:
            work.wait()
            if message is not real:
                real.copy_(message)
            if factor != 1.0:
                real.mul_(factor)
            return buffer

        return wait

    def run_hook(self, bucket: GradBucket) -> Callable[[], Tensor]:
        """Run the hook on a bucket. Return a function that waits for the new gradients."""
        assert self._hook is not None, "no hook"
        future = self._hook(self._state, bucket)
        if not isinstance(future, torch._C.Future):
            raise DDPError(
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future)}",
                expected="a future whose result is the new gradients",
            )
        self._futures[bucket.index()] = future
        return lambda: _hook_result(future.wait(), bucket)


def as_grad_bucket(bucket: AnyBucket, buffer: Tensor, *, is_last: bool) -> GradBucket:
    return GradBucket(bucket.index, buffer, bucket.parameters, bucket.views_of, is_last=is_last)


def _hook_result(result: object, bucket: GradBucket) -> Tensor:
    """Check a future's result: a tensor, or a list of one as process groups return it."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    numel = bucket.buffer().numel()
    if not isinstance(result, Tensor) or result.numel() != numel:
        raise DDPError(
            "The future of a DDP communication hook does not hold the gradients of its bucket.",
            given=f"{result.numel()} elements"
            if isinstance(result, Tensor)
            else f"a {type(result).__name__}",
            expected=f"a tensor of {numel} elements, like `bucket.buffer()` of bucket {bucket.index()}",
            hint="bucket.buffer() as the result, changed in place",
        )
    return result


def all_reduce_sparse(gradient: Tensor, group: Group, name: str) -> Tensor:
    """Sum of the ranks' sparse (COO) gradients. Collective over `group`."""
    local = gradient.coalesce()
    if group.size == 1:
        return local
    indices, values = local.indices(), local.values()
    counts = torch.empty(group.size, dtype=torch.int64, device=indices.device)
    all_gather(counts, counts.new_tensor([indices.shape[1]]), group, label=f"numbers of rows of {name}")
    sizes = counts.tolist()
    largest = max(sizes)
    if largest == 0:
        return local
    all_indices = _all_gather_rows(indices.mT, largest, group, name)
    all_values = _all_gather_rows(values, largest, group, name)
    rows = torch.cat([chunk[:size] for chunk, size in zip(all_indices, sizes, strict=True)])
    all_terms = torch.cat([chunk[:size] for chunk, size in zip(all_values, sizes, strict=True)])
    return torch.sparse_coo_tensor(rows.mT, all_terms, gradient.shape, check_invariants=False).coalesce()


def _all_gather_rows(rows: Tensor, largest: int, group: Group, name: str) -> Tensor:
    """All-gather the ranks' rows, padded to (ranks, largest, ...)."""
    padded = rows.new_zeros(largest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = rows.new_empty(group.size * padded.numel())
    real = torch.view_as_real(gathered).view(-1) if gathered.is_complex() else gathered
    rows_flat = torch.view_as_real(padded).reshape(-1) if padded.is_complex() else padded.reshape(-1)
    all_gather(real, rows_flat, group, label=f"rows of {name}")
    return gathered.view(group.size, *padded.shape)
