"""The verbs against what they say, and the world's agreements."""

import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plait.comm import (
    Group,
    Mesh,
    all_gather,
    all_gather_list,
    all_reduce,
    all_reduce_by,
    all_to_all,
    all_to_all_list,
    broadcast,
    broadcast_text,
    connect,
    reduce,
    reduce_scatter,
    reduce_scatter_list,
    sends_narrow,
    start_all_reduce,
    start_all_to_all_list,
    start_exchange,
    start_scattered_sum,
)
from plait.errors import CommError
from plait.plan import Grid
from support.pool import Pool, RankError


def _values(rank: int, numel: int = 6) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float64) + 100.0 * rank


def _verbs(replicate: int, col: int) -> dict[str, Any]:
    """Every verb on the groups along `col`."""
    world = connect()
    group = Mesh(world, Grid.from_degrees(replicate=replicate, col=col)).group("col")
    summed, largest, copied = _values(world.rank), _values(world.rank), _values(world.rank)
    pending = start_all_reduce(summed, group)
    all_reduce(largest, group, "max")
    pending.wait()
    broadcast(copied, group, source=group.size - 1)
    gathered = torch.empty(6 * group.size, dtype=torch.float64)
    all_gather(gathered, _values(world.rank), group)
    scattered = torch.empty(6, dtype=torch.float64)
    reduce_scatter(scattered, _values(world.rank, 6 * group.size), group)
    return {
        "ranks": group.ranks,
        "summed": summed,
        "largest": largest,
        "copied": copied,
        "gathered": gathered,
        "scattered": scattered,
    }


@pytest.mark.parametrize(("replicate", "col"), [(1, 1), (1, 2), (1, 4), (2, 2), (4, 1)])
def test_every_verb_gives_its_result_on_every_group(pool: Pool, replicate: int, col: int) -> None:
    for rank, got in enumerate(pool.run(_verbs, replicate * col, replicate, col)):
        first = rank // col * col
        assert got["ranks"] == tuple(range(first, first + col))
        mine = [_values(r) for r in got["ranks"]]
        assert torch.equal(got["summed"], torch.stack(mine).sum(0))
        assert torch.equal(got["largest"], mine[-1])
        assert torch.equal(got["copied"], mine[-1])
        assert torch.equal(got["gathered"], torch.cat(mine))
        whole = torch.stack([_values(r, 6 * col) for r in got["ranks"]]).sum(0)
        place = rank - first
        assert torch.equal(got["scattered"], whole[6 * place : 6 * place + 6])


