"""Gradient compression as a communication hook.

    ddp.register_comm_hook(Compression(ddp, "int8"), compression_hook)

[Note: order of collectives on the process group]
A compressed sum takes several messages, so on the CPU a thread sends them during backward; it has the process
group to itself until the last bucket is done, which that bucket's hook waits for. A model whose own backward
communicates over the same process group, or another model whose uncompressed gradients are reduced over it in
the same backward, needs a process group of its own.

[Note: error feedback]
Compression errors of int8 and PowerSGD are added to the next step's contribution, parameter by parameter;
they are kept when buckets are rebuilt. If a sum is not finite (the loss scale was too large), the step is
skipped and its errors are meaningless: all ranks have seen the same sum, and all of them discard the errors
before the next one.
"""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import (
    CODECS,
    CompressedReduce,
    Compressor,
    Group,
    PowerSGDReduce,
    ReduceWork,
    Work,
    sends_narrow,
)
from plait.comm.compression import NarrowReduce
from plait.errors import DDPError, unknown_key_hint
from plait.parallel.ddp.allreduce import AnyBucket
from plait.parallel.ddp.bucket import Bucket, GradBucket
from plait.parallel.ddp.reducer import Reducer
from plait.plan.compression import BLOCK, Factors, code_bytes
from plait.plan.plan import DEFAULT_POWERSGD_RANK, REDUCE

KINDS = ("bf16", "fp16", "int8", "powersgd")


