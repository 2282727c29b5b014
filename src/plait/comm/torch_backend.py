"""torch.distributed over plait's collectives: `init_process_group("plait")`, for torch's own DDP, DTensor,
FSDP2.

Tensors are on the CPU. Lists, other dtypes and uneven sizes are mapped to plait's collectives: complex
numbers as pairs of reals, bools as bytes, lists through one flat tensor.

[Note: uneven tensor lists]
plait's collectives need equal ranges. A list of tensors to gather or to reduce-scatter shows every rank all
the sizes, so all agree whether they are equal; if not, messages or one reduction per rank are used. No rank
knows all sizes of an all-to-all: with splits, or as lists, it uses messages. These are matched like those of
`send`: between two ranks in start order, so one that was sent before such a collective must be received
before it too.

[Note: requirements on a transport]
A background thread waits for what was started while the program starts or runs further calls: `start`, `run`
and `Work.wait` are called from two threads at a time. Collectives are waited for in order, messages in any
order. What was started proceeds by itself, or during the next wait on the same transport.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import collectives
from plait.comm.collectives import Group
from plait.comm.shm.transport import open_host_group
from plait.comm.torch_transport import gloo_transport
from plait.comm.torch_work import GroupWork, WorkQueue
from plait.comm.transport import Transport, Work
from plait.errors import CommError


def best_transport(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Transport:
    """Return a new transport for the `size` ranks of this store: shared memory on one host, else Gloo. The
    store is used for nothing else."""
    gloo = gloo_transport(store, rank, size, timeout)
    shm_transport, _ = open_host_group(gloo, rank, size, store, timeout)
    if shm_transport is None:
        return gloo
    gloo.close()
    return shm_transport


BACKEND_NAME = "plait"

_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "prod"),
)


def reduce_op_name(opts: Any, collective: str) -> str:
    requested = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op, name in _OPS:
        if requested == op:
            return name
    known = [name for name, op in dist.ReduceOp.RedOpType.__members__.items() if requested == op]
    raise CommError(
        f"the {BACKEND_NAME} backend does not support this {collective} reduction",
        given=f"ReduceOp.{known[0]}" if known else requested,
        expected="SUM, AVG, MAX, MIN or PRODUCT",
        hint="ReduceOp.SUM",
    )


def dense_real(tensor: Tensor, collective: str) -> Tensor:
    """Return the same storage as a tensor that transports support: dense, real, on the CPU."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        layout = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CommError(
            f"{collective} of a tensor that is not dense",
            given=layout,
            expected="torch.strided, without quantization",
            hint="tensor.to_dense()",
        )
    if tensor.device.type != "cpu":
        raise CommError(
            f"{collective} of a tensor that is not on the CPU",
            given=f"device {tensor.device}, {tuple(tensor.shape)} of {tensor.dtype}",
            expected="cpu",
            hint="tensor.cpu(), or nccl for a group of GPUs",
        )
    result = tensor.detach()
    if result.is_conj() or result.is_neg():
        raise CommError(
            f"{collective} of a conjugated or negated view",
            given="a lazy view",
            expected="a tensor whose memory has its values",
            hint="tensor.resolve_conj().resolve_neg()",
        )
    if result.is_complex():
        return torch.view_as_real(result)
    return result.view(torch.uint8) if result.dtype is torch.bool else result


def reducible(tensor: Tensor, op: str, collective: str) -> tuple[Tensor, str]:
    """Return a supported tensor and the equivalent reduction: the sum of bools is their maximum, and the
    product their minimum."""
    if (tensor.is_complex() and op in ("max", "min", "prod")) or (
        tensor.dtype is torch.bool and op == "mean"
    ):
        raise CommError(
            f"{collective} by {op} is undefined for that dtype",
            given=tensor.dtype,
            expected="sum or mean" if tensor.is_complex() else "sum, max, min or prod",
            hint="torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.float()",
        )
    if tensor.dtype is torch.bool:
        op = {"sum": "max", "prod": "min"}.get(op, op)
    return dense_real(tensor, collective), op


