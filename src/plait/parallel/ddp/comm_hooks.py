"""Compression of gradients as a communication hook.

    ddp.register_comm_hook(Compression(ddp, "int8"), compression_hook)

[Note: whose turn the group's calls are]
A compressed sum takes several messages, so on the CPU a thread says them while backward goes on; that thread
has the process group to itself until the last bucket is through, for which that bucket's hook waits. A model
whose own backward communicates over the same process group, or another one whose uncompressed gradients
travel over it in the same backward, needs a process group of its own.

[Note: what is lost and whose it is]
What codes and factors lost is part of the next step's contribution, parameter by parameter; buckets that are
dealt anew take it along. Where a sum is not finite (a loss scale was too large) the step is not taken, and
what was lost belongs to nobody: on all ranks, which have all seen the same sum, it is forgotten before the
next one.
"""

import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

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
from plait.plan import UnitLayout
from plait.plan.compression import BLOCK, code_bytes, factor_bytes
from plait.plan.layout import ParamShard
from plait.plan.plan import DEFAULT_POWERSGD_RANK, REDUCE
from plait.plan.sharding import Boxes

KINDS = ("bf16", "fp16", "int8", "powersgd")


class Compression:
    """How a model's gradients are compressed: the state of `compression_hook`. One for each model.

    kind      messages hold                                          what they lose
    bf16      bfloat16, added up in float32                          is lost
    fp16      float16, added up in float32                           is lost
    int8      8-bit codes and a scale for every 256 elements         is part of the next step's contribution
    powersgd  two thin factors of each matrix, of rank 4, or of      is part of the next step's contribution
              rank r of "powersgd:r"; what is no matrix as it is

    The sum travels as contributions do. Where every rank gets all bfloat16 contributions (up to 3 ranks over
    Gloo, up to 4 that share memory) it travels nowhere, and is float32. Gradients are float32 and dense, or a
    DDPError says which is not. All ranks end with the same bits. The ideas: `comm/compress.py`,
    `comm/factors.py`.
    """

    def __init__(self, ddp: nn.Module, kind: str) -> None:
        """`ddp`: plait's DistributedDataParallel."""
        reducer = getattr(ddp, "reducer", None)
        if not isinstance(reducer, Reducer):
            raise DDPError(
                "plait compresses the gradients of its own DistributedDataParallel",
                given=f"a {type(ddp).__module__}.{type(ddp).__qualname__}",
                expected="plait.DistributedDataParallel",
            )
        self.kind = kind
        self._factor_rank = _factor_rank(kind)
        for bucket in reducer.buckets:
            _check(bucket)
        self._reducer = weakref.ref(reducer)  # which holds this
        self._group: Group | None = None
        self._buckets: list[AnyBucket] | None = None  # the reducer's, when `_sums` were made
        self._sums: list[_BucketSum] = []
        self._last = Work()

    def start(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """Starts the mean of a bucket over the ranks: in the bucket's buffer when the future is done."""
        buffer = bucket.buffer()
        _check_dtype(buffer.dtype, f"bucket {bucket.index()}")
        if bucket.index() == 0:
            self._begin()
        group = self._group
        assert group is not None, "the first bucket did not come first"
        if group.size == 1 or not buffer.numel():
            future = _future(buffer.device)
            future.set_result(buffer)
            return future
        label = f"bucket {bucket.index()} of gradients"
        future, self._last = self._sums[bucket.index()].start(buffer, label)
        if bucket.is_last():
            with suppress(Exception):  # which the future raises, when backward asks it
                self._last.wait()  # see [Note: whose turn the group's calls are]
        return future

    def forget(self) -> None:
        """Begins anew: what was kept is of other weights, or of a gradient that was thrown away. On all
        ranks, between two steps."""
        self._last.wait()
        for each in self._sums:
            each.compressor.forget()

    def _begin(self) -> None:
        """A backward's first bucket: what an earlier one has left under way is waited for."""
        self._last.wait()
        reducer = self._reducer()
        assert reducer is not None, "a hook of a reducer that is gone"
        group = reducer.carrier.behind.group_with_background
        if group is not self._group or reducer.buckets is not self._buckets:
            before = self._lost() if group is self._group else {}
            self._group, self._buckets = group, reducer.buckets
            self._sums = self._deal(group, [_check(bucket) for bucket in reducer.buckets])
            for number, lost in self._lost().items():
                if number in before:
                    lost.copy_(before[number])
        elif not all(bool(each.is_finite) for each in self._sums if each.keeps):
            self.forget()  # see [Note: what is lost and whose it is]

    def _deal(self, group: Group, buckets: list[Bucket]) -> "list[_BucketSum]":
        """A compressor for each bucket. They share one room for messages, made one after another."""
        if group.size == 1:
            return []
        device = buckets[0].device
        rank, code = self._factor_rank, self.kind
        if rank is not None:
            layouts = [_layout(bucket) for bucket in buckets]
            room = _room(max(factor_bytes(layout, rank) for layout in layouts), device)
            return [
                _BucketSum(PowerSGDReduce(it, rank, group, room), it.numel, group, device) for it in layouts
            ]
        numels = [-(-sum(bucket.sizes) // BLOCK) * BLOCK for bucket in buckets]
        if code == "bf16" and sends_narrow(group, torch.bfloat16, torch.float32):
            return [
                _BucketSum(NarrowReduce(it, group, torch.bfloat16, device), it, group, device)
                for it in numels
            ]
        room = _room(max(code_bytes(numel, group.size, code) for numel in numels), device)
        return [
            _BucketSum(CompressedReduce(it, group, CODECS[code], room), it, group, device) for it in numels
        ]

    def _lost(self) -> dict[int, Tensor]:
        """By the parameter's number."""
        found: dict[int, Tensor] = {}
        for bucket, each in zip(self._buckets or [], self._sums, strict=False):
            if each.keeps and isinstance(bucket, Bucket):
                lost = each.compressor.kept[0][: sum(bucket.sizes)]
                found.update(zip(bucket.numbers, lost.split(bucket.sizes), strict=True))
        return found


def compression_hook(state: Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `register_comm_hook`: the mean of compressed gradients. See `Compression`."""
    return state.start(bucket)


@dataclass
class _BucketSum:
    """How one bucket is compressed. `numel`: of what its compressor sums, gradients and zeros behind them."""

    compressor: Compressor
    numel: int
    group: Group
    device: torch.device

    def __post_init__(self) -> None:
        self.keeps = any(tensor.numel() for tensor in self.compressor.kept)
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.device)  # the last sum
        self._padded: Tensor | None = None

    @torch.no_grad()
    def start(self, buffer: Tensor, label: str) -> "tuple[torch.futures.Future[Tensor], Work]":
        """Also returns what ends with the future."""
        given, background = self._given(buffer), self.group.background
        assert background is not None, "a group of one has nothing to compress"
        future = _future(buffer.device)
        summing = self.compressor.start(given, (0, self.numel), label=label)
        finish = partial(self._finish, summing, given, buffer, future)
        return future, background.submit(finish, failed=partial(_fail, future))

    def _given(self, buffer: Tensor) -> Tensor:
        """The buffer itself, if it is as long as its compressor wants it; else a copy."""
        if buffer.numel() == self.numel:
            return buffer
        if self._padded is None:
            self._padded = torch.zeros(self.numel, dtype=buffer.dtype, device=buffer.device)
        self._padded[buffer.numel() :].zero_()  # the last sum may have left NaN there
        self._padded[: buffer.numel()].copy_(buffer)
        return self._padded

    def _finish(
        self, summing: ReduceWork, given: Tensor, buffer: Tensor, future: "torch.futures.Future[Tensor]"
    ) -> None:
        for _ in summing.into(given):
            pass
        torch.div(given[: buffer.numel()], self.group.size, out=buffer)
        if self.keeps:
            low, high = buffer.aminmax()  # NaN if one is
            self.is_finite.copy_(low.isfinite() & high.isfinite())
        future.set_result(buffer)


def _layout(bucket: Bucket) -> UnitLayout:
    """The bucket's gradients as they lie in it."""
    pieces, start = [], 0
    for name, parameter, size in zip(bucket.names, bucket.parameters, bucket.sizes, strict=True):
        shape = _shape_in_memory(parameter)
        pieces.append(ParamShard(name, shape, Boxes.full(shape), start))
        start += size
    name = f"bucket {bucket.index}"
    return UnitLayout(name, name, tuple(pieces), (), start, 1)


def _shape_in_memory(parameter: Tensor) -> tuple[int, ...]:
    """The dims in the order in which they lie in a bucket: of a transposed matrix its transpose."""
    dims = list(range(parameter.ndim))
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        strides = parameter.stride()
        dims.sort(key=lambda dim: -strides[dim])
    return tuple(parameter.shape[dim] for dim in dims)


def _room(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _future(device: torch.device) -> "torch.futures.Future[Tensor]":
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _fail(future: "torch.futures.Future[Tensor]", error: BaseException) -> None:
    future.set_exception(error)  # type: ignore[arg-type]  # torch's T is not what a future holds


def _factor_rank(kind: str) -> int | None:
    """None of what is no "powersgd". Raises DDPError for what is no kind."""
    found = REDUCE.fullmatch(kind) if isinstance(kind, str) else None
    if found is None or kind == "fp32":
        raise DDPError(
            "gradients cannot be compressed like that",
            given=f"{kind!r}",
            expected='"bf16", "fp16", "int8", "powersgd" or "powersgd:r" with a rank r from 1',
            hint="no hook at all" if kind == "fp32" else unknown_key_hint(str(kind), KINDS),
        )
    return int(found[1] or DEFAULT_POWERSGD_RANK) if kind.startswith("powersgd") else None


def _check(bucket: AnyBucket) -> Bucket:
    """Raises DDPError for gradients that are not compressed."""
    if not isinstance(bucket, Bucket):
        raise DDPError(
            "sparse gradients are not compressed",
            given=f"the gradient of {bucket.name}",
            expected="dense gradients in float32",
            hint="torch.nn.Embedding(..., sparse=False), or no compression",
        )
    _check_dtype(bucket.dtype, f"the gradient of {bucket.names[0]}")
    return bucket


def _check_dtype(dtype: torch.dtype, what: str) -> None:
    if dtype != torch.float32:
        raise DDPError(
            "plait compresses gradients in float32",
            given=f"{what}, in {str(dtype).removeprefix('torch.')}",
            expected="parameters in float32",
            hint="model.float(), with torch.autocast for what computes in less",
        )
