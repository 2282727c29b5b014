"""How a bucket is summed over the ranks: by all-reduce, or by the program's communication hook.

[Note: where gradients are divided]
The mean of p ranks is taken where it costs least: by the transport that has the numbers in its hands anyway
(shared memory), else while gradients are copied into the bucket, which also keeps float16 sums from
overflowing. Inside `join()` the divisor is the number of ranks that still have data, which each rank learns
behind its forward; those that have joined contribute zeros, and must not divide. A hook gets gradients that
nobody has divided.

Sums come in, and gradients become what the ranks agree on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.attach import AttachedGroup
from plait.comm.collectives import Group, shares_memory, start_all_reduce
from plait.comm.transport import Work
from plait.errors import DDPError
from plait.parallel.ddp.bucket import Bucket, GradBucket, SparseBucket, sum_of_rows
from plait.parallel.ddp.errors import NO_FUTURE, TWICE, not_the_gradients

AnyBucket = Bucket | SparseBucket
Hook = Callable[..., "torch.futures.Future[Tensor]"]


class BucketReducer:
    """Starts the sums of buckets, in one order, and ends them in the same."""

    def __init__(self, behind: AttachedGroup) -> None:
        self.behind = behind
        self._hook: Hook | None = None
        self._state: object = None
        # By bucket, until its next one comes: a thread of the process group may still be in a callback of the
        # future, though its result is there, and is not to be the one that frees it.
        self._futures: dict[int, Any] = {}
        self._divisor: float | None = None  # in this backward, when it is known
        self._active: Any = None  # work whose result is the number of ranks that have data
        self._is_in_join = False

    @property
    def group(self) -> Group:
        return self.behind.group

    # --- the divisor: see [Note: where gradients are divided]

    def reset(self) -> None:
        """A backward is over."""
        self._divisor = None

    def enter_join(self) -> None:
        """Some ranks may have joined, and contribute zeros."""
        self._is_in_join = True

    def expect_active(self, work: Any, *, is_static: bool) -> None:
        """In `join()`: `work` counts the ranks that have data. `is_static`: the divisor stays that of all."""
        self._active = None if is_static else work

    def factor(self) -> float | None:
        """What gradients are multiplied with on their way into buckets; None: nothing."""
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
        """What comes is not in `join()`, unless `expect_active` says so."""
        self._is_in_join, self._active = False, None

    # --- sums

    def register(self, hook: Hook, state: object) -> None:
        """From now on `hook` communicates. Raises DDPError if there is one."""
        if self._hook is not None:
            raise DDPError(TWICE, hint="one hook that does both")
        self._hook, self._state = hook, state

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    def start(self, bucket: AnyBucket, given: Tensor, *, is_last: bool) -> Callable[[], Tensor]:
        """Starts to sum what is given. Returns what waits for the result."""
        if self._hook is not None:
            return self.run_hook(seen_by_hook(bucket, given, is_last=is_last))
        if isinstance(bucket, SparseBucket):
            return self._sum_of_rows(bucket, given, self.group.size if self._takes_mean else 1)
        pending = self._start_sum(given, "mean" if self._takes_mean else "sum", bucket.index)
        return _Landing(pending, given)

    def start_zeros(self, bucket: AnyBucket, zeros: Tensor) -> Callable[[], Tensor]:
        """What a rank that has joined takes part with: its peers do not let the transport divide."""
        if isinstance(bucket, SparseBucket):
            return self._sum_of_rows(bucket, zeros, 1)
        return _Landing(self._start_sum(zeros, "sum", bucket.index), zeros)

    def _sum_of_rows(self, bucket: SparseBucket, given: Tensor, divisor: int) -> Callable[[], Tensor]:
        return lambda: sum_of_rows(given, self.group, f"bucket {bucket.index}") / divisor

    def _start_sum(self, given: Tensor, op: str, index: int) -> Work:
        real = torch.view_as_real(given).view(-1) if given.is_complex() else given
        return start_all_reduce(real, self.group, op, label=f"bucket {index} of gradients")

    def run_hook(self, seen: GradBucket) -> Callable[[], Tensor]:
        """Has the hook communicate a bucket. Returns what waits for the new gradients."""
        assert self._hook is not None, "no hook"
        future = self._hook(self._state, seen)
        if not isinstance(future, torch._C.Future):
            raise DDPError(
                f"{NO_FUTURE} {type(future)}", expected="what a hook returns has the new gradients as result"
            )
        self._futures[seen.index()] = future
        return lambda: _gradients_of(future.wait(), seen)


class _Landing:
    def __init__(self, pending: Work, given: Tensor) -> None:
        self._pending = pending
        self._given = given

    def __call__(self) -> Tensor:
        self._pending.wait()
        return self._given


def seen_by_hook(bucket: AnyBucket, given: Tensor, *, is_last: bool) -> GradBucket:
    return GradBucket(bucket.index, given, bucket.parameters, bucket.views_of, is_last=is_last)


def _gradients_of(result: object, seen: GradBucket) -> Tensor:
    """Of a future: a tensor, or a list of one as process groups give it."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    numel = seen.buffer().numel()
    if not isinstance(result, Tensor) or result.numel() != numel:
        raise not_the_gradients(result, numel, seen.index())
    return result


Landings = dict[int, Callable[[], Tensor]]  # by bucket: waits for its sum


def finish_all(
    buckets: Sequence[AnyBucket],
    landings: Landings,
    between: Callable[[], None] | None,
    is_unused: Callable[[int], bool],
    runs_optimizers: bool,
) -> None:
    """Waits for the sums, in their order, and hands them out. Empties `landings`.

    `between`: to be done when all sums are there and none is handed out: a rank that has joined takes part in
    what its peers do in this order. None: a bucket is handed out while later ones are under way.
    """
    for index in landings:
        buckets[index].hand_over()
    results: dict[int, Tensor] = {}
    if between is not None:
        results = {index: landing() for index, landing in landings.items()}
        between()
    for index in [*landings]:
        result = landings[index]() if between is None else results[index]
        del landings[index]
        buckets[index].land(result, is_unused)
        if runs_optimizers:
            _run_optimizers(buckets[index].parameters)


def _run_optimizers(parameters: Sequence[nn.Parameter]) -> None:
    """Those that `apply_optimizer_in_backward` has put on parameters; their gradients are used up."""
    for parameter in parameters:
        optimizers: Sequence[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