def single(items: Sequence[Any], collective: str) -> Any:
    if len(items) != 1:
        raise CommError(
            f"{collective} takes one tensor per rank",
            given=len(items),
            expected=1,
            hint="one call for each tensor",
        )
    return items[0]


def check_same_size(out: Tensor, source: Tensor, collective: str) -> None:
    if out.numel() != source.numel() or out.dtype != source.dtype:
        raise CommError(
            f"the tensors of {collective} have mismatched sizes",
            given=f"{source.numel()} x {source.dtype} into {out.numel()} x {out.dtype}",
            expected="as many elements, of one dtype",
            hint="torch.empty_like(source)",
        )


def check_tag(tag: int) -> None:
    if tag != 0:
        raise CommError(
            f"the {BACKEND_NAME} backend does not support tags",
            given=f"tag={tag}",
            expected="tag=0: messages between two ranks are matched in start order",
            hint="no tag",
        )


def from_flat(outs: Sequence[Tensor], full: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(out, part.view_as(out)) for out, part in zip(outs, full.chunk(len(outs)), strict=True)]


# mypy: disable-error-code="override, assignment"
# torch declares overloads of each method that its functions do not call; they are not implemented.


TransportFactory = Callable[[dist.Store, int, int, timedelta], Transport]


def register_backend(make_transport: TransportFactory = best_transport) -> None:
    """Register "plait" as a torch.distributed backend for CPU tensors. A second call replaces the transport.

    `make_transport(store, rank, size, timeout)`: returns the transport of a group of at least two ranks; all
    of them call it together. The store is the group's own.
    """
    dist.Backend.register_backend(BACKEND_NAME, partial(_create, make_transport), devices=["cpu"])


def _create(
    make_transport: TransportFactory, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    return PlaitGroup(make_transport(store, rank, size, timeout) if size > 1 else None, rank, size)


@dataclass(slots=True)
class BackendOp:
    """One call of torch's: collectives that start together, and copies when all of them have completed."""

    label: str
    results: Sequence[Tensor]  # value of the work's future
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)  # of `comm/collectives.py`
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # to, from

    def add(self, collective: str, *args: Any) -> None:
        self.calls.append((collective, args))

    def start(self) -> Work:
        works = [getattr(collectives, f"start_{collective}")(*args) for collective, args in self.calls]
        return Work(*(work.wait for work in works), self._copy)

    def run(self) -> None:
        if len(self.calls) == 1:
            [(collective, args)] = self.calls
            getattr(collectives, collective)(*args)
            self._copy()
        else:
            self.start().wait()

    def flat(self, tensor: Tensor) -> Tensor:
        """Return flat storage for the result `tensor`: its own, or a buffer to copy back if strided."""
        if tensor.is_contiguous():
            return tensor.view(-1)
        flat = tensor.new_empty(tensor.numel())
        self.copies.append((tensor, flat.view(tensor.shape)))
        return flat

    def _copy(self) -> None:
        for into, source in self.copies:
            into.copy_(source)


