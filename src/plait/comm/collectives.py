"""The verbs. Each communicates on the group it is handed; `start_*` returns at once and `.wait()` ends it.

Tensors may be strided: transports take storage as it lies, so others go through a copy. Sums have a
fixed order of ranks: every rank gets the same bits. A group of one rank communicates with nobody: its verbs
only move what has to be moved locally. `label` says of what a communication is, in the letter of one that
fails. Meta tensors have nothing to say: their verbs do nothing, and are counted where everything is dry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from plait.comm.comm_thread import CommThread
from plait.comm.null_transport import NullTransport
from plait.comm.stats import CommLog, WaitClock
from plait.comm.transport import Call, CountedWork, OpType, PartialReduceWork, ReduceWork, Transport, Work
from plait.errors import CommError
from plait.plan.comm_log import CommKey

OPS = ("sum", "mean", "max", "min")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, in order. `rank` is this process's place among them."""

    ranks: tuple[int, ...]
    rank: int
    link: Transport | None  # None for a group of one, which needs no transport
    background: CommThread | None = None  # where there is a transport
    axes: tuple[str, ...] = field(default=(), compare=False)  # of the mesh, along which the ranks differ
    lane: str = field(default="", compare=False)
    ledger: CommLog | None = field(default=None, compare=False)  # where what it says is written down
    clock: WaitClock = field(default_factory=WaitClock, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def transport(self) -> Transport:
        assert self.link is not None, "a group of one has no transport"
        return self.link

    @property
    def is_dry(self) -> bool:
        """Whether nobody is there: see `World.dry`."""
        return isinstance(self.link, NullTransport)

    def note(self, verb: str, tensor: Tensor | None) -> None:
        """Writes a call down. `tensor`: the whole one, of what this rank gives or gets."""
        if self.ledger is not None:
            self.ledger.note(CommKey(self.axes, self.lane, verb), 0 if tensor is None else tensor.nbytes)


def start_all_reduce(tensor: Tensor, group: Group, op: str = "sum", *, label: str = "") -> Work:
    """Reduces `tensor` in place over the group; every rank ends with the same bits."""
    check_op(op, tensor)
    return _start(Call(OpType.ALL_REDUCE, tensor, tensor, op, label=label), group)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", *, label: str = "") -> None:
    """`start_all_reduce`, to its end."""
    check_op(op, tensor)
    _run(Call(OpType.ALL_REDUCE, tensor, tensor, op, label=label), group)


def start_all_gather(out: Tensor, piece: Tensor, group: Group, *, label: str = "") -> Work:
    """Fills `out` (flat, size x piece) with the ranks' pieces in group order. `piece` may be a view of it."""
    _check_ranges(OpType.ALL_GATHER, out, piece, group)
    return _start(Call(OpType.ALL_GATHER, piece, out, label=label), group)


def all_gather(out: Tensor, piece: Tensor, group: Group, *, label: str = "") -> None:
    """`start_all_gather`, to its end."""
    _check_ranges(OpType.ALL_GATHER, out, piece, group)
    _run(Call(OpType.ALL_GATHER, piece, out, label=label), group)


def reduce_scatter(out: Tensor, whole: Tensor, group: Group, op: str = "sum", *, label: str = "") -> None:
    """Leaves in `out` this rank's range of the reduced `whole` (flat, size x out)."""
    _run(_reduce_scatter(out, whole, group, op, label), group)


def start_reduce_scatter(
    out: Tensor, whole: Tensor, group: Group, op: str = "sum", *, label: str = ""
) -> Work:
    return _start(_reduce_scatter(out, whole, group, op, label), group)


def _reduce_scatter(out: Tensor, whole: Tensor, group: Group, op: str, label: str) -> Call:
    check_op(op, whole)
    _check_ranges(OpType.REDUCE_SCATTER, whole, out, group)
    return Call(OpType.REDUCE_SCATTER, whole, out, op, label=label)


def start_broadcast(tensor: Tensor, group: Group, source: int = 0, *, label: str = "") -> Work:
    """Overwrites `tensor` with that of the group's rank number `source`."""
    return _start(_rooted(OpType.BROADCAST, tensor, tensor, group, source, label=label), group)


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, label: str = "") -> None:
    """`start_broadcast`, to its end."""
    _run(_rooted(OpType.BROADCAST, tensor, tensor, group, source, label=label), group)


def start_reduce(tensor: Tensor, group: Group, root: int = 0, op: str = "sum", *, label: str = "") -> Work:
    """Reduces into the root's `tensor`; the others' keep their values."""
    return _start(_reduce(tensor, group, root, op, label), group)


def reduce(tensor: Tensor, group: Group, root: int = 0, op: str = "sum", *, label: str = "") -> None:
    """`start_reduce`, to its end."""
    _run(_reduce(tensor, group, root, op, label), group)


