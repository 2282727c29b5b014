"""Each verb on given tensors: what is run, what this rank gives, and what it must get."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    receive,
    reduce,
    reduce_scatter,
    scatter,
    send,
)

SUM = -1  # in place of a rank: of all ranks


@dataclass(frozen=True)
class TensorSlice:
    """A tensor that is, or is to be, a rank's whole tensor from element `start` on."""

    tensor: Tensor
    rank: int
    start: int = 0


@dataclass(frozen=True)
class Case:
    """`run` is one communication, but for `trips` of them that only a pair of ranks can tell apart."""

    run: Callable[[], object]
    gives: TensorSlice | None = None
    gets: tuple[TensorSlice, ...] = ()
    trips: int = 1


class Pattern:
    """The whole tensors of all ranks, and their sum, which every dtype holds exactly in any order of adding.

    A rank's is a block of random values, of a prime length: a range in another one's place does not pass.
    """

    def __init__(self, dtype: torch.dtype, num_ranks: int, device: torch.device) -> None:
        exact = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}.get(dtype, 1 << 20)  # integers up to it
        values = max(2, min(97, exact // num_ranks))
        block = torch.randint(values, (65_521,), generator=torch.Generator().manual_seed(0))
        ranks = [block.roll(7 * rank) for rank in range(num_ranks)]
        self.outside = values  # no rank's tensor has it
        self._blocks = [block.to(device, dtype) for block in (*ranks, torch.stack(ranks).sum(0))]

    def fill(self, part: TensorSlice) -> None:
        for run, values in self._runs(part):
            run.copy_(values)

    def fits(self, part: TensorSlice) -> bool:
        return all(torch.equal(run, values) for run, values in self._runs(part))

    def _runs(self, part: TensorSlice) -> Iterator[tuple[Tensor, Tensor]]:
        block = self._blocks[part.rank]
        done, total = 0, part.tensor.numel()
        while done < total:
            place = (part.start + done) % block.numel()
            length = min(total - done, block.numel() - place)
            yield part.tensor[done : done + length], block[place : place + length]
            done += length


def make_case(verb: str, group: Group, first: Tensor, second: Tensor) -> Case:
    """`first`, `second`: flat tensors as long as a whole one."""
    return _MAKERS[verb](group, first, second)


def _all_reduce(group: Group, given: Tensor, _: Tensor) -> Case:
    return Case(lambda: all_reduce(given, group), TensorSlice(given, group.rank), (TensorSlice(given, SUM),))


def _reduce_scatter(group: Group, given: Tensor, taken: Tensor) -> Case:
    piece, start = _own(group, taken)
    out = taken[:piece]
    return Case(
        lambda: reduce_scatter(out, given, group),
        TensorSlice(given, group.rank),
        (TensorSlice(out, SUM, start),),
    )


def _all_gather(group: Group, _: Tensor, taken: Tensor) -> Case:
    piece, start = _own(group, taken)
    mine = taken[start : start + piece]
    return Case(
        lambda: all_gather(taken, mine, group), TensorSlice(mine, group.rank, start), _from_all(group, taken)
    )


def _broadcast(group: Group, given: Tensor, _: Tensor) -> Case:
    return Case(lambda: broadcast(given, group), TensorSlice(given, group.rank), (TensorSlice(given, 0),))


def _reduce(group: Group, given: Tensor, _: Tensor) -> Case:
    expected = SUM if group.rank == 0 else group.rank
    return Case(lambda: reduce(given, group), TensorSlice(given, group.rank), (TensorSlice(given, expected),))


def _scatter(group: Group, given: Tensor, taken: Tensor) -> Case:
    piece, start = _own(group, taken)
    out, whole = taken[:piece], given if group.rank == 0 else None
    return Case(
        lambda: scatter(out, whole, group), TensorSlice(given, group.rank), (TensorSlice(out, 0, start),)
    )


def _gather(group: Group, given: Tensor, taken: Tensor) -> Case:
    piece, start = _own(group, taken)
    mine, out = given[:piece], taken if group.rank == 0 else None
    gets = () if out is None else _from_all(group, out)
    return Case(lambda: gather(out, mine, group), TensorSlice(mine, group.rank, start), gets)


def _all_to_all(group: Group, given: Tensor, taken: Tensor) -> Case:
    piece, start = _own(group, taken)
    gets = tuple(TensorSlice(taken[r * piece : (r + 1) * piece], r, start) for r in range(group.size))
    return Case(lambda: all_to_all(taken, given, group), TensorSlice(given, group.rank), gets)


def _barrier(group: Group, _: Tensor, __: Tensor) -> Case:
    return Case(lambda: barrier(group))


def _send_receive(group: Group, given: Tensor, taken: Tensor) -> Case:
    """There and back between the first two ranks; the others look on."""

    def serve() -> None:
        send(given, group, 1)
        receive(taken, group, 1)

    def answer() -> None:
        receive(taken, group, 0)
        send(taken, group, 0)

    if group.rank > 1:
        return Case(lambda: None, trips=2)
    return Case(
        (serve, answer)[group.rank], TensorSlice(given, group.rank), (TensorSlice(taken, 0),), trips=2
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


def _own(group: Group, whole: Tensor) -> tuple[int, int]:
    """Elements of a piece, and where this rank's begins."""
    piece = whole.numel() // group.size
    return piece, group.rank * piece


def _from_all(group: Group, whole: Tensor) -> tuple[TensorSlice, ...]:
    piece = whole.numel() // group.size
    ranges = enumerate(whole.chunk(group.size))
    return tuple(TensorSlice(range_, rank, rank * piece) for rank, range_ in ranges)
