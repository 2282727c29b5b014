"""The verbs. Each communicates on the group it is handed; `start_*` returns at once and `.wait()` ends it.

A group of one rank communicates with nobody: its verbs only move what has to be moved locally.

[Note: ranges straight to their owners]
Between CPU ranks bytes cost compute, and Gloo's ring moves them more often than needed: on 2 ranks its
reduce-scatter of 33.7 M float32 takes 130 ms, its all-gather of as many bf16 69 ms. Where it is the
transport, every rank sends each owner its range and each owner adds what it received (52 ms); an
all-gather sends the own range to every peer, into the place where it is read (18 ms). Both move the
least bytes there are, (p-1)/p of the tensor per rank. Sums are added in the order of ranks, whoever
adds: equal bits everywhere.

[Note: narrow tensors on the wire, wide sums]
bf16 gradients are to be summed in float32. An owner that adds what it received can widen it first, so
contributions travel as they are and the sum is float32: half the bytes. For an all-reduce, sending
one's whole contribution to every peer, which adds, moves (p-1) x 2 bytes per element, against
2(p-1)/p x 4 for a widened ring: half for 2 ranks, three quarters for 3, no gain from 4 on. NCCL's bytes
cost no compute: there contributions are widened and its own collectives do the work.
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
    own = _own_range(out, group)
    if own.data_ptr() != piece.data_ptr():
        own.copy_(piece)
    if not is_direct(group):
        return _start("all-gather", group, lambda: _gather_into(out, own, group.handle, async_op=True))
    ranges = out.chunk(group.size)
    return _send_and_receive(
        "all-gather", [(own, peer) for peer in _peers(group)], [(ranges[p], p) for p in _peers(group)], group
    )


def is_direct(group: Group) -> bool:
    """Whether ranges go straight to their owners. See [Note: ranges straight to their owners]."""
    return group.size > 1 and dist.get_backend(group.handle) == "gloo"


def sends_narrow(group: Group, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether `start_exchange` beats widening and all-reducing. See [Note: narrow tensors ...]."""
    return is_direct(group) and group.size * narrow.itemsize < 2 * wide.itemsize


class Summing:
    """A sum over ranks under way. `buffer_bytes`: held for what peers send, until it is over."""

    def __init__(self, parts: list[Tensor], pending: Pending, buffer_bytes: int = 0) -> None:
        self._parts = parts  # one per rank, in rank order; a single one that is the sum already
        self._pending = pending
        self.buffer_bytes = buffer_bytes

    def into(self, out: Tensor, *, add: bool = False) -> Iterator[Tensor]:
        """Fills `out` with the sum (adds it there), in its dtype and in rank order, run by run.

        Yields each run of `out` as it is done, for whatever else is to be done with it in the cache. `out`
        may be this rank's part itself.
        """
        self._pending.wait()
        first, *others = self._parts
        length = max(1, out.numel()) if out.is_cuda else _CACHED  # a GPU pays for every launch
        in_place = any(part.data_ptr() == out.data_ptr() for part in self._parts)
        if in_place and not others:
            assert not add, "a sum added to itself"
            yield from out.split(length)
            return
        needs_scratch = others and (add or in_place)
        scratch = torch.empty(length, dtype=out.dtype, device=out.device) if needs_scratch else None
        for start in range(0, out.numel(), length):
            run = out[start : start + length]
            if add and not others:
                run.add_(first[start : start + length])
                yield run
                continue
            total = run if scratch is None else scratch[: run.numel()]
            total.copy_(first[start : start + length])
            for part in others:
                total.add_(part[start : start + length])
            if add:
                run.add_(total)
            elif scratch is not None:
                run.copy_(total)
            yield run


_CACHED = 1 << 17  # elements: 512 KiB of float32


def start_reduce_scatter(whole: Tensor, group: Group) -> Summing:
    """Sums the ranks' flat `whole`, of which each keeps its own range: the group.rank-th of `size`.

    `whole` is in use, and may be overwritten, until `into` is through.
    """
    own = _own_range(whole, group)
    if not is_direct(group):
        reduce = _start(
            "reduce-scatter", group, lambda: _reduce_into(own, whole, group=group.handle, async_op=True)
        )
        return Summing([own], reduce)
    ranges, peers = whole.chunk(group.size), _peers(group)
    return _exchange("reduce-scatter", own, [(ranges[p], p) for p in peers], group)


def start_exchange(mine: Tensor, group: Group) -> Summing:
    """Sums the ranks' flat tensors on every rank, each sending its own to all. See [Note: narrow ...].

    `mine` is in use until `into` is through.
    """
    return _exchange("exchange", mine, [(mine, p) for p in _peers(group)], group)


def _exchange(verb: str, mine: Tensor, sends: list[tuple[Tensor, int]], group: Group) -> Summing:
    parts = {place: torch.empty_like(mine) for _, place in sends}
    pending = _send_and_receive(verb, sends, [(part, place) for place, part in parts.items()], group)
    buffer_bytes = sum(part.nbytes for part in parts.values())
    parts[group.rank] = mine
    return Summing([parts[place] for place in range(group.size)], pending, buffer_bytes)


def _send_and_receive(
    verb: str, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group
) -> Pending:
    """Tensors to and from places in the group. Two ranks' messages meet in the order in which they start."""
    operations = [dist.P2POp(dist.isend, t, group.ranks[place], group.handle) for t, place in sends]
    operations += [dist.P2POp(dist.irecv, t, group.ranks[place], group.handle) for t, place in receives]
    return Pending(verb, _guard(verb, lambda: dist.batch_isend_irecv(operations)))


def _own_range(whole: Tensor, group: Group) -> Tensor:
    numel, rest = divmod(whole.numel(), group.size)
    assert rest == 0, f"{whole.numel()} elements in {group.size} ranges"
    return whole[group.rank * numel : (group.rank + 1) * numel]


def _peers(group: Group) -> list[int]:
    """The other ranks' places in the group, the next one first: not all send to the same at once."""
    return [(group.rank + step) % group.size for step in range(1, group.size)]


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    start_all_reduce(tensor, group, op).wait()


def all_gather(out: Tensor, piece: Tensor, group: Group) -> None:
    start_all_gather(out, piece, group).wait()


def reduce_scatter(out: Tensor, whole: Tensor, group: Group) -> None:
    """Leaves in `out` this rank's range of the sum of the ranks' `whole` (flat, size x out)."""
    for _ in start_reduce_scatter(whole.clone(), group).into(out):
        pass


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> None:
    """Overwrites `tensor` with that of the group's rank number `source`."""
    sent = tensor.contiguous()  # transports take the storage as it lies
    _start(
        "broadcast",
        group,
        lambda: dist.broadcast(sent, group.ranks[source], group.handle, async_op=True),
    ).wait()
    if sent is not tensor:
        tensor.copy_(sent)


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
