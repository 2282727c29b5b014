"""The collectives of a group. `start_*` returns at once, and `.wait()` on its result completes it; without
`start_`, they run to completion.

Tensors may be strided: transports need contiguous storage, so strided ones are copied. Every rank
gets the same bits of a reduction; on CPUs they are summed in rank order, while NCCL chooses the order, which
may differ from run to run. In a group of one rank a collective only copies locally.
`label` names the data in the error of a failed communication. Meta tensors are not communicated: their
collectives do nothing, and are logged in a dry run only.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from plait.comm.comm_thread import CommThread
from plait.comm.stats import CommLog, WaitClock
from plait.comm.transport import (
    Call,
    CountedWork,
    NullTransport,
    OpType,
    PartialReduceWork,
    ReduceWork,
    Transport,
    Work,
)
from plait.errors import CommError
from plait.plan.comm_log import CommKey

OPS = ("sum", "mean", "max", "min", "prod")
P = ParamSpec("P")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, in order. `rank` is this process's index among them."""

    ranks: tuple[int, ...]
    rank: int
    transport_or_none: Transport | None  # None for a group of one
    comm_thread: CommThread | None = None  # if there is a transport
    axes: tuple[str, ...] = field(default=(), compare=False)  # of the grid, along which the ranks differ
    channel: str = field(default="", compare=False)
    comm_log: CommLog | None = field(default=None, compare=False)  # records its calls
    clock: WaitClock = field(default_factory=WaitClock, compare=False)
    name: str = field(init=False, default="", compare=False)  # see named_group

    def __post_init__(self) -> None:
        base = f"{'/'.join(self.axes)} {self.channel} of {self.ranks}"
        names = (f"{base}, {number}" for number in itertools.count())
        object.__setattr__(self, "name", next(name for name in names if name not in _named))
        _named[self.name] = self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def transport(self) -> Transport:
        assert self.transport_or_none is not None, "a group of one has no transport"
        return self.transport_or_none

    @property
    def is_dry_run(self) -> bool:
        """True if the group has no peers: see `World.dry_run`."""
        return isinstance(self.transport_or_none, NullTransport)

    def record(self, op_type: str, num_bytes: int) -> None:
        """Log a call. `num_bytes`: of the full one of this rank's input and output."""
        if self.comm_log is not None:
            self.comm_log.record(CommKey(self.axes, self.channel, op_type), num_bytes)


_named: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def named_group(name: str) -> Group:
    """Return the group with this name, while it is alive: operators of torch take names, not objects.

    No two live groups have one name. A later group of the same ranks may get it again, and with it the code
    that torch.compile made for the earlier one.
    """
    return _named[name]


def _start_and_run(
    build: Callable[P, tuple[Call, Group]],
) -> tuple[Callable[P, Work], Callable[P, None]]:
    """Return two functions of the arguments of `build`: one starts its call, one runs it to completion."""

    @wraps(build)
    def start(*args: P.args, **kwargs: P.kwargs) -> Work:
        return _start(*build(*args, **kwargs))

    @wraps(build)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        _run(*build(*args, **kwargs))

    start.__name__ = start.__qualname__ = f"start{build.__name__}"
    run.__name__ = run.__qualname__ = build.__name__.removeprefix("_")
    return start, run


def _all_reduce(tensor: Tensor, group: Group, op: str = "sum", *, label: str = "") -> tuple[Call, Group]:
    """Reduce `tensor` in place over the group; every rank gets the same bits."""
    check_op(op, tensor)
    return Call(OpType.ALL_REDUCE, tensor, tensor, op, label=label), group


def _all_gather(out: Tensor, shard: Tensor, group: Group, *, label: str = "") -> tuple[Call, Group]:
    """Fill `out` (flat, size x shard) with the ranks' shards in group order. `shard` may be a view of it."""
    _check_ranges(OpType.ALL_GATHER, out, shard, group)
    return Call(OpType.ALL_GATHER, shard, out, label=label), group


def _reduce_scatter(
    out: Tensor, full: Tensor, group: Group, op: str = "sum", *, label: str = ""
) -> tuple[Call, Group]:
    """Write to `out` this rank's range of the reduced `full` (flat, size x out)."""
    check_op(op, full)
    _check_ranges(OpType.REDUCE_SCATTER, full, out, group)
    return Call(OpType.REDUCE_SCATTER, full, out, op, label=label), group


def _broadcast(tensor: Tensor, group: Group, source: int = 0, *, label: str = "") -> tuple[Call, Group]:
    """Overwrite `tensor` with that of group rank `source`."""
    return _root_call(OpType.BROADCAST, tensor, tensor, group, source, label=label)