def _reduce(tensor: Tensor, group: Group, root: int, op: str, label: str) -> Call:
    check_op(op, tensor)
    out = tensor if group.rank == root else None
    return _rooted(OpType.REDUCE, tensor, out, group, root, op, label)


def start_scatter(
    out: Tensor, whole: Tensor | None, group: Group, source: int = 0, *, label: str = ""
) -> Work:
    """Deals the ranges of the source's `whole` (flat, size x out) to the ranks; others give None."""
    return _start(_scatter(out, whole, group, source, label), group)


def scatter(out: Tensor, whole: Tensor | None, group: Group, source: int = 0, *, label: str = "") -> None:
    """`start_scatter`, to its end."""
    _run(_scatter(out, whole, group, source, label), group)


def _scatter(out: Tensor, whole: Tensor | None, group: Group, source: int, label: str) -> Call:
    if group.rank == source:
        _check_ranges(OpType.SCATTER, whole, out, group)
    return _rooted(OpType.SCATTER, whole if group.rank == source else None, out, group, source, label=label)


def start_gather(out: Tensor | None, piece: Tensor, group: Group, root: int = 0, *, label: str = "") -> Work:
    """Collects the ranks' pieces in the root's `out` (flat, size x piece); others give None."""
    return _start(_gather(out, piece, group, root, label), group)


def gather(out: Tensor | None, piece: Tensor, group: Group, root: int = 0, *, label: str = "") -> None:
    """`start_gather`, to its end."""
    _run(_gather(out, piece, group, root, label), group)


def _gather(out: Tensor | None, piece: Tensor, group: Group, root: int, label: str) -> Call:
    if group.rank == root:
        _check_ranges(OpType.GATHER, out, piece, group)
    return _rooted(OpType.GATHER, piece, out if group.rank == root else None, group, root, label=label)


def start_all_to_all(out: Tensor, whole: Tensor, group: Group, *, label: str = "") -> Work:
    """Sends the i-th of `size` equal ranges of `whole` to rank i; `out` gets a range from each, in order."""
    return _start(_all_to_all(out, whole, group, label), group)


def all_to_all(out: Tensor, whole: Tensor, group: Group, *, label: str = "") -> None:
    """`start_all_to_all`, to its end."""
    _run(_all_to_all(out, whole, group, label), group)


def _all_to_all(out: Tensor, whole: Tensor, group: Group, label: str) -> Call:
    if out.numel() != whole.numel() or out.numel() % group.size or out.dtype != whole.dtype:
        raise _unfit(OpType.ALL_TO_ALL, out, whole, group)
    return Call(OpType.ALL_TO_ALL, whole, out, label=label)


def barrier(group: Group, *, label: str = "") -> None:
    """Returns when every rank of the group has come here."""
    if group.size > 1:
        group.note(OpType.BARRIER.value, None)
        call = Call(OpType.BARRIER, label=label)
        with group.clock.during(call):
            group.transport.run(call)


def start_barrier(group: Group, *, label: str = "") -> Work:
    if group.size == 1:
        return Work()
    group.note(OpType.BARRIER.value, None)
    call = Call(OpType.BARRIER, label=label)
    return group.transport.start(call).by(group.clock, call)


def start_send(tensor: Tensor, group: Group, to: int, *, label: str = "") -> Work:
    """Sends to the group's rank number `to`. Messages between two ranks arrive in the order they start in."""
    return _start(_rooted(OpType.SEND, tensor, None, group, to, label=label), group)


def start_receive(tensor: Tensor, group: Group, source: int, *, label: str = "") -> Work:
    """Fills `tensor` with what the group's rank number `source` sends: as many bytes."""
    return _start(_rooted(OpType.RECEIVE, None, tensor, group, source, label=label), group)


def send(tensor: Tensor, group: Group, to: int, *, label: str = "") -> None:
    """`start_send`, to its end."""
    start_send(tensor, group, to, label=label).wait()


def receive(tensor: Tensor, group: Group, source: int, *, label: str = "") -> None:
    """`start_receive`, to its end."""
    start_receive(tensor, group, source, label=label).wait()


# --- sums of contributions: what gradients travel by


def start_scattered_sum(whole: Tensor, group: Group, *, label: str = "") -> ReduceWork:
    """Sums the ranks' flat `whole`, of which each keeps its own range: the group.rank-th of `size`.

    `whole` is in use, and may be overwritten, until `into` is through.
    """
    if group.size == 1:
        return PartialReduceWork([whole], Work())
    assert whole.numel() % group.size == 0, f"{whole.numel()} elements in {group.size} ranges"
    group.note(OpType.REDUCE_SCATTER.value, whole)
    summing = group.transport.start_sum(whole, scatter=True, label=label)
    return CountedWork(summing, group.clock, f"sum of {label}")


def start_exchange(mine: Tensor, group: Group, *, label: str = "") -> ReduceWork:
    """Sums the ranks' flat tensors on every rank, contributions travelling as they are.

    `mine` is in use until `into` is through. Where `sends_narrow` says so.
    """
    if group.size == 1:
        return PartialReduceWork([mine], Work())
    group.note("exchange", mine)
    summing = group.transport.start_sum(mine, scatter=False, label=label)
    return CountedWork(summing, group.clock, f"sum of {label}")