class PlaitGroup(dist.ProcessGroup):
    """A process group on a plait transport. Created by torch.distributed.

    Its methods are called by torch, from C++ too, with torch's names and arguments: 2.13's, and 2.11's as
    aliases.
    """

    def __init__(self, transport: Transport | None, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._plait = Group(tuple(range(size)), rank, transport)
        self._queue = WorkQueue(transport.close if transport is not None else _noop)
        self._name = ""
        # Also if the program ends without destroying the group: before the interpreter ends its threads.
        self._close = weakref.finalize(self, self._queue.close)

    # --- every process group

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def name(self) -> str:
        return BACKEND_NAME

    def shutdown(self) -> None:
        self._close()

    def abort(self) -> None:
        self._close()

    # --- reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> GroupWork:
        op = reduce_op_name(opts, "all-reduce")
        call = BackendOp("an all-reduce", tensors)
        for tensor in tensors:
            dense, dense_op = reducible(tensor, op, "all-reduce")
            call.add("all_reduce", dense, self._plait, dense_op)
        return self._submit(call, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        tensor, op = reducible(single(tensors, "reduce"), reduce_op_name(opts, "reduce"), "reduce")
        call = BackendOp("a reduce", tensors)
        call.add("reduce", tensor, self._plait, opts.rootRank, op)
        return self._submit(call, opts)

    def reduce_scatter_single(self, output: Tensor, full: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [full], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], full_inputs: list[Tensor], opts: Any = None
    ) -> GroupWork:
        call = BackendOp("a reduce-scatter", outputs)
        requested = reduce_op_name(opts, "reduce-scatter")
        for output, full in zip(outputs, full_inputs, strict=True):
            out, op = reducible(output, requested, "reduce-scatter")
            source, _ = reducible(full, requested, "reduce-scatter")
            call.add("reduce_scatter", call.flat(out), source.reshape(-1), self._plait, op)
        return self._submit(call, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], lists: list[list[Tensor]], opts: Any = None) -> GroupWork:
        """See [Note: uneven tensor lists]."""
        output, parts = single(outputs, "reduce-scatter"), single(lists, "reduce-scatter")
        self._check_num_tensors(parts, "reduce-scatter")
        requested = reduce_op_name(opts, "reduce-scatter")
        out, op = reducible(output, requested, "reduce-scatter")
        inputs = [reducible(part, requested, "reduce-scatter")[0] for part in parts]
        check_same_size(out, inputs[self.rank()], "reduce-scatter")
        call = BackendOp("a reduce-scatter", outputs)
        if len({part.numel() for part in inputs}) == 1:
            full = torch.cat([part.reshape(-1) for part in inputs])
            call.add("reduce_scatter", call.flat(out), full, self._plait, op)
        else:
            call.add("reduce_scatter_list", out, inputs, self._plait, op)
        return self._submit(call, opts)

    # --- data movement

    def broadcast(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        call = BackendOp("a broadcast", tensors)
        for tensor in tensors:
            call.add("broadcast", dense_real(tensor, "broadcast"), self._plait, opts.rootRank)
        return self._submit(call, opts)

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [shard], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], shards: list[Tensor], opts: Any = None
    ) -> GroupWork:
        call = BackendOp("an all-gather", outputs)
        for output, shard in zip(outputs, shards, strict=True):
            out, source = dense_real(output, "all-gather"), dense_real(shard, "all-gather")
            call.add("all_gather", call.flat(out), source.reshape(-1), self._plait)
        return self._submit(call, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, lists: list[list[Tensor]], shards: list[Tensor], opts: Any = None) -> GroupWork:
        """See [Note: uneven tensor lists]."""
        call = BackendOp("an all-gather", [tensor for outputs in lists for tensor in outputs])
        for outputs, shard in zip(lists, shards, strict=True):
            self._check_num_tensors(outputs, "all-gather")
            outs, source = [dense_real(out, "all-gather") for out in outputs], dense_real(shard, "all-gather")
            check_same_size(outs[self.rank()], source, "all-gather")
            if len({out.numel() for out in outs}) == 1:
                full = source.new_empty(source.numel() * self.size())
                call.add("all_gather", full, source.reshape(-1), self._plait)
                call.copies += from_flat(outs, full)
            else:
                call.add("all_gather_list", outs, source, self._plait)
        return self._submit(call, opts)

    allgather_coalesced = allgather

    def gather(self, lists: list[list[Tensor]], shards: list[Tensor], opts: Any) -> GroupWork:
        source = dense_real(single(shards, "gather"), "gather")
        full = None
        call = BackendOp("a gather", [])
        if self.rank() == opts.rootRank:
            outputs = single(lists, "gather")
            self._check_num_tensors(outputs, "gather")
            outs = [dense_real(out, "gather") for out in outputs]
            for out in outs:
                check_same_size(out, source, "gather")
            full = source.new_empty(source.numel() * self.size())
            call.results, call.copies = outputs, from_flat(outs, full)
        call.add("gather", full, source.reshape(-1), self._plait, opts.rootRank)
        return self._submit(call, opts)

    def scatter(self, outputs: list[Tensor], lists: list[list[Tensor]], opts: Any) -> GroupWork:
        out = dense_real(single(outputs, "scatter"), "scatter")
        full = None
        if self.rank() == opts.rootRank:
            inputs = [dense_real(part, "scatter") for part in single(lists, "scatter")]
            self._check_num_tensors(inputs, "scatter")
            for part in inputs:
                check_same_size(out, part, "scatter")
            full = torch.cat([part.reshape(-1) for part in inputs])
        call = BackendOp("a scatter", outputs)
        call.add("scatter", call.flat(out), full, self._plait, opts.rootRank)
        return self._submit(call, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        full: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> GroupWork:
        """Splits are along dim 0, as in torch; without them, ranges are equal."""
        out, source = dense_real(output, "all-to-all"), dense_real(full, "all-to-all")
        call = BackendOp("an all-to-all", [output])
        if output_splits or input_splits:
            parts, outs = self._split(source, input_splits), self._split(out, output_splits)
            self._check_own(outs, parts)
            call.add("all_to_all_list", outs, parts, self._plait)
        else:
            call.add("all_to_all", call.flat(out), source.reshape(-1), self._plait)
        return self._submit(call, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], parts: list[Tensor], opts: Any = None) -> GroupWork:
        self._check_num_tensors(outputs, "all-to-all")
        self._check_num_tensors(parts, "all-to-all")
        call = BackendOp("an all-to-all", outputs)
        inputs = [dense_real(part, "all-to-all") for part in parts]
        outs = [dense_real(out, "all-to-all") for out in outputs]
        self._check_own(outs, inputs)
        call.add("all_to_all_list", outs, inputs, self._plait)
        return self._submit(call, opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        call = BackendOp("a barrier", [])
        call.add("barrier", self._plait)
        return self._submit(call, opts)

    # --- messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> GroupWork:
        check_tag(tag)
        tensor = dense_real(single(tensors, "send"), "send")
        return GroupWork("a send", tensors, collectives.start_send(tensor, self._plait, to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> GroupWork:
        check_tag(tag)
        tensor = dense_real(single(tensors, "receive"), "receive")
        work = collectives.start_receive(tensor, self._plait, source)
        return GroupWork("a receive", tensors, work, source=source)

    def recv_anysource(self, *_: Any) -> GroupWork:
        raise CommError(
            f"the {BACKEND_NAME} backend cannot receive from any source",
            given="a receive from any rank",
            expected="the rank that sends",
            hint="src=",
        )

    # --- shared

    def _submit(self, call: BackendOp, opts: Any) -> GroupWork:
        if opts is not None and not opts.asyncOp:
            call.run()
            return GroupWork(call.label, call.results)
        work = GroupWork(call.label, call.results, call.start(), self._queue)
        self._queue.add(work)
        return work

    def _check_own(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        check_same_size(outs[self.rank()], parts[self.rank()], "all-to-all")

    def _split(self, tensor: Tensor, splits: list[int]) -> Sequence[Tensor]:
        if not splits and tensor.shape[0] % self.size() == 0:
            return tensor.chunk(self.size())
        if len(splits) != self.size() or sum(splits) != tensor.shape[0]:
            raise CommError(
                "the splits of an all-to-all do not match the tensor",
                given=f"splits={splits} of {tensor.shape[0]} rows",
                expected=f"{self.size()} row counts, one per rank, that sum to {tensor.shape[0]}",
                hint="no split sizes, for equal parts",
            )
        return tensor.split(splits)

    def _check_num_tensors(self, parts: Sequence[Tensor], collective: str) -> None:
        if len(parts) != self.size():
            raise CommError(
                f"{collective} needs a list with one tensor per rank",
                given=f"{len(parts)} tensors",
                expected=self.size(),
                hint=f"list(tensor.chunk({self.size()}))",
            )


def _noop() -> None:
    """The transport of a group of one has nothing to close."""
