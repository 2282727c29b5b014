"""The verbs. Each communicates on the group it is handed; `start_*` returns at once and `.wait()` ends it.

A group of one rank communicates with nobody: its verbs only move what has to be moved locally.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from plait.errors import CommError

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, in order. `rank` is this process's place among them."""

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None  # None for a group of one, which needs no transport

    @property
    def size(self) -> int:
        return len(self.ranks)


class Pending:
    """A communication under way. The tensors it was given are in use until `wait` returns."""

    def __init__(self, verb: str, work: dist.Work | None) -> None:
        self._verb = verb
        self._work = work

    def wait(self) -> None:
        """Blocks until done (on CUDA: makes the current stream wait). Raises CommError if a peer is lost."""
        if self._work is not None:
            work, self._work = self._work, None
            _guard(self._verb, work.wait)


def start_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Pending:
    """Reduces `tensor` in place over the group; every rank ends with the same bits."""
    return _start("all-reduce", group, lambda: dist.all_reduce(tensor, _OPS[op], group.handle, async_op=True))


def start_all_gather(out: Tensor, piece: Tensor, group: Group) -> Pending:
    """Fills `out` (flat, size x piece) with the ranks' pieces in group order. `piece` may be a view of it."""
    if group.size == 1:
        out.copy_(piece)
    return _start("all-gather", group, lambda: _gather_into(out, piece, group.handle, async_op=True))


def start_reduce_scatter(out: Tensor, whole: Tensor, group: Group) -> Pending:
    """Sums the ranks' `whole` (flat, size x out) and leaves piece number `group.rank` in `out`."""
    if group.size == 1:
        out.copy_(whole)
    return _start(
        "reduce-scatter",
        group,
        lambda: _reduce_into(out, whole, group=group.handle, async_op=True),
    )


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    start_all_reduce(tensor, group, op).wait()


def all_gather(out: Tensor, piece: Tensor, group: Group) -> None:
    start_all_gather(out, piece, group).wait()


def reduce_scatter(out: Tensor, whole: Tensor, group: Group) -> None:
    start_reduce_scatter(out, whole, group).wait()


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> None:
    """Overwrites `tensor` with that of the group's rank number `source`."""
    _start(
        "broadcast",
        group,
        lambda: dist.broadcast(tensor, group.ranks[source], group.handle, async_op=True),
    ).wait()


def _start(verb: str, group: Group, launch: Callable[[], dist.Work]) -> Pending:
    return Pending(verb, None if group.size == 1 else _guard(verb, launch))


def _guard(verb: str, action: Callable[[], Any]) -> Any:
    """Turns the transport's errors into ours: the cause stands below, for --debug."""
    try:
        return action()
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"{verb} failed: a rank is gone, late or sent something else",
            given=str(error).splitlines()[0],
            hint="look for the first rank that ended: its message is the cause",
        ) from error
