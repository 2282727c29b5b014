"""torch.distributed over plait's verbs, against Gloo: every function, and torch's own machines on top."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from support.pool import Pool
from support.torch_backend import join

Case = Callable[[dist.ProcessGroup, torch.dtype, bool], list[Tensor]]


def _named(module: Any, new: str, old: str) -> Any:
    """torch 2.13 renamed these and warns about the old names; 2.11 has only those."""
    return getattr(module, new, None) or getattr(module, old)


_gather_single = _named(dist, "all_gather_single", "all_gather_into_tensor")
_scatter_single = _named(dist, "reduce_scatter_single", "reduce_scatter_tensor")
_gather = _named(functional, "all_gather_single", "all_gather_tensor")
_scatter = _named(functional, "reduce_scatter_single", "reduce_scatter_tensor")
_gather_all = _named(functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
_scatter_all = _named(functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def _values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers, others on each rank: sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def _done(work: Any, is_async: bool) -> None:
    assert (work is not None) == is_async
    if is_async:
        work.wait()


def _all_reduce(op: Any, group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    tensor, strided = _values(dtype, 5, 3), _values(dtype, 4, 6)
    _done(dist.all_reduce(tensor, op, group, is_async), is_async)
    if not group.name().startswith("gloo"):
        _done(dist.all_reduce(strided.t()[::2], op, group, is_async), is_async)
    else:  # Gloo takes contiguous tensors alone
        part = strided.t()[::2].contiguous()
        dist.all_reduce(part, op, group)
        strided.t()[::2] = part
    return [tensor, strided]


def _broadcast(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    tensors = [_values(dtype, 7), _values(dtype)]
    for root, tensor in enumerate(tensors):
        _done(dist.broadcast(tensor, root, group, is_async), is_async)
    return tensors


def _reduce(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    tensor = _values(dtype, 7)
    _done(dist.reduce(tensor, 1, dist.ReduceOp.SUM, group, is_async), is_async)
    return [tensor] if dist.get_rank() == 1 else []


def _gathers(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    size, piece = group.size(), _values(dtype, 2, 3)
    listed = [torch.empty_like(piece) for _ in range(size)]
    _done(dist.all_gather(listed, piece, group, is_async), is_async)
    whole = piece.new_empty(2 * size, 3)
    _done(_gather_single(whole, piece, group, is_async), is_async)
    if dtype.is_complex:  # which Gloo does not gather at one rank
        return [*listed, whole]
    rooted = [torch.empty_like(piece) for _ in range(size)] if dist.get_rank() == 1 else None
    _done(dist.gather(piece, rooted, 1, group, is_async), is_async)
    return [*listed, whole, *(rooted or [])]


def _scatters(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    size = group.size()
    parts = [_values(dtype, 2, 3, seed=place) for place in range(size)]
    summed, single, received = (parts[0].new_empty(2, 3) for _ in range(3))
    _done(dist.reduce_scatter(summed, parts, dist.ReduceOp.SUM, group, is_async), is_async)
    _done(_scatter_single(single, torch.cat(parts), dist.ReduceOp.SUM, group, is_async), is_async)
    _done(dist.scatter(received, parts if dist.get_rank() == 1 else None, 1, group, is_async), is_async)
    return [summed, single, received, *parts]


def _all_to_alls(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    rank, size = dist.get_rank(), group.size()
    whole = _values(dtype, 2 * size, 3)
    even = torch.empty_like(whole)
    _done(dist.all_to_all_single(even, whole, group=group, async_op=is_async), is_async)
    given = [(rank + place) % size for place in range(size)]  # rows for each rank, for some of them none
    taken = [(rank + place) % size for place in range(size)]
    rows = _values(dtype, sum(given), 3)
    uneven = rows.new_empty(sum(taken), 3)
    _done(dist.all_to_all_single(uneven, rows, taken, given, group, is_async), is_async)
    return [even, uneven]


def _messages(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    rank, size = dist.get_rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    given = [_values(dtype, 3, seed=seed) for seed in range(4)]
    taken = [torch.empty_like(tensor) for tensor in given]
    if is_async:
        operations = [dist.P2POp(dist.irecv, tensor, before, group) for tensor in taken]
        operations += [dist.P2POp(dist.isend, tensor, after, group) for tensor in given]
        for work in reversed(dist.batch_isend_irecv(operations)):
            work.wait()
        return taken
    for give, take in zip(given, taken, strict=True):
        if rank == 0:
            dist.send(give, after, group)
        assert dist.recv(take, before, group) == before
        if rank > 0:
            dist.send(give, after, group)
    return taken


def _objects(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    rank, size = dist.get_rank(), group.size()
    listed: list[Any] = [None] * size
    dist.all_gather_object(listed, {"rank": "x" * rank}, group)
    assert listed == [{"rank": "x" * place} for place in range(size)]
    copied = [rank, None]
    dist.broadcast_object_list(copied, 1, group)
    assert copied == [1, None]
    received: list[Any] = [None]
    dist.scatter_object_list(received, [*range(size)] if rank == 0 else None, 0, group)
    assert received == [rank]
    rooted: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object("y" * rank, rooted, 0, group)
    assert rooted is None or rooted == ["y" * place for place in range(size)]
    _done(dist.barrier(group, is_async), is_async)
    return []


def _functional(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    size, piece = group.size(), _values(dtype, 2, 3)
    whole = _values(dtype, 2 * size, 3)
    got = [
        functional.all_reduce(piece, "sum", group),
        _gather(piece, 1, group),
        _scatter(whole, "sum", 0, group),
        functional.all_to_all_single(whole, None, None, group),
        functional.broadcast(piece, 1, group),
        *_gather_all([piece, 2 * piece], group),
        *_scatter_all([whole, 2 * whole], "sum", [0, 0], group),
        *functional.all_reduce_coalesced([piece, 2 * piece], "sum", group),
    ]
    return [functional.wait_tensor(tensor) for tensor in got]


def _coalesced(group: dist.ProcessGroup, dtype: torch.dtype, is_async: bool) -> list[Tensor]:
    tensors = [_values(dtype, 3), _values(dtype, 4)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    if is_async:
        manager.wait()
    return tensors


CASES: dict[str, Case] = {
    "sum": partial(_all_reduce, dist.ReduceOp.SUM),
    "max": partial(_all_reduce, dist.ReduceOp.MAX),
    "min": partial(_all_reduce, dist.ReduceOp.MIN),
    "product": partial(_all_reduce, dist.ReduceOp.PRODUCT),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gathers": _gathers,
    "scatters": _scatters,
    "all-to-alls": _all_to_alls,
    "messages": _messages,
    "objects": _objects,
    "functional": _functional,
    "coalesced": _coalesced,
}
COMPLEX = ("sum", "broadcast", "gathers", "all-to-alls", "messages")


def _same_as_gloo(dtype: torch.dtype) -> int:
    ours, gloo, checked = join(), dist.new_group(backend="gloo"), 0
    for name, case in CASES.items():
        if dtype.is_complex and name not in COMPLEX:
            continue
        for is_async in (False, True):
            expected, got = case(gloo, dtype, is_async), case(ours, dtype, is_async)
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other), f"{name} {is_async} {one} {other}"
                checked += 1
    return checked


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_every_function_gives_the_results_of_gloo(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    least = 20 if dtype.is_complex else 50
    assert all(checked > least for checked in pool.run(_same_as_gloo, ranks, dtype))


def _by_both_names() -> None:
    """2.11 calls methods by names that 2.13 has replaced; in C++ it looks for the same ones in Python."""
    group = join()
    size, rank = dist.get_world_size(), dist.get_rank()
    piece, whole = torch.full((2,), float(rank)), torch.arange(2.0 * size)
    everyone = torch.arange(float(size)).repeat_interleave(2)
    for gather in (group._allgather_base, group.all_gather_single):
        out = torch.empty(2 * size)
        gather(out, piece, AllgatherOptions()).wait()
        assert torch.equal(out, everyone)
    for gather in (group.allgather_into_tensor_coalesced, group.all_gather_single_coalesced):
        outs = [torch.empty(2 * size), torch.empty(2 * size)]
        gather(outs, [piece, piece + 1]).wait()
        assert torch.equal(torch.stack(outs), torch.stack([everyone, everyone + 1]))
    for scatter in (group._reduce_scatter_base, group.reduce_scatter_single):
        out = torch.empty(2)
        scatter(out, whole, ReduceScatterOptions()).wait()
        assert torch.equal(out, size * whole[2 * rank : 2 * rank + 2])
    for scatter in (group.reduce_scatter_tensor_coalesced, group.reduce_scatter_single_coalesced):
        outs = [torch.empty(2), torch.empty(2)]
        scatter(outs, [whole, whole + 1], ReduceScatterOptions()).wait()
        assert torch.equal(outs[1], size * (1 + whole[2 * rank : 2 * rank + 2]))
    for exchange in (group.alltoall_base, group.all_to_all_single):
        out = torch.empty(2 * size)
        exchange(out, whole, [], [], AllToAllOptions()).wait()
        assert torch.equal(out, whole[2 * rank : 2 * rank + 2].repeat(size))
    lists = [[torch.empty(2) for _ in range(size)] for _ in range(2)]
    group.allgather_coalesced(lists, [piece, piece + 1]).wait()
    assert torch.equal(torch.cat(lists[1]), everyone + 1)


def test_every_method_has_its_names_of_both_versions(pool: Pool) -> None:
    pool.run(_by_both_names, 3)