class Compression:
    """Gradient compression of one model: the state of `compression_hook`.

    kind      messages hold                                          compression error
    bf16      bfloat16, added up in float32                          is lost
    fp16      float16, added up in float32                           is lost
    int8      8-bit codes and a scale for every 256 elements         is added to the next contribution
    powersgd  two thin factors of each matrix, of rank 4, or of      is added to the next contribution
              rank r of "powersgd:r"; other tensors uncompressed

    The sum is sent in the same format as the contributions. If every rank receives all bfloat16 contributions
    (up to 3 ranks over Gloo, up to 4 in shared memory), no sum is sent and the result is float32. Gradients
    must be float32 and dense, else DDPError. All ranks end with the same bits. Algorithms:
    `comm/compression.py`.
    """

    def __init__(self, ddp: nn.Module, kind: str) -> None:
        """`ddp`: plait's DistributedDataParallel."""
        reducer = getattr(ddp, "reducer", None)
        if not isinstance(reducer, Reducer):
            raise DDPError(
                "cannot compress the gradients of another DistributedDataParallel",
                given=f"a {type(ddp).__module__}.{type(ddp).__qualname__}",
                expected="plait.DistributedDataParallel",
                hint="plait.DistributedDataParallel(model)",
            )
        self.kind = kind
        self._factor_rank, self._uncompressed_steps = _factor_options(kind)
        for bucket in reducer.buckets:
            _check(bucket)
        self._reducer = weakref.ref(reducer)  # which holds a reference to this object
        self._group: Group | None = None
        self._buckets: list[AnyBucket] | None = None  # the reducer's buckets when `_reductions` were built
        self._reductions: list[_BucketReduction] = []
        self._last = Work()

    def start(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Start averaging a bucket over the ranks. The result is written to the bucket's buffer."""
        buffer = bucket.buffer()
        _check_dtype(buffer.dtype, f"bucket {bucket.index()}")
        if bucket.index() == 0:
            self._begin()
        group = self._group
        assert group is not None, "bucket 0 must be reduced first"
        if group.size == 1 or not buffer.numel():
            future = _future(buffer.device)
            future.set_result(buffer)
            return future
        label = f"bucket {bucket.index()} of gradients"
        future, self._last = self._reductions[bucket.index()].start(buffer, label)
        if bucket.is_last():
            with suppress(Exception):  # the future raises it in backward
                self._last.wait()  # see [Note: order of collectives on the process group]
        return future

    def reset(self) -> None:
        """Discard the error feedback: weights were replaced, or a gradient was dropped. Call it on all ranks
        between two steps."""
        self._last.wait()
        for reduction in self._reductions:
            reduction.compressor.discard()

    def _begin(self) -> None:
        """Start a backward, in its first bucket: wait for the previous one, rebuild after new buckets."""
        self._last.wait()
        reducer = self._reducer()
        assert reducer is not None, "the reducer was deleted"
        attached: Any = reducer.bucket_reducer.attached  # an AttachedGroup
        group: Group = attached.group_with_comm_thread
        if group is not self._group or reducer.buckets is not self._buckets:
            previous = self._errors_by_param() if group is self._group else {}
            self._group, self._buckets = group, reducer.buckets
            self._reductions = self._build_reductions(group, [_check(bucket) for bucket in reducer.buckets])
            for param_index, error in self._errors_by_param().items():
                if param_index in previous:
                    error.copy_(previous[param_index])
        elif not all(reduction.was_finite() for reduction in self._reductions):
            self.reset()  # see [Note: error feedback]

    def _build_reductions(self, group: Group, buckets: list[Bucket]) -> "list[_BucketReduction]":
        """Build a compressor for each bucket. They share one scratch buffer, because they run one by one."""
        if group.size == 1:
            return []
        device, code = buckets[0].device, self.kind
        numels = [sum(bucket.sizes) for bucket in buckets]
        compressors: Sequence[Compressor]
        if self._factor_rank is not None:
            all_factors = [_factors(bucket, self._factor_rank) for bucket in buckets]
            scratch = _scratch(max(factors.left_bytes for factors in all_factors), device)
            compressors = [
                PowerSGDReduce(
                    f"bucket {bucket.index}", numel, factors, group, scratch, self._uncompressed_steps
                )
                for bucket, numel, factors in zip(buckets, numels, all_factors, strict=True)
            ]
        else:
            numels = [-(-numel // BLOCK) * BLOCK for numel in numels]
            if code == "bf16" and sends_narrow(group, torch.bfloat16, torch.float32):
                compressors = [NarrowReduce(numel, group, torch.bfloat16, device) for numel in numels]
            else:
                scratch = _scratch(max(code_bytes(numel, group.size, code) for numel in numels), device)
                compressors = [CompressedReduce(numel, group, CODECS[code], scratch) for numel in numels]
        return [
            _BucketReduction(compressor, numel, group, device)
            for compressor, numel in zip(compressors, numels, strict=True)
        ]

    def _errors_by_param(self) -> dict[int, Tensor]:
        """Views of the compression errors, by parameter index."""
        errors: dict[int, Tensor] = {}
        for bucket, reduction in zip(self._buckets or [], self._reductions, strict=False):
            if reduction.has_error_feedback and isinstance(bucket, Bucket):
                error = reduction.compressor.state[0][: sum(bucket.sizes)]
                errors.update(zip(bucket.param_indices, error.split(bucket.sizes), strict=True))
        return errors


def compression_hook(state: Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average compressed gradients: the hook for `register_comm_hook`. See `Compression`."""
    return state.start(bucket)


@dataclass
class _BucketReduction:
    """Compressed reduction of one bucket. `numel`: size of the compressor's input, with padding."""

    compressor: Compressor
    numel: int
    group: Group
    device: torch.device

    def __post_init__(self) -> None:
        self.has_error_feedback = any(tensor.numel() for tensor in self.compressor.state)
        is_cuda = self.device.type == "cuda"
        self._is_finite = torch.ones((), dtype=torch.bool, pin_memory=is_cuda)  # the last sum
        self._read = torch.cuda.Event() if is_cuda else None  # `_is_finite` is known
        self._padded: Tensor | None = None

    @torch.no_grad()
    def start(self, buffer: Tensor, label: str) -> "tuple[torch.futures.Future[Tensor], Work]":
        """Start the reduction. Return its future, and work that completes with it."""
        contribution, background = self._padded_contribution(buffer), self.group.comm_thread
        assert background is not None, "no communication thread"
        future = _future(buffer.device)
        work = self.compressor.start(contribution, (0, self.numel), label=label)
        finish = partial(self._finish, work, contribution, buffer, future)
        return future, background.submit(finish, on_error=partial(_fail, future))

    def _padded_contribution(self, buffer: Tensor) -> Tensor:
        """The buffer itself if it has `numel` elements, else a padded copy."""
        if buffer.numel() == self.numel:
            return buffer
        if self._padded is None:
            self._padded = torch.zeros(self.numel, dtype=buffer.dtype, device=buffer.device)
        self._padded[buffer.numel() :].zero_()  # the last sum may have written NaN
        self._padded[: buffer.numel()].copy_(buffer)
        return self._padded

    def _finish(
        self, work: ReduceWork, contribution: Tensor, buffer: Tensor, future: "torch.futures.Future[Tensor]"
    ) -> None:
        for _ in work.into(contribution):
            pass
        torch.div(contribution[: buffer.numel()], self.group.size, out=buffer)
        if self.has_error_feedback:
            low, high = buffer.aminmax()  # NaN if any element is
            self._is_finite.copy_(low.isfinite() & high.isfinite(), non_blocking=True)
            if self._read is not None:
                self._read.record()
        future.set_result(buffer)

    def was_finite(self) -> bool:
        """Return whether the last sum was finite. The device computed that in the previous backward."""
        if self._read is not None and not self._read.query():
            self._read.synchronize()
        return bool(self._is_finite)


def _factors(bucket: Bucket, rank: int) -> Factors:
    """Factors of the bucket's gradients."""
    starts = accumulate(bucket.sizes, initial=0)
    return Factors.of(zip(starts, map(_shape_in_memory, bucket.parameters), strict=False), rank)


def _shape_in_memory(parameter: Tensor) -> tuple[int, ...]:
    """Shape in memory order: for a transposed matrix, that of its transpose."""
    dims = list(range(parameter.ndim))
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        strides = parameter.stride()
        dims.sort(key=lambda dim: -strides[dim])
    return tuple(parameter.shape[dim] for dim in dims)


def _scratch(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _future(device: torch.device) -> "torch.futures.Future[Tensor]":
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _fail(future: "torch.futures.Future[Tensor]", error: BaseException) -> None:
    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates the value type


def _factor_options(kind: str) -> tuple[int | None, int]:
    """Rank of a "powersgd" kind, else None, and its uncompressed steps. Raises DDPError for an unknown
    kind."""
    errors = REDUCE.fullmatch(kind) if isinstance(kind, str) else None
    if errors is None or kind == "fp32":
        raise DDPError(
            "unknown compression of gradients",
            given=f"{kind!r}",
            expected='"bf16", "fp16", "int8", "powersgd", "powersgd:r" or "powersgd:r:s" with rank r >= 1',
            hint="no hook at all" if kind == "fp32" else unknown_key_hint(str(kind), KINDS),
        )
    if not kind.startswith("powersgd"):
        return None, 0
    return int(errors[1] or DEFAULT_POWERSGD_RANK), int(errors[2] or 0)


def _check(bucket: AnyBucket) -> Bucket:
    """Check that a bucket can be compressed. Raises DDPError if it is sparse or not float32."""
    if not isinstance(bucket, Bucket):
        raise DDPError(
            "cannot compress sparse gradients",
            given=f"the gradient of {bucket.name}",
            expected="dense gradients in float32",
            hint="torch.nn.Embedding(..., sparse=False), or no compression",
        )
    _check_dtype(bucket.dtype, f"the gradient of {bucket.names[0]}")
    return bucket


def _check_dtype(dtype: torch.dtype, owner: str) -> None:
    if dtype != torch.float32:
        raise DDPError(
            "cannot compress gradients that are not float32",
            given=f"{owner}, in {str(dtype).removeprefix('torch.')}",
            expected="parameters in float32",
            hint="model.float(), with torch.autocast for lower-precision compute",
        )
