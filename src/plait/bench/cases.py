"""Each collective on given tensors: the call, this rank's input, and its expected outputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.bench.request import split_algorithm
from plait.comm import (
    Group,
    all_gather,
    all_gather_by,
    all_reduce,
    all_reduce_by,
    all_to_all,
    barrier,
    broadcast,
    broadcast_by,
    gather,
    ranks_by_host,
    receive,
    reduce,
    reduce_scatter,
    reduce_scatter_by,
    scatter,
    send,
)

SUM = -1  # instead of a rank: the sum of all


@dataclass(frozen=True)
class TensorSlice:
    """A tensor that is, or should become, a rank's full tensor from element `start` on."""

    tensor: Tensor
    rank: int
    start: int = 0


@dataclass(frozen=True)
class Case:
    """`run` makes one communication, or `num_messages` of them that only a pair of ranks can tell apart."""

    run: Callable[[], object]
    input: TensorSlice | None = None
    outputs: tuple[TensorSlice, ...] = ()
    num_messages: int = 1


class Pattern:
    """The full tensors of all ranks, and their sum, which is exact in every dtype and order of addition.

    A rank's tensor repeats a block of random values of a prime length, so that a misplaced range does not
    pass.
    """

    def __init__(self, dtype: torch.dtype, num_ranks: int, device: torch.device) -> None:
        max_exact = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}.get(dtype, 1 << 20)  # exact integers
        values = max(2, min(97, max_exact // num_ranks))
        block = torch.randint(values, (65_521,), generator=torch.Generator().manual_seed(0))
        ranks = [block.roll(7 * rank) for rank in range(num_ranks)]
        self.unused_value = values  # in no rank's tensor
        self._blocks = [block.to(device, dtype) for block in (*ranks, torch.stack(ranks).sum(0))]

    def fill(self, slice_: TensorSlice) -> None:
        for chunk, values in self._blocks_of(slice_):
            chunk.copy_(values)

    def matches(self, slice_: TensorSlice) -> bool:
        return all(torch.equal(chunk, values) for chunk, values in self._blocks_of(slice_))

    def _blocks_of(self, slice_: TensorSlice) -> Iterator[tuple[Tensor, Tensor]]:
        block = self._blocks[slice_.rank]
        done, total = 0, slice_.tensor.numel()
        while done < total:
            offset = (slice_.start + done) % block.numel()
            length = min(total - done, block.numel() - offset)
            yield slice_.tensor[done : done + length], block[offset : offset + length]
            done += length


def make_case(collective: str, group: Group, first: Tensor, second: Tensor, algorithm: str = "auto") -> Case:
    """Return the case of a collective. `first`, `second`: flat tensors of full size. `algorithm`: the
    transport's own, or one of those of `comm/algorithms.py`. Collective."""
    case = _MAKERS[collective](group, first, second)
    if algorithm == "auto":
        return case
    algorithm, segments = split_algorithm(algorithm, first.nbytes, group.size)
    if collective == "all-reduce":
        hosts = ranks_by_host(group) if algorithm == "two-level" else None
        return replace(case, run=lambda: all_reduce_by(algorithm, first, group, hosts=hosts))
    if collective == "all-gather":
        return replace(case, run=lambda: all_gather_by(algorithm, second, group))
    if collective == "broadcast":
        return replace(case, run=lambda: broadcast_by(algorithm, first, group, segments=segments))
    assert collective == "reduce-scatter", f"{algorithm} of {collective}"
    shard_numel, start = _own_range(group, first)
    out = TensorSlice(first[start : start + shard_numel], SUM, start)  # in place
    return replace(case, run=lambda: reduce_scatter_by(algorithm, first, group), outputs=(out,))


def _all_reduce(group: Group, first: Tensor, _: Tensor) -> Case:
    return Case(lambda: all_reduce(first, group), TensorSlice(first, group.rank), (TensorSlice(first, SUM),))


def _reduce_scatter(group: Group, first: Tensor, second: Tensor) -> Case:
    shard_numel, start = _own_range(group, second)
    out = second[:shard_numel]
    return Case(
        lambda: reduce_scatter(out, first, group),
        TensorSlice(first, group.rank),
        (TensorSlice(out, SUM, start),),
    )


def _all_gather(group: Group, _: Tensor, second: Tensor) -> Case:
    shard_numel, start = _own_range(group, second)
    own = second[start : start + shard_numel]
    return Case(
        lambda: all_gather(second, own, group), TensorSlice(own, group.rank, start), _from_all(group, second)
    )


def _broadcast(group: Group, first: Tensor, _: Tensor) -> Case:
    return Case(lambda: broadcast(first, group), TensorSlice(first, group.rank), (TensorSlice(first, 0),))


def _reduce(group: Group, first: Tensor, _: Tensor) -> Case:
    expected = SUM if group.rank == 0 else group.rank
    return Case(lambda: reduce(first, group), TensorSlice(first, group.rank), (TensorSlice(first, expected),))


def _scatter(group: Group, first: Tensor, second: Tensor) -> Case:
    shard_numel, start = _own_range(group, second)
    out, full = second[:shard_numel], first if group.rank == 0 else None
    return Case(
        lambda: scatter(out, full, group), TensorSlice(first, group.rank), (TensorSlice(out, 0, start),)
    )


def _gather(group: Group, first: Tensor, second: Tensor) -> Case:
    shard_numel, start = _own_range(group, second)
    own, out = first[:shard_numel], second if group.rank == 0 else None
    outputs = () if out is None else _from_all(group, out)
    return Case(lambda: gather(out, own, group), TensorSlice(own, group.rank, start), outputs)


def _all_to_all(group: Group, first: Tensor, second: Tensor) -> Case:
    shard_numel, start = _own_range(group, second)
    outputs = tuple(
        TensorSlice(second[r * shard_numel : (r + 1) * shard_numel], r, start) for r in range(group.size)
    )
    return Case(lambda: all_to_all(second, first, group), TensorSlice(first, group.rank), outputs)


def _barrier(group: Group, _: Tensor, __: Tensor) -> Case:
    return Case(lambda: barrier(group))


def _send_receive(group: Group, first: Tensor, second: Tensor) -> Case:
    """Return a round trip between the first two ranks; the others do nothing."""

    def ping() -> None:
        send(first, group, 1)
        receive(second, group, 1)

    def echo() -> None:
        receive(second, group, 0)
        send(second, group, 0)

    if group.rank > 1:
        return Case(lambda: None, num_messages=2)
    return Case(
        (ping, echo)[group.rank], TensorSlice(first, group.rank), (TensorSlice(second, 0),), num_messages=2
    )


_MAKERS: dict[str, Callable[[Group, Tensor, Tensor], Case]] = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "all-to-all": _all_to_all,
    "barrier": _barrier,
    "send-receive": _send_receive,
}


def _own_range(group: Group, full: Tensor) -> tuple[int, int]:
    """Return the elements of a shard, and the start of this rank's."""
    shard_numel = full.numel() // group.size
    return shard_numel, group.rank * shard_numel


def _from_all(group: Group, full: Tensor) -> tuple[TensorSlice, ...]:
    shard_numel = full.numel() // group.size
    ranges = enumerate(full.chunk(group.size))
    return tuple(TensorSlice(range_, rank, rank * shard_numel) for rank, range_ in ranges)
