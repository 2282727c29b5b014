"""Reduction of a bucket: an all-reduce, or the user's communication hook.

[Note: gradient division]
The mean over p ranks is taken where it is cheapest: in the transport if that reads every element anyway
(shared memory), else while gradients are copied into the bucket, which also avoids overflow in float16 sums.
Inside `join()` the divisor is the number of ranks that still have data, which each rank receives after its
forward; ranks that have joined contribute zeros, and do not divide. Hooks receive gradients before any
division.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.attach import AttachedGroup
from plait.comm.collectives import Group, shares_memory, start_all_reduce
from plait.comm.transport import Work
from plait.errors import DDPError
from plait.parallel.ddp.bucket import Bucket, GradBucket, SparseBucket, all_reduce_sparse
from plait.parallel.ddp.errors import HOOK_REGISTERED_TWICE, HOOK_WITHOUT_FUTURE, invalid_hook_result

AnyBucket = Bucket | SparseBucket
Hook = Callable[..., "torch.futures.Future[Tensor]"]


class BucketReducer:
    """Starts the reductions of buckets, and waits for them in the same order."""

    def __init__(self, attached: AttachedGroup) -> None:
        self.attached = attached
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
        if self._divisor is None:
            self._divisor = float(self.group.size)
            if self._active is not None:
                self._divisor = float(self._active.get_future().wait()[0].item())
        return None if self._divisor == 1.0 else 1.0 / self._divisor

    @property
    def _takes_mean(self) -> bool:
        return not self._is_in_join and shares_memory(self.group)

    def leave_join(self) -> None:
        """Leave `join()`, until `expect_active` is called."""
        self._is_in_join, self._active = False, None

    # --- reductions

    def register(self, hook: Hook, state: object) -> None:
        """Set the communication hook. Raises DDPError if there already is one."""
        if self._hook is not None:
            raise DDPError(HOOK_REGISTERED_TWICE, hint="one hook that does both")
        self._hook, self._state = hook, state

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    def start(self, bucket: AnyBucket, buffer: Tensor, *, is_last: bool) -> Callable[[], Tensor]:
        """Start the reduction of `buffer`. Return a function that waits for the result."""
        if self._hook is not None:
            return self.run_hook(as_grad_bucket(bucket, buffer, is_last=is_last))
        if isinstance(bucket, SparseBucket):
            return self._start_sparse_sum(bucket, buffer, self.group.size if self._takes_mean else 1)
        work = self._start_sum(buffer, "mean" if self._takes_mean else "sum", bucket.index)
        return _PendingSum(work, buffer)

    def start_zeros(self, bucket: AnyBucket, zeros: Tensor) -> Callable[[], Tensor]:
        """Start a reduction with zeros on a rank that has joined, without division in the transport."""
        if isinstance(bucket, SparseBucket):
            return self._start_sparse_sum(bucket, zeros, 1)
        return _PendingSum(self._start_sum(zeros, "sum", bucket.index), zeros)

    def _start_sparse_sum(self, bucket: SparseBucket, buffer: Tensor, divisor: int) -> Callable[[], Tensor]:
        return lambda: all_reduce_sparse(buffer, self.group, f"bucket {bucket.index}") / divisor

    def _start_sum(self, buffer: Tensor, op: str, index: int) -> Work:
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        return start_all_reduce(real, self.group, op, label=f"bucket {index} of gradients")

    def run_hook(self, bucket: GradBucket) -> Callable[[], Tensor]:
        """Run the hook on a bucket. Return a function that waits for the new gradients."""
        assert self._hook is not None, "no hook"
        future = self._hook(self._state, bucket)
        if not isinstance(future, torch._C.Future):
            raise DDPError(
                f"{HOOK_WITHOUT_FUTURE} {type(future)}",
                expected="a future whose result is the new gradients",
            )
        self._futures[bucket.index()] = future
        return lambda: _hook_result(future.wait(), bucket)


class _PendingSum:
    def __init__(self, work: Work, buffer: Tensor) -> None:
        self._work = work
        self._buffer = buffer

    def __call__(self) -> Tensor:
        self._work.wait()
        return self._buffer


def as_grad_bucket(bucket: AnyBucket, buffer: Tensor, *, is_last: bool) -> GradBucket:
    return GradBucket(bucket.index, buffer, bucket.parameters, bucket.views_of, is_last=is_last)


def _hook_result(result: object, bucket: GradBucket) -> Tensor:
    """Check a future's result: a tensor, or a list of one as process groups return it."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    numel = bucket.buffer().numel()
    if not isinstance(result, Tensor) or result.numel() != numel:
        raise invalid_hook_result(result, numel, bucket.index())
    return result


InFlight = dict[int, Callable[[], Tensor]]  # by bucket: waits for its result


def finish_all(
    buckets: Sequence[AnyBucket],
    in_flight: InFlight,
    after_wait: Callable[[], None] | None,
    is_unused: Callable[[int], bool],
    runs_optimizers: bool,
) -> None:
    """Wait for the reductions in order and write the results to `.grad`. Empties `in_flight`.

    `after_wait`: called once all results have arrived and none is written; ranks that have joined communicate
    in this order too. None: a bucket is written while later ones are in flight.
    """
    for index in in_flight:
        buckets[index].alias_grads()
    results: dict[int, Tensor] = {}
    if after_wait is not None:
        results = {index: wait() for index, wait in in_flight.items()}
        after_wait()
    for index in [*in_flight]:
        result = in_flight[index]() if after_wait is None else results[index]
        del in_flight[index]
        buckets[index].write_grads(result, is_unused)
        if runs_optimizers:
            _run_optimizers(buckets[index].parameters)


def _run_optimizers(parameters: Sequence[nn.Parameter]) -> None:
    """Step the optimizers of `apply_optimizer_in_backward`, and clear their gradients."""
    for parameter in parameters:
        optimizers: Sequence[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