def _reduce(
    tensor: Tensor, group: Group, root: int = 0, op: str = "sum", *, label: str = ""
) -> tuple[Call, Group]:
    """Reduce into the root's `tensor`; those of the other ranks keep their values."""
    check_op(op, tensor)
    out = tensor if group.rank == root else None
    return _root_call(OpType.REDUCE, tensor, out, group, root, op, label)


def _scatter(
    out: Tensor, full: Tensor | None, group: Group, source: int = 0, *, label: str = ""
) -> tuple[Call, Group]:
    """Distribute the ranges of the source's `full` (flat, size x out) to the ranks; the others pass None."""
    if group.rank == source:
        _check_ranges(OpType.SCATTER, full, out, group)
    return _root_call(OpType.SCATTER, full if group.rank == source else None, out, group, source, label=label)


def _gather(
    out: Tensor | None, shard: Tensor, group: Group, root: int = 0, *, label: str = ""
) -> tuple[Call, Group]:
    """Collect the ranks' shards in the root's `out` (flat, size x shard); the others pass None."""
    if group.rank == root:
        _check_ranges(OpType.GATHER, out, shard, group)
    return _root_call(OpType.GATHER, shard, out if group.rank == root else None, group, root, label=label)


def _all_to_all(out: Tensor, full: Tensor, group: Group, *, label: str = "") -> tuple[Call, Group]:
    """Send the i-th of `size` equal ranges of `full` to rank i; `out` receives one from each, in order."""
    if out.numel() != full.numel() or out.numel() % group.size or out.dtype != full.dtype:
        raise _size_error(OpType.ALL_TO_ALL, out, full, group)
    return Call(OpType.ALL_TO_ALL, full, out, label=label), group


def _barrier(group: Group, *, label: str = "") -> tuple[Call, Group]:
    """Block until every rank of the group has reached the barrier."""
    return Call(OpType.BARRIER, label=label), group


def _send(tensor: Tensor, group: Group, to: int, *, label: str = "") -> tuple[Call, Group]:
    """Send to group rank `to`. Messages between two ranks are matched in the order they are started."""
    return _root_call(OpType.SEND, tensor, None, group, to, label=label)


def _receive(tensor: Tensor, group: Group, source: int, *, label: str = "") -> tuple[Call, Group]:
    """Fill `tensor` with what group rank `source` sends: as many bytes."""
    return _root_call(OpType.RECEIVE, None, tensor, group, source, label=label)


start_all_reduce, all_reduce = _start_and_run(_all_reduce)
start_all_gather, all_gather = _start_and_run(_all_gather)
start_reduce_scatter, reduce_scatter = _start_and_run(_reduce_scatter)
start_broadcast, broadcast = _start_and_run(_broadcast)
start_reduce, reduce = _start_and_run(_reduce)
start_scatter, scatter = _start_and_run(_scatter)
start_gather, gather = _start_and_run(_gather)
start_all_to_all, all_to_all = _start_and_run(_all_to_all)
start_barrier, barrier = _start_and_run(_barrier)
start_send, send = _start_and_run(_send)
start_receive, receive = _start_and_run(_receive)


# --- tensors of different sizes


def _waiting(start: Callable[P, Work]) -> Callable[P, None]:
    """Return a function that starts a communication and waits for it."""

    @wraps(start)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        start(*args, **kwargs).wait()

    run.__name__ = run.__qualname__ = start.__name__.removeprefix("start_")
    return run


def start_all_to_all_list(
    outs: Sequence[Tensor], parts: Sequence[Tensor], group: Group, *, label: str = ""
) -> Work:
    """Send the i-th of `parts` to rank i; the i-th of `outs` receives rank i's part.

    Tensors may have any sizes, on which sender and receiver agree. Messages are matched with those of `send`,
    in start order.
    """
    _check_lists(outs, parts, group)
    peers = [rank for rank in range(group.size) if rank != group.rank]
    outs[group.rank].copy_(parts[group.rank].reshape(outs[group.rank].shape))
    sends = [(parts[peer].contiguous(), peer) for peer in peers if parts[peer].numel()]
    receives = [(outs[peer].contiguous(), peer) for peer in peers if outs[peer].numel()]
    copies = [
        _copy_back(outs[peer], dense) for dense, peer in receives if dense.data_ptr() != outs[peer].data_ptr()
    ]
    return _start_exchange(sends, receives, copies, group, label)


def start_all_gather_list(outs: Sequence[Tensor], shard: Tensor, group: Group, *, label: str = "") -> Work:
    """Fill `outs` with the ranks' shards, whose sizes may differ; each rank passes all of them."""
    return start_all_to_all_list(outs, [shard] * group.size, group, label=label)


