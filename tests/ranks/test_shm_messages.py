"""The host transport's messages and sums in two halves: in order, both ways at once, from lent memory."""

import time

import pytest
import torch
from torch import Tensor

from plait.comm import (
    World,
    all_reduce,
    barrier,
    connect,
    receive,
    send,
    start_exchange,
    start_receive,
    start_scattered_sum,
    start_send,
)
from plait.errors import CommError
from support.pool import Pool
from support.shm_cases import assert_bits, values

BLOCK, RING = (64 << 10) // 4, (256 << 10) // 4  # float32 of a channel's block, and of all its blocks
SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, RING, RING + 1, 5 * RING + 3]


def _message(source: int, to: int, number: int) -> Tensor:
    return values(100 * source + 10 * to, SIZES[number % len(SIZES)], torch.float32) + number


def _tensor(world: World, content: Tensor, number: int) -> Tensor:
    if number % 3 == 0:
        return world.empty(content.numel(), content.dtype).copy_(content)
    if number % 3 == 1:
        return torch.empty(content.numel(), 2)[:, 1].copy_(content)
    return content


def _all_to_all_by_messages(rounds: int, seed: int) -> None:
    """Everybody sends to everybody at once; waits come in an order of their own."""
    world = connect(transport="host")
    group, me = world.group, world.rank
    peers = [rank for rank in group.ranks if rank != me]
    numbers = range(rounds * len(SIZES))
    pendings, received = [], {}
    for number in numbers:
        for peer in peers if number % 2 else peers[::-1]:
            give = _tensor(world, _message(me, peer, number), number)
            take = _tensor(world, torch.zeros(SIZES[number % len(SIZES)]), number + 1 + peer)
            received[peer, number] = take
            starts = [lambda give=give, peer=peer: start_send(give, group, peer)]
            starts.append(lambda take=take, peer=peer: start_receive(take, group, peer))
            pendings += [start() for start in (starts if (me + number) % 2 else reversed(starts))]
    generator = torch.Generator().manual_seed(seed + me)
    for index in torch.randperm(len(pendings), generator=generator).tolist():
        pendings[index].wait()
    for (peer, number), found in received.items():
        assert_bits(found.contiguous(), _message(peer, me, number), f"message {number} from {peer}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_arrive_whole_and_in_order_from_all_at_once(pool: Pool, ranks: int) -> None:
    pool.run(_all_to_all_by_messages, ranks, 3, ranks)


def _blocking_both_ways(numel: int) -> None:
    world = connect(transport="host")
    other = 1 - world.rank
    mine, theirs = torch.full((numel,), float(world.rank)), torch.empty(numel)
    for _ in range(20):
        pending = start_send(mine, world.group, other)
        receive(theirs, world.group, other)
        pending.wait()
        assert bool((theirs == other).all())
    if world.rank == 0:  # a ring, by verbs that block
        send(mine, world.group, 1)
        receive(theirs, world.group, 1)
    else:
        receive(theirs, world.group, 0)
        send(mine, world.group, 0)


@pytest.mark.parametrize("numel", [1, RING + 1, 1_000_000])
def test_two_ranks_send_to_each_other(pool: Pool, numel: int) -> None:
    pool.run(_blocking_both_ways, 2, numel)


def _sent_and_gone() -> float:
    world = connect(transport="host")
    found = torch.zeros(100)
    if world.rank == 0:
        send(torch.full((100,), 5.0), world.group, 1)
        world.close()
    else:
        time.sleep(0.3)
        receive(found, world.group, 0)
    return found.mean().item()


def test_messages_sent_before_a_rank_left_arrive(pool: Pool) -> None:
    assert pool.run(_sent_and_gone, 2) == [0.0, 5.0]


def _of_another_size() -> str:
    world = connect(transport="host")
    try:
        if world.rank == 0:
            send(torch.ones(10), world.group, 1, label="h3")
            all_reduce(torch.ones(1), world.group, label="after")
        else:
            receive(torch.ones(7), world.group, 0, label="h3")
    except CommError as error:
        time.sleep(0.3)  # the other rank is to receive it, not to lose us
        return str(error)
    return "no error"


def test_a_message_of_another_size_is_an_error_with_both_sizes(pool: Pool) -> None:
    sender, receiver = pool.run(_of_another_size, 2)
    assert "receive of h3 failed: the sizes of the message differ" in receiver
    assert "rank 0 sent 40 bytes, rank 1 expected 28" in receiver
    assert "all-reduce of after failed" in sender


# --- sums in two halves


def _sum_case(world: World, numel: int, dtype: torch.dtype, kind: int) -> None:
    """Several sums under way, added up in another order than they began in."""
    group, me = world.group, world.rank
    under_way = []
    for number in range(3):
        wholes = [values(10 * rank + number, numel * group.size, dtype) for rank in group.ranks]
        given = wholes[me].clone()
        if (kind + number + me * (kind // 2)) % 2:
            given = world.empty(given.numel(), dtype).copy_(given)
        scatters = (kind + number) % 3 != 0
        start = start_scattered_sum if scatters else start_exchange
        under_way.append((start(given, group, label=f"{number}"), given, wholes, scatters))
    order = [under_way[i] for i in ((0, 1, 2), (2, 1, 0), (1, 2, 0))[(kind + me) % 3]]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for summing, given, wholes, scatters in order:
        mine = slice(me * numel, (me + 1) * numel) if scatters else slice(None)
        total = torch.zeros_like(wholes[0][mine], dtype=wide)
        for whole in wholes:
            total += whole[mine].to(wide)
        adds = kind % 2 == 1
        into_own = scatters and not adds and wide == dtype
        out = given[mine] if into_own else torch.full_like(total, 2)
        runs = sum(run.numel() for run in summing.into(out, add=adds))
        assert runs == out.numel()
        assert_bits(out, (2 + total) if adds else total, f"{numel} x {dtype}, kind {kind}")
        if into_own:
            rest = torch.ones(given.numel(), dtype=torch.bool)
            rest[mine] = False
            assert_bits(given[rest], wholes[me][rest], "what was given")
    for summing, given, _, _ in order:
        summing.release()
        given.fill_(-7)  # no rank reads it any more


def _sums() -> int:
    world = connect(transport="host")
    num = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
        for numel in (0, 1, 7, 1001, 70_001, 200_003):
            _sum_case(world, numel, dtype, num)
            num += 1
    world.barrier()
    assert world._host_peers is not None
    world.empty(1, torch.uint8)  # who allocates looks at what was read meanwhile
    assert world._host_peers.arena.used_bytes == 0
    return num


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_in_two_halves_are_torchs_in_rank_order(pool: Pool, ranks: int) -> None:
    assert pool.run(_sums, ranks) == [30] * ranks


def _freed_while_it_is_read() -> tuple[float, float]:
    """Rank 1 adds up late, when rank 0 has long freed what it gave and has taken new memory."""
    world = connect(transport="host")
    given = world.empty(300_000, torch.float32).fill_(world.rank + 1.0)
    summing = start_exchange(given, world.group)
    out = torch.empty(300_000)
    if world.rank == 1:
        time.sleep(0.5)
    for _ in summing.into(out):
        pass
    del given
    again = world.empty(300_000, torch.float32).fill_(100.0)  # without `defer`, the same memory
    world.barrier()
    return out.mean().item(), again.mean().item()


def test_memory_that_peers_still_read_is_not_lent_again(pool: Pool) -> None:
    assert pool.run(_freed_while_it_is_read, 2) == [(3.0, 100.0)] * 2


def _reads_after_meeting() -> float:
    """Rank 1 reads what rank 0 gave after a meeting to which rank 0 comes when it has taken new memory."""
    world = connect(transport="host", timeout_s=10)
    lane = world.new_group((0, 1), "lane")
    given = world.empty(300_000, torch.float32).fill_(world.rank + 1.0)
    summing = start_exchange(given, world.group)
    out = torch.empty(300_000)
    if world.rank == 1:
        barrier(lane)
    for _ in summing.into(out):
        pass
    if world.rank == 0:
        del given
        world.empty(300_000, torch.float32).fill_(100.0)
        barrier(lane)
    return out.mean().item()


def test_taking_memory_does_not_deadlock_with_waiting_peers(pool: Pool) -> None:
    assert pool.run(_reads_after_meeting, 2) == [3.0, 3.0]


def _arena_after_many_sums() -> int:
    world = connect(transport="host")
    out = torch.empty(100_000)
    for turn in range(60):
        if turn % 10 == world.rank:
            time.sleep(0.01)
        for _ in start_exchange(torch.ones(100_000), world.group).into(out):
            pass
        assert bool((out == 2.0).all())
    assert world._host_peers is not None
    return world._host_peers.arena.num_bytes


def test_memory_that_was_given_to_a_sum_comes_back(pool: Pool) -> None:
    """At most one of 60 tensors of 400,000 bytes is in memory at a time, and those that slow peers read."""
    assert max(pool.run(_arena_after_many_sums, 2)) <= 5 * 401_408
