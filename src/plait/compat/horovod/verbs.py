"""Horovod's operations on tensors, with their autograd. Gradients are those of the sum of all ranks' losses.

All ranks make the same calls in the same order: `name` is accepted and not used. Tensors of another device
than the ranks' (metrics on the CPU of a job on GPUs) are copied there and back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait import comm
from plait.comm import Work
from plait.compat.horovod.job import DTYPES, job, staged
from plait.errors import CompatError, shown


@dataclass(frozen=True)
class Op:
    """A reduction. `collective`: its name in plait.comm, "" if it is not supported."""

    name: str
    collective: str


Average = Op("Average", "sum")
Sum = Op("Sum", "sum")
Min = Op("Min", "min")
Max = Op("Max", "max")
Product = Op("Product", "prod")
Adasum = Op("Adasum", "")
_OP_CODES = ("sum", "max", "min", "prod")


class GlobalProcessSet:
    """The set of all ranks, the only one."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(self.size()))

    def size(self) -> int:
        return job().world.size

    def rank(self) -> int:
        return job().world.rank

    def included(self) -> bool:
        return True


global_process_set = GlobalProcessSet()


class Handle:
    """An operation in progress: for `poll` and `synchronize`."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def is_done(self) -> bool:
        return self._finish is None or all(work.is_done() for work in self._works)

    def wait(self) -> Any:
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._result, self._finish = self._finish(), None
        return self._result


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would not block."""
    return _checked(handle).is_done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its output. Raises CommError, which is HorovodInternalError."""
    return _checked(handle).wait()


def _checked(handle: object) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise CompatError(
        "not an operation in progress",
        given=shown(handle),
        expected="what an operation whose name has `async` returns",
        hint="hvd.synchronize(hvd.allreduce_async(tensor))",
    )


def check_op(op: Op | None, average: bool | None = None) -> Op:
    """Return the reduction, by Horovod's rules. Raises CompatError for Adasum."""
    if op is not None and average is not None:
        raise CompatError(
            "both op and average are given",
            given=f"op={op!r}, average={average}",
            expected="one of the two",
            hint="op=hvd.Average or hvd.Sum",
        )
    op = (Average if average in (None, True) else Sum) if op is None else op
    if not isinstance(op, Op) or not op.collective:
        raise CompatError(
            "this reduction is not supported",
            given=op.name if isinstance(op, Op) else repr(op),
            expected="Average, Sum, Min, Max or Product",
            hint="op=hvd.Average, and a learning rate for that batch instead of Adasum's",
        )
    return op


def check_process_set(process_set: object) -> None:
    if process_set not in (None, 0, global_process_set):
        raise CompatError(
            "process sets are not supported",
            given=repr(process_set),
            expected="hvd.global_process_set",
            hint="plait.comm.World.new_group, for collectives of some of the ranks",
        )


def check_call(
    tensor: object, process_set: object = None, compression: object = None, *, has_rows: bool = False
) -> None:
    """Raise CompatError for arguments that no operation takes. `has_rows`: the tensor needs a first dim."""
    check_process_set(process_set)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"{tensor.layout}, on {tensor.device}" if isinstance(tensor, Tensor) else shown(tensor)
        raise CompatError(
            "not a dense tensor with values",
            given=kind,
            expected="a dense torch.Tensor on a CPU or a GPU",
            hint="tensor.to_dense(), torch.as_tensor(values), or hvd.allgather_object for other values",
        )
    if has_rows and not tensor.dim():
        raise CompatError(
            "a tensor without dims has no rows",
            given="a scalar tensor",
            expected="at least one dim, along which ranks send",
            hint="tensor.reshape(1)",
        )
    if compression is not None and not hasattr(compression, "decompress"):
        raise CompatError(
            "not a compression",
            given=shown(compression),
            expected="hvd.Compression.none or hvd.Compression.fp16",
            hint="compression=hvd.Compression.fp16",
        )


def _check_has_gradient(op: Op, verb: str) -> None:
    if op not in (Average, Sum):
        raise CompatError(
            f"this {verb} has no gradient", given=op.name, expected="Average or Sum", hint="op=hvd.Sum"
        )


# --- allreduce


def _start_allreduce(tensor: Tensor, out: Tensor, op: Op, prescale: float, postscale: float) -> Handle:
    own, buffer = job(), staged(tensor)
    if buffer.dtype not in DTYPES:
        raise CompatError(
            "allreduce of this dtype is not supported",
            given=buffer.dtype,
            expected=", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES),
            hint="torch.view_as_real, for complex tensors",
        )
    if op is Average and own.group.size > 1:
        postscale /= own.group.size
    if prescale != 1.0:
        buffer.mul_(prescale)
    own.announce("allreduce", buffer.numel(), DTYPES.index(buffer.dtype), _OP_CODES.index(op.collective))
    work = comm.start_all_reduce(buffer.view(-1), own.group, op.collective, label="allreduce")

    def finish() -> Tensor:
        with torch.no_grad():
            if postscale != 1.0 and not buffer.is_floating_point():
                out.copy_(buffer * postscale)  # as Horovod: towards zero
            else:
                out.copy_(buffer if postscale == 1.0 else buffer.mul_(postscale))
        return out

    return Handle([work], finish)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """Start reducing `tensor` in place."""
    check_call(tensor, process_set)
    return _start_allreduce(tensor, tensor, check_op(op, average), prescale_factor, postscale_factor)