def start_reduce_scatter_list(
    out: Tensor, parts: Sequence[Tensor], group: Group, op: str = "sum", *, label: str = ""
) -> Work:
    """Write to `out` the reduced i-th of `parts` on rank i: one reduction per rank, as sizes may differ."""
    _check_lists([*parts[: group.rank], out, *parts[group.rank + 1 :]], parts, group)
    own = parts[group.rank].clone(memory_format=torch.contiguous_format)  # the caller's keeps its values
    works = [
        start_reduce(own if root == group.rank else part, group, root, op, label=label)
        for root, part in enumerate(parts)
    ]
    return Work(*(work.wait for work in works), _copy_back(out, own.view(out.shape)))


def start_shift(out: Tensor, tensor: Tensor, group: Group, places: int, *, label: str = "") -> Work:
    """Send `tensor` to the rank so many places after this one, around the group; `out` receives that of the
    rank as many places before. Both are contiguous. Messages are matched with those of `send`."""
    to, source = ((group.rank + sign * places) % group.size for sign in (1, -1))
    return _start_exchange([(tensor, to)], [(out, source)], [], group, label)


all_to_all_list = _waiting(start_all_to_all_list)
all_gather_list = _waiting(start_all_gather_list)
reduce_scatter_list = _waiting(start_reduce_scatter_list)


def _start_exchange(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    copies: Sequence[Callable[[], object]],
    group: Group,
    label: str,
) -> Work:
    call = Call(OpType.ALL_TO_ALL, label=label)
    tensors = [tensor for tensor, _ in (*sends, *receives)]
    if not tensors or (tensors[0].is_meta and not group.is_dry_run):
        return Work()
    num_bytes = max(sum(tensor.nbytes for tensor, _ in each) for each in (sends, receives))
    group.record("messages", num_bytes)
    work = group.transport.exchange(call, sends, receives)
    if copies:
        work = Work(work.wait, *copies, is_done=work.is_done)
    return work.timed_by(group.clock, call)


def _check_lists(outs: Sequence[Tensor], parts: Sequence[Tensor], group: Group) -> None:
    own_out, own = (tensors[group.rank].numel() for tensors in (outs, parts))
    if len(outs) == len(parts) == group.size and own_out == own:
        return
    raise CommError(
        "the tensors of a collective on lists do not match",
        given=f"{len(outs)} and {len(parts)} tensors; {own} elements into {own_out} on this rank",
        expected=f"{group.size} tensors, one per rank, and as many elements out as in",
        hint=f"list(tensor.chunk({group.size}))",
    )


# --- reductions that are consumed chunk by chunk: gradients


def start_scattered_sum(full: Tensor, group: Group, *, label: str = "", wide: bool = False) -> ReduceWork:
    """Sum the ranks' flat `full`; each rank keeps its own range: the group.rank-th of `size`.

    `full` is in use, and may be overwritten, until `into` is exhausted. `wide`: NCCL too sends contributions
    unreduced, to add them in the dtype of the result; as many bytes.
    """
    assert full.numel() % group.size == 0, f"{full.numel()} elements in {group.size} ranges"
    return _start_sum(full, group, label, scatter=True, wide=wide)


def start_exchange(tensor: Tensor, group: Group, *, label: str = "") -> ReduceWork:
    """Sum the ranks' flat tensors on every rank, by sending the contributions unreduced.

    `tensor` is in use until `into` is exhausted. Use it where `sends_narrow` is true.
    """
    return _start_sum(tensor, group, label, scatter=False)


def _start_sum(tensor: Tensor, group: Group, label: str, *, scatter: bool, wide: bool = False) -> ReduceWork:
    if group.size == 1:
        return PartialReduceWork([tensor], Work())
    group.record(OpType.REDUCE_SCATTER.value if scatter else "exchange", tensor.nbytes)
    work = group.transport.start_sum(tensor, scatter=scatter, label=label, wide=wide)
    return CountedWork(work, group.clock, f"sum of {label}")


def is_direct(group: Group) -> bool:
    """Return whether contributions to a sum are sent unreduced; the owners add them in a wide dtype."""
    return group.transport_or_none is not None and group.transport_or_none.is_direct


