"""The verbs. Each communicates on the group it is handed; `start_*` returns at once and `.wait()` ends it.

A group of one rank communicates with nobody: its verbs only move what has to be moved locally.

[Note: narrow tensors on the wire, wide sums]
bf16 gradients are to be summed in float32. Widening them first and all-reducing moves 2(p-1)/p x 4 bytes
per element and rank. As long as a rank's contribution is bf16, sending just that to every peer, and
adding in float32 there, gives the same sum for (p-1) x 2 bytes: half the bytes for 2 ranks, three
quarters for 3, no gain from 4 on. Every rank adds in rank order, so all end with the same bits. It
costs memory for what is received and pays where bytes cost CPU time: Gloo does it, NCCL does not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import CommError

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Link:
    """The process group behind a group; its world cuts it when it closes.

    Whoever still holds the group then holds nothing of torch's: Gloo's threads end with the last
    reference to it, and have to before Python does, or they take the process down.
    """

    def __init__(self, handle: dist.ProcessGroup | None) -> None:
        self._handle = handle

    @property
    def handle(self) -> dist.ProcessGroup:
        assert self._handle is not None, "a verb on a group whose world is closed"
        return self._handle

    def is_to(self, handle: dist.ProcessGroup | None) -> bool:
        return self._handle is handle

    def cut(self) -> None:
        self._handle = None


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, in order. `rank` is this process's place among them."""

    ranks: tuple[int, ...]
    rank: int
    link: Link | None  # None for a group of one, which needs no transport

    @property
    def handle(self) -> dist.ProcessGroup:
        assert self.link is not None, "a group of one has no process group"
        return self.link.handle

    @property
    def size(self) -> int:
        return len(self.ranks)


class Pending:
    """A communication under way. The tensors it was given are in use until `wait` returns."""

    def __init__(self, verb: str, works: list[dist.Work]) -> None:
        self._verb = verb
        self._works = works

    def wait(self) -> None:
        """Blocks until done (on CUDA: makes the current stream wait). Raises CommError if a peer is lost."""
        while self._works:
            _guard(self._verb, self._works.pop(0).wait)


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


def sends_narrow(group: Group, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether `start_exchange` beats widening and all-reducing. See [Note: narrow tensors ...]."""
    if group.size == 1 or dist.get_backend(group.handle) != "gloo":
        return False
    return group.size * narrow.itemsize < 2 * wide.itemsize


class Exchange:
    """Every rank's tensor on its way to every other rank."""

    def __init__(self, mine: Tensor, received: list[Tensor], pending: Pending, group: Group) -> None:
        self._pending = pending
        self._parts = [*received[: group.rank], mine, *received[group.rank :]]

    def wait_and_sum(self, out: Tensor) -> Iterator[Tensor]:
        """Fills `out` with the sum, added in its dtype and in rank order, run by run.

        Yields each run of `out` as it is done, for whatever else is to be done with it in the cache.
        """
        self._pending.wait()
        for start in range(0, out.numel(), _CACHED):
            run = slice(start, start + _CACHED)
            out[run].copy_(self._parts[0][run])
            for part in self._parts[1:]:
                out[run].add_(part[run])
            yield out[run]


_CACHED = 1 << 17  # elements: 512 KiB of float32


def start_exchange(mine: Tensor, received: list[Tensor], group: Group) -> Exchange:
    """Sends flat `mine` to every peer and takes theirs into `received` (size - 1 tensors like it, by rank).

    All of them are in use until `wait_and_sum` is through.
    """
    operations = []
    for tensor, peer in zip(received, (r for r in group.ranks if r != group.ranks[group.rank]), strict=True):
        operations.append(dist.P2POp(dist.isend, mine, peer, group.handle))
        operations.append(dist.P2POp(dist.irecv, tensor, peer, group.handle))
    pending = Pending("exchange", _guard("exchange", lambda: dist.batch_isend_irecv(operations)))
    return Exchange(mine, received, pending, group)


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
    return Pending(verb, [] if group.size == 1 else [_guard(verb, launch)])


def _guard(verb: str, action: Callable[[], Any]) -> Any:
    """Turns the transport's errors into ours: the cause stands below, for --debug."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"{verb} failed: a rank is gone, late or sent something else",
            given=str(error).splitlines()[0],
            hint="look for the first rank that ended: its message is the cause",
        ) from error