def is_direct(group: Group) -> bool:
    """Whether contributions to a sum travel as they are and are added up wide, by their owners."""
    return group.link is not None and group.link.is_direct


def sends_narrow(group: Group, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether `start_exchange` beats widening contributions and all-reducing."""
    return group.link is not None and group.link.sends_narrow(narrow, wide)


def shares_memory(group: Group) -> bool:
    """Whether the ranks read and write each other's memory, if it is of `empty` or `share`."""
    return group.link is not None and group.link.shares


def empty(numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """A flat tensor which the group's verbs read and write where it lies, if they can; of undefined
    values."""
    if shares_memory(group):
        return group.transport.empty(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def share(numel: int, dtype: torch.dtype, group: Group) -> Tensor:
    """One flat tensor of zeros, the same memory on all ranks of a group that shares memory. All must ask."""
    return group.transport.share(numel, dtype)


# --- what all verbs share


def _start(call: Call, group: Group) -> Work:
    if group.size == 1:
        return _alone(call)
    if _is_of_shapes(call, group):
        return Work()
    _note(call, group)
    call, copies = _contiguous(call)
    pending = group.transport.start(call)
    if copies:
        pending = Work(pending.wait, *(_copier(*copy) for copy in copies), is_done=pending.is_done)
    return pending.by(group.clock, call)


def _run(call: Call, group: Group) -> None:
    if group.size == 1:
        _alone(call)
        return
    if _is_of_shapes(call, group):
        return
    _note(call, group)
    call, copies = _contiguous(call)
    with group.clock.during(call):
        group.transport.run(call)
    for into, result in copies:
        into.copy_(result)


def _is_of_shapes(call: Call, group: Group) -> bool:
    """Whether a program that runs for its shapes alone calls it, in a world of ranks that are there."""
    given = call.out if call.source is None else call.source
    return given is not None and given.is_meta and not group.is_dry


def _note(call: Call, group: Group) -> None:
    wholes = call.out if call.verb is OpType.ALL_GATHER else call.source
    group.note(call.verb.value, call.out if wholes is None else wholes)


def _copier(into: Tensor, result: Tensor) -> Callable[[], object]:
    return lambda: into.copy_(result)


def _contiguous(call: Call) -> tuple[Call, list[tuple[Tensor, Tensor]]]:
    """The call with contiguous tensors, and what has to be copied (where to, from) after it."""
    source, out = call.source, call.out
    if (source is None or source.is_contiguous()) and (out is None or out.is_contiguous()):
        return call, []
    given = None if source is None else source.contiguous()
    if out is None or out.is_contiguous():
        return replace(call, source=given), []
    taken = given if out is source else torch.empty_like(out, memory_format=torch.contiguous_format)
    assert taken is not None
    return replace(call, source=given, out=taken), [(out, taken)]


def _alone(call: Call) -> Work:
    if call.verb in (OpType.SEND, OpType.RECEIVE):
        raise CommError(f"{call.verb.value} to oneself", given="a group of one rank")
    if call.out is not None and call.source is not None and call.out is not call.source:
        call.out.copy_(call.source.reshape(call.out.shape))
    return Work()


def _rooted(
    verb: OpType,
    source: Tensor | None,
    out: Tensor | None,
    group: Group,
    root: int,
    op: str = "sum",
    label: str = "",
) -> Call:
    if not 0 <= root < group.size:
        raise CommError(
            f"{verb.value} with a rank that the group does not have",
            given=f"rank number {root}",
            expected=f"0 to {group.size - 1}, a place in the group of ranks {list(group.ranks)}",
        )
    return Call(verb, source, out, op, root, label)


def check_op(op: str, tensor: Tensor) -> None:
    if op not in OPS:
        raise CommError("ranks cannot reduce by that", given=f"op={op!r}", expected=" or ".join(OPS))
    if op == "mean" and not tensor.is_floating_point():
        raise CommError("a mean is of floating-point numbers", given=tensor.dtype, hint="op='sum'")


def _check_ranges(verb: OpType, whole: Tensor | None, piece: Tensor, group: Group) -> None:
    fits = whole is not None and whole.numel() == group.size * piece.numel() and whole.dtype == piece.dtype
    if not fits:
        raise _unfit(verb, whole, piece, group)


def _unfit(verb: OpType, whole: Tensor | None, piece: Tensor, group: Group) -> CommError:
    def shown(tensor: Tensor | None) -> str:
        return "None" if tensor is None else f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"

    return CommError(
        f"the tensors of {verb.value} do not fit each other",
        given=f"{shown(whole)} and {shown(piece)} in a group of {group.size}",
        expected=f"a whole of {group.size} times the piece's elements, of one dtype",
    )
