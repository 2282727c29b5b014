"""The host transport's verbs: for every dtype, size and place of tensors, the bits that torch computes."""

import pytest
import torch

from plait.comm import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    connect,
    reduce_scatter,
    share,
    start_all_gather,
    start_all_reduce,
)
from support.pool import Pool
from support.shm_cases import Case, assert_bits, in_pairs, product, reduced, run_case, values

RANKS = [1, 2, 3, 4, 7]


def _cases(cases: list[Case]) -> int:
    world = connect(transport="host")
    for case in cases:
        run_case(case, world, world.group)
    return len(cases)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_verb_leaves_torchs_bits_in_every_storage(pool: Pool, ranks: int) -> None:
    cases = in_pairs(ranks, seed=ranks)
    assert pool.run(_cases, ranks, cases, timeout_s=120) == [len(cases)] * ranks


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", RANKS)
def test_every_case_of_every_verb_leaves_torchs_bits(pool: Pool, ranks: int) -> None:
    cases = product(ranks)
    assert pool.run(_cases, ranks, cases, timeout_s=1800) == [len(cases)] * ranks


def _like_gloo(sizes: list[int]) -> list[torch.Tensor]:
    """Integers, so that the order in which Gloo's ring adds them does not show."""
    group = connect().group
    got = []
    for numel in sizes:
        mine = values(group.rank, numel * group.size, torch.int32)
        all_reduce(tensor := mine.clone(), group)
        all_gather(gathered := torch.empty(group.size * mine.numel(), dtype=mine.dtype), mine, group)
        reduce_scatter(scattered := torch.empty(numel, dtype=mine.dtype), mine, group, "max")
        all_to_all(received := torch.empty_like(mine), mine, group)
        broadcast(copied := mine.clone(), group, group.size - 1)
        got += [tensor, gathered, scattered, received, copied]
    return got


@pytest.mark.parametrize("ranks", [2, 3])
def test_host_and_gloo_send_the_same(pool: Pool, ranks: int) -> None:
    host, gloo = (pool.over(name).run(_like_gloo, ranks, [1, 1000, 70_001]) for name in ("host", "gloo"))
    for ours, theirs in zip(host, gloo, strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            assert_bits(found, expected, "host against Gloo")


def _in_place(numel: int, owned: bool) -> None:
    world = connect(transport="host")
    group = world.group
    pieces = [values(rank, numel, torch.float32) for rank in group.ranks]
    wholes = [values(rank, numel * group.size, torch.float32) for rank in group.ranks]
    mine = slice(group.rank * numel, (group.rank + 1) * numel)

    def blank() -> torch.Tensor:
        made = world.empty(numel * group.size, torch.float32) if owned else torch.empty(numel * group.size)
        return made.fill_(77.0)

    for _ in range(3):
        out = blank()
        out[mine] = pieces[group.rank]
        all_gather(out, out[mine], group)
        assert_bits(out, torch.cat(pieces), "all-gather from its own range")
        whole = blank().copy_(wholes[group.rank])
        reduce_scatter(whole[mine], whole, group)
        expected = wholes[group.rank].clone()
        expected[mine] = reduced([other[mine] for other in wholes], "sum")
        assert_bits(whole, expected, "reduce-scatter into its own range")


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("numel", [5, 100_003, 300_000])
def test_pieces_may_be_views_of_the_full_tensor(pool: Pool, numel: int, owned: bool) -> None:
    pool.run(_in_place, 3, numel, owned)


def _overwrite_at_once(numel: int, owned: bool) -> None:
    """The program may overwrite its source when the call returns: peers have read it."""
    world = connect(transport="host")
    group = world.group
    tensor = world.empty(numel, torch.float32) if owned else torch.empty(numel)
    out = torch.empty(numel * group.size)
    for turn in range(30):
        all_gather(out, tensor.fill_(turn + group.rank), group)
        tensor.fill_(-1.0)  # a slow peer would read this
        ranges = out.view(group.size, numel)
        assert all(bool((ranges[rank] == turn + rank).all()) for rank in group.ranks)
        all_reduce(tensor.fill_(turn + group.rank), group)
        expected = sum(turn + rank for rank in group.ranks)
        assert bool((tensor == expected).all())  # and a slow one would still write


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("numel", [100, 200_000])
def test_a_tensor_is_the_programs_again_when_the_call_returns(pool: Pool, numel: int, owned: bool) -> None:
    pool.run(_overwrite_at_once, 4, numel, owned)


def _many_started() -> None:
    """More calls under way than the queue holds, waited for in another order, or not at all."""
    world = connect(transport="host")
    group = world.group
    tensors = [torch.full((200,), float(i + group.rank)) for i in range(700)]
    pendings = [start_all_reduce(tensor, group, label=f"{i}") for i, tensor in enumerate(tensors)]
    gathered = torch.empty(group.size)
    last = start_all_gather(gathered, torch.tensor([float(group.rank)]), group)
    last.wait()
    assert gathered.tolist() == [0.0, 1.0, 2.0]
    for i, tensor in enumerate(tensors):  # what was started before is over too
        assert bool((tensor == 3 * i + 3).all())
    for pending in reversed(pendings[::2]):
        pending.wait()
    for i in range(50):  # given up by the program at once: the link holds on to them
        start_all_reduce(world.empty(50_000, torch.float32).fill_(i), group)
    barrier(group)


def test_hundreds_of_calls_can_be_under_way(pool: Pool) -> None:
    pool.run(_many_started, 3)


def _shared() -> list[float]:
    world = connect(transport="host")
    group = world.group
    tensor = share(1000, torch.float64, group)
    assert bool((tensor == 0).all())
    barrier(group)
    tensor[group.rank] = group.rank + 1.0
    barrier(group)
    return tensor[: group.size].tolist()


def test_a_shared_tensor_is_the_same_memory_on_all_ranks(pool: Pool) -> None:
    assert pool.run(_shared, 3) == [[1.0, 2.0, 3.0]] * 3