def sends_narrow(group: Group, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether `start_exchange` beats widening contributions and all-reducing."""
    return group.transport_or_none is not None and group.transport_or_none.sends_narrow(narrow, wide)


def shares_memory(group: Group) -> bool:
    """Return whether the ranks access each other's memory, if allocated by `empty` or `share`."""
    return group.transport_or_none is not None and group.transport_or_none.shares_memory


def empty(numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """Return an uninitialized flat tensor, which the group's collectives access in place if they can."""
    if shares_memory(group):
        return group.transport.empty(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def share(numel: int, dtype: torch.dtype, group: Group) -> Tensor:
    """Return one flat tensor of zeros, the same memory on all ranks. Collective. Needs `shares_memory`."""
    return group.transport.share(numel, dtype)


# --- shared by all collectives


def _start(call: Call, group: Group) -> Work:
    if group.size == 1:
        return _run_alone(call)
    if _is_meta_only(call, group):
        return Work()
    _record(call, group)
    call, copies = _contiguous(call)
    work = group.transport.start(call)
    if copies:
        work = Work(work.wait, *(_copy_back(*copy) for copy in copies), is_done=work.is_done)
    return work.timed_by(group.clock, call)


def _run(call: Call, group: Group) -> None:
    if group.size == 1:
        _run_alone(call)
        return
    if _is_meta_only(call, group):
        return
    _record(call, group)
    call, copies = _contiguous(call)
    with group.clock.during(call):
        group.transport.run(call)
    for into, result in copies:
        into.copy_(result)


def _is_meta_only(call: Call, group: Group) -> bool:
    """Return whether a call is on meta tensors outside of a dry run: then nothing is communicated."""
    tensor = call.out if call.source is None else call.source
    return tensor is not None and tensor.is_meta and not group.is_dry_run


def _record(call: Call, group: Group) -> None:
    full = call.out if call.op_type is OpType.ALL_GATHER or call.source is None else call.source
    group.record(call.op_type.value, 0 if full is None else full.nbytes)


def _copy_back(into: Tensor, result: Tensor) -> Callable[[], object]:
    return lambda: into.copy_(result)


def _contiguous(call: Call) -> tuple[Call, list[tuple[Tensor, Tensor]]]:
    """Return the call with contiguous tensors, and the copies (to, from) to make after it."""
    source, out = call.source, call.out
    if (source is None or source.is_contiguous()) and (out is None or out.is_contiguous()):
        return call, []
    dense_source = None if source is None else source.contiguous()
    if out is None or out.is_contiguous():
        return replace(call, source=dense_source), []
    dense_out = (
        dense_source if out is source else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    assert dense_out is not None
    return replace(call, source=dense_source, out=dense_out), [(out, dense_out)]


def _run_alone(call: Call) -> Work:
    if call.op_type in (OpType.SEND, OpType.RECEIVE):
        raise CommError(
            f"{call.op_type.value} to the same rank",
            given="a group of one rank",
            expected="another rank",
            hint="out.copy_(tensor)",
        )
    if call.out is not None and call.source is not None and not _is_same_memory(call.out, call.source):
        call.out.copy_(call.source.reshape(call.out.shape))
    return Work()


def _is_same_memory(out: Tensor, source: Tensor) -> bool:
    """Return whether a copy would write each element onto itself. Another stream may be writing them."""
    is_same_view = (out.shape, out.stride()) == (source.shape, source.stride())
    return out is source or (is_same_view and out.data_ptr() == source.data_ptr() and not out.is_meta)


def _root_call(
    op_type: OpType,
    source: Tensor | None,
    out: Tensor | None,
    group: Group,
    root: int,
    op: str = "sum",
    label: str = "",
) -> tuple[Call, Group]:
    if not 0 <= root < group.size:
        raise CommError(
            f"{op_type.value} with a rank outside the group",
            given=f"group rank {root}",
            expected=f"0 to {group.size - 1}",
            hint=f"an index into the ranks {list(group.ranks)}",
        )
    return Call(op_type, source, out, op, root, label), group


def check_op(op: str, tensor: Tensor) -> None:
    if op not in OPS:
        raise CommError("unknown reduction", given=f"op={op!r}", expected=" or ".join(OPS), hint="op='sum'")
    if op == "mean" and not tensor.is_floating_point():
        raise CommError(
            "a mean needs a floating-point dtype",
            given=tensor.dtype,
            expected="sum, max, min or prod for integers",
            hint="op='sum'",
        )


def _check_ranges(op_type: OpType, full: Tensor | None, shard: Tensor, group: Group) -> None:
    fits = full is not None and full.numel() == group.size * shard.numel() and full.dtype == shard.dtype
    if not fits:
        raise _size_error(op_type, full, shard, group)


def _size_error(op_type: OpType, full: Tensor | None, shard: Tensor, group: Group) -> CommError:
    def size_text(tensor: Tensor | None) -> str:
        return "None" if tensor is None else f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"

    return CommError(
        f"the tensors of {op_type.value} have mismatched sizes",
        given=f"{size_text(full)} and {size_text(shard)} in a group of {group.size}",
        expected=f"a full tensor of {group.size} times the shard's elements, of one dtype",
        hint=f"torch.empty({group.size * shard.numel()}, dtype={shard.dtype})",
    )