def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start reducing a copy of `tensor`; arguments as those of `allreduce_async_`."""
    check_call(tensor)
    return allreduce_async_(tensor.detach().clone(), *args, **kwargs)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce `tensor` in place; arguments as those of `allreduce_async_`."""
    return _tensor(allreduce_async_(tensor, *args, **kwargs))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Op, factors: tuple[float, float]) -> Tensor:
        ctx.op, ctx.factors = op, factors
        return _tensor(_start_allreduce(tensor, torch.empty_like(tensor), op, *factors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _check_has_gradient(ctx.op, "allreduce")
        return _Allreduce.apply(grads[0], ctx.op, ctx.factors), None, None


class NoneCompressor:
    """Messages in the dtype of the tensor."""

    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        is_narrowed = cls.dtype is not None and tensor.is_floating_point()
        return tensor.to(cls.dtype) if is_narrowed else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


class FP16Compressor(NoneCompressor):
    """Messages in float16; shared memory adds them in float32."""

    dtype = torch.float16


class Compression:
    none = NoneCompressor
    fp16 = FP16Compressor


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001
    compression: type[NoneCompressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Tensor:
    """Return the ranks' tensors reduced: op of (tensor x prescale_factor), x postscale_factor."""
    check_call(tensor, process_set, compression)
    narrow, context = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    return compression.decompress(_Allreduce.apply(narrow, check_op(op, average), factors), context)


# --- allgather, alltoall, reducescatter: along the first dim, of which ranks may have different sizes


def _gather_integers(values: Sequence[int]) -> list[list[int]]:
    own = job()
    mine = torch.tensor(values, dtype=torch.int64, device=own.world.device)
    everyone = mine.new_empty(own.group.size * len(values))
    comm.all_gather(everyone, mine, own.group, label="numbers of rows")
    return [row.tolist() for row in everyone.view(own.group.size, -1)]


def _start_allgather(tensor: Tensor) -> Handle:
    own, shard = job(), staged(tensor)
    own.announce("allgather")
    rows = [count for (count,) in _gather_integers([shard.shape[0]])]
    full = shard.new_empty(sum(rows), *shard.shape[1:])
    work = comm.start_all_gather_list(full.split(rows), shard, own.group, label="allgather")
    return Handle([work], lambda: full.to(tensor.device))


def _start_alltoall(tensor: Tensor, splits: Sequence[int]) -> Handle:
    own, source = job(), staged(tensor)
    if len(splits) != own.group.size or sum(splits) != source.shape[0] or min(splits) < 0:
        raise CompatError(
            "the splits of an alltoall do not match the tensor",
            given=f"splits={list(splits)} of {source.shape[0]} rows",
            expected=f"{own.group.size} numbers of rows that sum to {source.shape[0]}",
            hint="splits=None, for equal parts",
        )
    own.announce("alltoall")
    received = [row[own.group.rank] for row in _gather_integers(splits)]
    out = source.new_empty(sum(received), *source.shape[1:])
    parts, outs = source.split(list(splits)), out.split(received)
    work = comm.start_all_to_all_list(outs, parts, own.group, label="alltoall")
    return Handle([work], lambda: (out.to(tensor.device), received))


def _start_reducescatter(tensor: Tensor, op: Op, rows: Sequence[int], factors: tuple[float, float]) -> Handle:
    own, full = job(), staged(tensor)
    own.announce("reducescatter")
    scale = factors[1] / own.group.size if op is Average else factors[1]
    parts = (full * factors[0] if factors[0] != 1.0 else full).split(list(rows))
    out = torch.empty_like(parts[own.group.rank])
    work = comm.start_reduce_scatter_list(out, parts, own.group, op.collective, label="reducescatter")
    return Handle([work], lambda: (out if scale == 1.0 else out.mul_(scale)).to(tensor.device))


def _even_rows(tensor: Tensor) -> list[int]:
    rows, rest = divmod(tensor.shape[0], job().group.size)
    return [rows + (rank < rest) for rank in range(job().group.size)]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = [count for (count,) in _gather_integers([tensor.shape[0]])] if tensor.requires_grad else []
        return _tensor(_start_allgather(tensor))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _tensor(_start_reducescatter(grads[0], Sum, ctx.rows, (1.0, 1.0)))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Sequence[int]) -> Any:
        out, ctx.received = synchronize(_start_alltoall(tensor, splits))
        counts = torch.tensor(ctx.received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return out, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return synchronize(_start_alltoall(grads[0], ctx.received))[0], None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Op, factors: tuple[float, float]) -> Tensor:
        ctx.op, ctx.factor = op, factors[0] * factors[1]
        return _tensor(_start_reducescatter(tensor, op, _even_rows(tensor), factors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _check_has_gradient(ctx.op, "reducescatter")
        factor = ctx.factor / (job().group.size if ctx.op is Average else 1)
        return _tensor(_start_allgather(grads[0])) * factor, None, None


def allgather_async(tensor: Tensor, name: str | None = None, process_set: object = None) -> Handle:  # noqa: ARG001
    """Start concatenating the ranks' tensors along the first dim."""
    check_call(tensor, process_set, has_rows=True)
    return _start_allgather(tensor)


def allgather(tensor: Tensor, name: str | None = None, process_set: object = None) -> Tensor:  # noqa: ARG001
    """Return the ranks' tensors, concatenated along the first dim."""
    check_call(tensor, process_set, has_rows=True)
    gathered: Tensor = _Allgather.apply(tensor)
    return gathered


def _splits(tensor: Tensor, splits: Any) -> list[int]:
    if splits is not None:
        return [int(count) for count in splits]
    if tensor.shape[0] % job().group.size:
        raise CompatError(
            "the first dim of an alltoall does not divide by the ranks",
            given=f"{tensor.shape[0]} rows, {job().group.size} ranks",
            expected="a multiple of the ranks, or splits",
            hint="splits=, a number of rows for each rank",
        )
    return _even_rows(tensor)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,  # noqa: ARG001
    process_set: object = None,
) -> Handle:
    """Start sending `splits[i]` rows to each rank i; the result is as that of `alltoall`."""
    check_call(tensor, process_set, has_rows=True)
    handle = _start_alltoall(tensor, _splits(tensor, splits))

    def finish() -> Any:
        out, received = handle.wait()
        return out if splits is None else (out, torch.tensor(received, dtype=torch.int32))

    return Handle(handle._works, finish)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,  # noqa: ARG001
    process_set: object = None,
) -> Any:
    """Send `splits[i]` rows (default: as many to each) to each rank i. Return what was received, and with
    `splits` the number of rows from each rank."""
    check_call(tensor, process_set, has_rows=True)
    out, received = _Alltoall.apply(tensor, _splits(tensor, splits))
    return out if splits is None else (out, received)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    op: Op = Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`."""
    check_call(tensor, process_set, has_rows=True)
    factors = (prescale_factor, postscale_factor)
    return _start_reducescatter(tensor, check_op(op), _even_rows(tensor), factors)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    compression: type[NoneCompressor] = Compression.none,
    op: Op = Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduced tensors; the first ranks get one more if they do not divide."""
    check_call(tensor, process_set, compression, has_rows=True)
    narrow, context = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    return compression.decompress(_Reducescatter.apply(narrow, check_op(op), factors), context)


# --- broadcast, barrier


def _start_broadcast(tensor: Tensor, out: Tensor, root: int) -> Handle:
    own, buffer = job(), staged(tensor)
    own.announce("broadcast")
    work = comm.start_broadcast(buffer, own.group, root, label="broadcast")

    def finish() -> Tensor:
        with torch.no_grad():
            return out.copy_(buffer)

    return Handle([work], finish)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int) -> Tensor:
        ctx.root = root
        return _tensor(_start_broadcast(tensor, torch.empty_like(tensor), root))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = allreduce(grads[0], op=Sum)
        return total if job().group.rank == ctx.root else torch.zeros_like(total), None


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001
    process_set: object = None,
) -> Handle:
    """Start overwriting `tensor` with the root's."""
    check_call(tensor, process_set)
    return _start_broadcast(tensor, tensor, root_rank)


def broadcast_async(tensor: Tensor, root_rank: int, *args: Any, **kwargs: Any) -> Handle:
    """Start copying the root's tensor into a new one."""
    check_call(tensor)
    return broadcast_async_(tensor.detach().clone(), root_rank, *args, **kwargs)


def broadcast_(tensor: Tensor, root_rank: int, *args: Any, **kwargs: Any) -> Tensor:
    """Overwrite `tensor` with the root's."""
    return _tensor(broadcast_async_(tensor, root_rank, *args, **kwargs))


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001
    process_set: object = None,
) -> Tensor:
    """Return the root's tensor."""
    check_call(tensor, process_set)
    copied: Tensor = _Broadcast.apply(tensor, root_rank)
    return copied


def barrier(process_set: object = None) -> None:
    """Block until all ranks have called it."""
    check_process_set(process_set)
    job().announce("barrier")
    comm.barrier(job().group)


# --- several tensors


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a list of tensors that calls `function` for each, with the same arguments."""

    def call(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        results = [function(tensor, *args, **kwargs) for tensor in tensors]
        if results and isinstance(results[0], Handle):
            return Handle([], lambda: [handle.wait() for handle in results])
        return results

    call.__name__ = call.__qualname__ = f"grouped_{function.__name__}"
    call.__doc__ = f"Call `{function.__name__}` for each tensor of a list, with the same arguments."
    return call


def _tensor(handle: Handle) -> Tensor:
    result: Tensor = handle.wait()
    return result