PRODUCT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def _factors(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(12).add(rank).remainder(5).add(1).to(dtype)


def _products() -> list[torch.Tensor]:
    """The product of all ranks' factors, by each collective that reduces and by each algorithm."""
    group, found = connect().group, []
    for dtype in PRODUCT_DTYPES:
        everywhere, at_root = _factors(group.rank, dtype), _factors(group.rank, dtype)
        all_reduce(everywhere, group, "prod")
        reduce(at_root, group, 0, "prod")
        scattered = torch.empty(12 // group.size, dtype=dtype)
        reduce_scatter(scattered, _factors(group.rank, dtype), group, "prod")
        gathered = torch.empty(12, dtype=dtype)
        all_gather(gathered, scattered, group)
        broadcast(at_root, group)
        by_ring = _factors(group.rank, dtype)
        all_reduce_by("ring", by_ring, group, "prod")
        found += [everywhere, at_root, gathered, by_ring]
    return found


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_a_product_is_torchs_for_every_dtype(pool: Pool, transport: str) -> None:
    found = pool.over(transport).run(_products, 3)
    for number, dtype in enumerate(PRODUCT_DTYPES):
        expected = torch.stack([_factors(rank, dtype) for rank in range(3)]).prod(0).to(dtype)
        for of_rank in found:
            assert all(torch.equal(each, expected) for each in of_rank[4 * number : 4 * number + 4]), dtype


def _lists() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Rank r sends r + i values to rank i, and has r rows; rank i owns i + 1 rows of a product."""
    group = connect().group
    rank, size = group.rank, group.size
    parts = [_values(rank, 2 * (rank + to))[::2] for to in range(size)]
    outs = [torch.empty(rank + source, 2, dtype=torch.float64)[:, 0] for source in range(size)]
    all_to_all_list(outs, parts, group)
    gathered = [torch.empty(source, 3, dtype=torch.float64) for source in range(size)]
    all_gather_list(gathered, _values(rank, 3 * rank).view(rank, 3), group)
    own = torch.empty(rank + 1, dtype=torch.int64)
    reduce_scatter_list(
        own, [torch.full((owner + 1,), rank + owner + 1) for owner in range(size)], group, "prod"
    )
    return outs, gathered, own


@pytest.mark.parametrize(("transport", "ranks"), [("host", 3), ("gloo", 3), ("auto", 1)])
def test_lists_of_tensors_may_differ_in_size(pool: Pool, transport: str, ranks: int) -> None:
    for rank, (outs, gathered, own) in enumerate(pool.over(transport).run(_lists, ranks)):
        for source in range(ranks):
            assert torch.equal(outs[source], _values(source, 2 * (source + rank))[::2])
            assert torch.equal(gathered[source], _values(source, 3 * source).view(source, 3))
        assert own.tolist() == [math.prod(r + rank + 1 for r in range(ranks))] * (rank + 1)


def _random_lists(seed: int) -> None:
    """Exchanges of rows with random counts, most of them 0, up to two under way; checks the results."""
    group, chance = connect().group, random.Random(seed)  # alike on all ranks
    under_way = []
    for number in range(30):
        most = chance.choice([0, 1, 5, 3000])
        counts = [
            [chance.choice([0, 0, chance.randint(0, most)]) for _ in range(group.size)]
            for _ in range(group.size)
        ]
        dtype, width = chance.choice([torch.float64, torch.bfloat16, torch.int64]), chance.choice([1, 7])
        rows = [
            [
                torch.full((count, width), 7 * number + 3 * source + to).to(dtype)
                for to, count in enumerate(of)
            ]
            for source, of in enumerate(counts)
        ]
        received = torch.full((sum(of[group.rank] for of in counts), width), -1).to(dtype)
        sent = torch.cat(rows[group.rank])
        outs = received.split([of[group.rank] for of in counts])
        work = start_all_to_all_list(outs, sent.split(counts[group.rank]), group, label="rows")
        under_way.append((work, received, torch.cat([of[group.rank] for of in rows])))
        while len(under_way) > number % 2:
            work, got, expected = under_way.pop(0)
            work.wait()
            assert torch.equal(got, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_lists_of_random_and_empty_tensors_arrive(pool: Pool, transport: str, ranks: int) -> None:
    pool.over(transport).run(_random_lists, ranks, ranks)


def _starts_of_exchanges() -> tuple[list[str], list[torch.Tensor]]:
    """The messages of an all-gather, an all-to-all and a sum, in the order in which they are started."""
    group = connect().group
    started: list[str] = []

    def recording(name: str) -> Callable[..., Any]:
        message = getattr(dist, name)

        def start(*args: Any) -> Any:
            started.append(name)
            return message(*args)

        return start

    gathered, swapped, summed = torch.empty(18), torch.empty(18), _values(group.rank, 18).float()
    irecv, isend = recording("irecv"), recording("isend")
    with mock.patch.object(dist, "irecv", irecv), mock.patch.object(dist, "isend", isend):
        all_gather(gathered, _values(group.rank).float(), group)
        all_to_all(swapped, _values(group.rank, 18).float(), group)
        list(start_exchange(summed, group).into(summed))
    return started, [gathered, swapped, summed]


def test_gloo_receives_are_started_before_sends_so_that_both_directions_are_used_at_once(pool: Pool) -> None:
    """Otherwise an exchange takes twice its bytes / bandwidth: see [Note: receives before sends]."""
    whole = [_values(rank, 18).float() for rank in range(3)]
    for rank, (started, (gathered, swapped, summed)) in enumerate(
        pool.over("gloo").run(_starts_of_exchanges, 3)
    ):
        assert started == ["irecv", "irecv", "isend", "isend"] * 3
        assert torch.equal(gathered, torch.cat([_values(each).float() for each in range(3)]))
        assert torch.equal(swapped, torch.cat([each[6 * rank : 6 * rank + 6] for each in whole]))
        assert torch.equal(summed, torch.stack(whole).sum(0))


def _pairs() -> list[tuple[int, ...]]:
    """Groups of two, of which ranks are in unlike numbers when they make the next one."""
    world, found = connect(), []
    for pair in ((0, 1), (0, 2), (1, 2), (0, 1), (1, 2)):
        if world.rank in pair:
            group = world.new_group(pair, "pairs")
            total = torch.tensor([1 << rank for rank in pair])[[group.rank]]
            all_reduce(total, group)
            assert int(total) == sum(1 << rank for rank in pair)
            found.append(group.ranks)
    return found


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_groups_are_made_by_their_members_alone_however_many_others_they_are_in(
    pool: Pool, transport: str
) -> None:
    found = pool.over(transport).run(_pairs, 3, timeout_s=20)
    assert found == [[(0, 1), (0, 2), (0, 1)], [(0, 1), (1, 2), (0, 1), (1, 2)], [(0, 2), (1, 2), (1, 2)]]


def _exchange(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = connect().group
    torch.manual_seed(group.rank)
    mine = torch.randn(numel).bfloat16()
    out = torch.empty(numel)
    assert sum(run.numel() for run in start_exchange(mine, group).into(out)) == numel
    return mine, out


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("numel", [0, 1, 7, 300_001])
def test_an_exchange_sums_bf16_in_float32_in_rank_order(pool: Pool, ranks: int, numel: int) -> None:
    results = pool.run(_exchange, ranks, numel)
    expected = torch.zeros(numel)
    for mine, _ in results:
        expected += mine.float()
    assert all(torch.equal(out, expected) for _, out in results)


def _scatter_in_place_and_onto(numel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = connect().group
    torch.manual_seed(group.rank)
    mine = torch.randn(numel * group.size)
    whole = mine.clone()
    own = whole[group.rank * numel : (group.rank + 1) * numel]
    for _ in start_scattered_sum(whole, group).into(own):
        pass
    onto = torch.ones(numel)
    for _ in start_scattered_sum(mine.clone(), group).into(onto, add=True):
        pass
    return mine, own.clone(), onto


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("numel", [5, 200_001])
def test_a_sum_goes_into_the_own_range_itself_or_is_added_elsewhere(
    pool: Pool, ranks: int, numel: int
) -> None:
    results = pool.run(_scatter_in_place_and_onto, ranks, numel)
    expected = torch.zeros(numel * ranks)
    for mine, _, _ in results:
        expected += mine
    for rank, (_, own, onto) in enumerate(results):
        part = expected[rank * numel : (rank + 1) * numel]
        assert torch.equal(own, part)
        assert torch.equal(onto, 1 + part)


def _which_travel_narrow() -> tuple[bool, bool]:
    group = connect().group
    return (
        sends_narrow(group, torch.bfloat16, torch.float32),
        sends_narrow(group, torch.float32, torch.float32),
    )


def test_narrow_tensors_travel_where_that_is_fewer_bytes(pool: Pool) -> None:
    gloo = {ranks: pool.over("gloo").run(_which_travel_narrow, ranks)[0] for ranks in (1, 2, 3, 4)}
    assert gloo == {1: (False, False), 2: (True, False), 3: (True, False), 4: (False, False)}
    host = {ranks: pool.run(_which_travel_narrow, ranks)[0] for ranks in (1, 2, 4, 5)}
    assert host == {1: (False, False), 2: (True, False), 4: (True, False), 5: (False, False)}


def _agree() -> tuple[bool, bool, bool, bool]:
    world = connect()
    if world.rank == 2:
        world.store.set("ready")
    world.store.wait_for("ready")
    one, none = world.any_flag(world.rank == 1), world.any_flag(False)
    return one, none, world.store.claim("door"), connect() is world


def test_ranks_agree_and_one_of_them_claims(pool: Pool) -> None:
    results = pool.run(_agree, 3)
    assert [result[:2] for result in results] == [(True, False)] * 3
    assert sum(result[2] for result in results) == 1
    assert all(result[3] for result in results)


def _tell() -> tuple[tuple[bool, ...], str, str]:
    world = connect()
    flags = world.any_flags(world.rank == 0, False, world.rank == 2)
    said = broadcast_text(1, f"rank {world.rank} has 3 \u2713", world.group, world.device)
    return flags, said, broadcast_text(0, "", world.group, world.device)


def test_flags_are_combined_and_texts_are_broadcast(pool: Pool) -> None:
    assert pool.run(_tell, 3) == [((True, False, True), "rank 1 has 3 \u2713", "")] * 3


def test_a_world_of_one_does_not_communicate() -> None:
    world = connect()
    tensor = torch.ones(3)
    all_reduce(tensor, world.group)
    assert world.size == 1
    assert world.any_flag(True)
    assert world.store.claim("door")
    assert torch.equal(tensor, torch.ones(3))
    assert world.group == Group((0,), 0, None)


def _mismatch() -> None:
    world = connect()
    if world.rank == 0:
        world.close()  # gone while the other waits
    else:
        all_reduce(torch.ones(4), world.group)


def test_a_lost_peer_is_an_error_that_names_it(pool: Pool) -> None:
    with pytest.raises(RankError, match="all-reduce failed: rank 0 is gone"):
        pool.run(_mismatch, 2)


def _by_transport(transport: str, numel: int) -> tuple[str, torch.Tensor]:
    world = connect(transport=transport)
    mine = world.empty(numel, torch.float64).fill_(world.rank + 1.0)
    all_reduce(mine, world.group)
    return world.group.transport.name, mine


@pytest.mark.parametrize("transport", ["auto", "host", "gloo"])
def test_ranks_on_cpus_take_the_transport_that_they_ask_for(pool: Pool, transport: str) -> None:
    for name, summed in pool.run(_by_transport, 2, transport, 5):
        assert name == {"auto": "host"}.get(transport, transport)
        assert torch.equal(summed, torch.full((5,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"transport": "glo"}, ["unknown transport", "'glo'", "try     : gloo"]),
        ({"transport": "host", "device": "cuda"}, ["host does not support that device", "device='cpu'"]),
        ({"transport": "gloo", "device": "cuda"}, ["gloo does not support that device", "device='cpu'"]),
        ({"transport": "nccl", "device": "cpu"}, ["nccl does not support that device", "device='cuda'"]),
    ],
)
def test_an_unavailable_transport_is_an_error_before_ranks_connect(
    words: dict[str, str], says: list[str]
) -> None:
    with pytest.raises(CommError) as caught:
        connect(**words)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in says), caught.value


def rejoin(times: int) -> None:
    for _ in range(times):
        world = connect(timeout_s=10)
        world.store.set(f"rank {world.rank}")
        world.barrier()
        world.close()


def test_ranks_that_leave_can_join_again(pool: Pool) -> None:
    pool.run(rejoin, 3, 30)
