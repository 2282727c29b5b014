"""Random operations on random overlapping groups, many under way: no wrong value, no deadlock, nothing left.

One seeded generator, which all ranks run alike, decides everything; a rank does what concerns it. Every group
sees its operations start in the same order on all its members.
"""

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import (
    Group,
    ReduceWork,
    World,
    barrier,
    connect,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_exchange,
    start_gather,
    start_receive,
    start_reduce,
    start_reduce_scatter,
    start_scatter,
    start_scattered_sum,
    start_send,
)
from support.pool import Pool
from support.shm_cases import FLOATS, INTEGERS, assert_bits, reduced, values

RANKS = 8
VERBS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
]
SIZES = [0, 1, 5, 64, 1000, 4097, 20_000, 70_001]

Check = Callable[[], None]  # waits, and looks at what came


class Player:
    """One rank's part of the random operations."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)  # alike on all ranks
        self.own = random.Random(f"{seed} {world.rank}")  # this rank's: when it waits, how tensors are stored
        self.groups = self._groups()
        self.under_way: list[Check] = []
        self.sums: dict[int, list[_Sum]] = {}  # by group: nothing else may be called there meanwhile

    def _groups(self) -> list[tuple[tuple[int, ...], Group | None]]:
        everybody = tuple(range(self.world.size))
        asked = [(everybody, ""), (everybody, "lane")]
        for number in range(8):
            some = sorted(self.chance.sample(everybody, self.chance.randrange(2, self.world.size)))
            asked.append((tuple(some), f"lane {number % 2}" if number else ""))
        return [
            (ranks, self.world.new_group(ranks, lane) if self.world.rank in ranks else None)
            for ranks, lane in asked
        ]

    def turn(self) -> None:
        index = self.chance.randrange(len(self.groups))
        ranks, group = self.groups[index]
        kind = self.chance.choice(["verb"] * 5 + ["message"] * 3 + ["sum", "sum", "barrier"])
        numel, key = self.chance.choice(SIZES), self.chance.randrange(1 << 30)
        dtype, place = self.chance.choice(FLOATS + INTEGERS), self.chance.randrange(len(ranks))
        verb, other = self.chance.choice(VERBS), self.chance.randrange(1, len(ranks))
        op = self.chance.choice(["sum", "max", "min", "prod"])
        if group is None:
            return
        if kind != "sum":
            self._end_sums(index)
        if kind == "sum":
            numel -= numel % group.size
            self.sums.setdefault(index, []).append(self._sum(group, numel, key))
        elif kind == "message":
            self._message(group, place, (place + other) % group.size, numel, dtype, key)
        elif kind == "barrier":
            barrier(group)
        else:
            self.under_way.append(self._verb(group, verb, op, place, numel, dtype, key))
        while self.under_way and (self.own.random() < 0.4 or len(self.under_way) > 40):
            self.under_way.pop(self.own.randrange(len(self.under_way)))()

    def finish(self) -> None:
        for index in range(len(self.groups)):
            self._end_sums(index)
        while self.under_way:
            self.under_way.pop(self.own.randrange(len(self.under_way)))()

    def _end_sums(self, index: int) -> None:
        sums = self.sums.pop(index, [])
        self.own.shuffle(sums)
        for end in sums:
            end()
        for end in sums if self.own.random() < 0.5 else []:
            end.release()

    def _tensor(self, content: Tensor) -> Tensor:
        storage = self.own.randrange(3)
        if storage == 0:
            return self.world.empty(content.numel(), content.dtype).copy_(content)
        if storage == 1:
            return torch.empty(content.numel(), 2, dtype=content.dtype)[:, 0].copy_(content)
        return content.clone()

    def _verb(
        self, group: Group, verb: str, op: str, root: int, numel: int, dtype: torch.dtype, key: int
    ) -> Check:
        size, me = group.size, group.rank
        piece = numel // size
        mine = slice(me * piece, (me + 1) * piece)
        given = [values(key + place, numel, dtype) for place in range(size)]
        cut = [values(key + place, size * piece, dtype) for place in range(size)]
        parts = [values(key + place, piece, dtype) for place in range(size)]
        whole, flat, part = (self._tensor(each[me]) for each in (given, cut, parts))
        blank, blank_part = self._tensor(torch.zeros_like(cut[0])), self._tensor(torch.zeros_like(parts[0]))
        out: Tensor | None = whole
        if verb == "all_reduce":
            pending, expected = start_all_reduce(whole, group, op), reduced(given, op)
        elif verb == "reduce":
            pending = start_reduce(whole, group, root, op)
            expected = reduced(given, op) if me == root else given[me]
        elif verb == "broadcast":
            pending, expected = start_broadcast(whole, group, root), given[root]
        elif verb == "all_gather":
            out, expected = blank, torch.cat(parts)
            pending = start_all_gather(blank, part, group)
        elif verb == "gather":
            out, expected = blank if me == root else None, torch.cat(parts)
            pending = start_gather(out, part, group, root)
        elif verb == "scatter":
            out, expected = blank_part, cut[root][mine]
            pending = start_scatter(out, flat if me == root else None, group, root)
        elif verb == "reduce_scatter":
            out, expected = blank_part, reduced([each[mine] for each in cut], op)
            pending = start_reduce_scatter(out, flat, group, op)
        else:
            out, expected = blank, torch.cat([each[mine] for each in cut])
            pending = start_all_to_all(out, flat, group)
        return lambda: self._look(pending, out, expected, f"{verb} {op} {numel} x {dtype} in {group.ranks}")

    def _message(self, group: Group, source: int, to: int, numel: int, dtype: torch.dtype, key: int) -> None:
        content = values(key, numel, dtype)
        what = f"message of {numel} x {dtype} from {source} to {to} in {group.ranks}"
        if group.rank == source:
            give = self._tensor(content)
            pending = start_send(give, group, to)
            self.under_way.append(lambda: self._look(pending, give, content, what))
        elif group.rank == to:
            take = self._tensor(torch.zeros_like(content))
            arrives = start_receive(take, group, source)
            self.under_way.append(lambda: self._look(arrives, take, content, what))

    def _sum(self, group: Group, numel: int, key: int) -> "_Sum":
        dtype = torch.bfloat16 if key % 2 else torch.float32
        given = [values(key + place, numel, dtype) for place in range(group.size)]
        piece = numel // group.size
        scatters, adds = key % 3 != 0, key % 5 == 0
        mine = slice(group.rank * piece, (group.rank + 1) * piece) if scatters else slice(None)
        start = start_scattered_sum if scatters else start_exchange
        lent = self.own.random() < 0.5
        tensor = (
            self.world.empty(numel, dtype).copy_(given[group.rank]) if lent else given[group.rank].clone()
        )
        summing = start(tensor, group)
        total = sum((each[mine].float() for each in given[1:]), given[0][mine].float())
        expected = 1 + total if adds else total
        out = torch.ones_like(total)
        return _Sum(summing, tensor, out, expected, adds, f"a sum of {numel} x {dtype} in {group.ranks}")

    def _look(self, pending: Any, out: Tensor | None, expected: Tensor, what: str) -> None:
        pending.wait()
        if out is not None:
            assert_bits(out.contiguous(), expected, what)


@dataclass
class _Sum:
    """A sum under way, and what it should come to."""

    summing: ReduceWork
    given: Tensor
    out: Tensor
    expected: Tensor
    adds: bool
    what: str

    def __call__(self) -> None:
        for _ in self.summing.into(self.out, add=self.adds):
            pass
        assert_bits(self.out, self.expected, self.what)

    def release(self) -> None:
        """After all sums of the group have been added up: peers that wait for one another wait forever."""
        self.summing.release()
        self.given.fill_(-1)


def _held() -> dict[str, int]:
    """Counts of the process's system resources."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "mappings": sum("plait" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "python threads": threading.active_count(),
        "shared KiB": int(status["RssShmem"].split()[0]),
        "own KiB": int(status["RssAnon"].split()[0]),
    }


def _play(num_turns: int, seed: int) -> tuple[dict[str, int], dict[str, int], int]:
    before = _held()
    world = connect(transport="host", timeout_s=60)
    player = Player(world, seed)
    for _ in range(num_turns):
        player.turn()
    player.finish()
    world.barrier()
    assert world._host_peers is not None
    arena = world._host_peers.arena
    gc.collect()
    used = arena.used_bytes
    del arena
    world.close()
    until_s = time.monotonic() + 5.0
    while len(os.listdir("/proc/self/task")) > before["threads"] and time.monotonic() < until_s:  # noqa: PTH208
        time.sleep(0.001)  # Python joins a thread slightly before the system ends it
    return before, _held(), used


def _check(results: list[tuple[dict[str, int], dict[str, int], int]], most_growth_kib: int) -> None:
    for before, after, used in results:
        growth = after["own KiB"] - before["own KiB"]
        assert used == 0
        assert growth < most_growth_kib, f"{growth} KiB are left"
        exact = ("descriptors", "mappings", "threads", "python threads")
        assert {name: after[name] for name in exact} == {name: before[name] for name in exact}
        assert after["shared KiB"] <= before["shared KiB"] + 64
    assert not [name for name in os.listdir("/dev/shm") if "plait" in name]  # noqa: PTH208


def _warm() -> None:
    """Loads what the first group of a process loads once."""
    connect().barrier()


def test_random_operations_on_overlapping_groups_are_right_and_leave_nothing(pool: Pool) -> None:
    pool.run(_warm, RANKS)
    pool.run(_play, RANKS, 50, 0)
    _check(pool.run(_play, RANKS, 600, 1), 40 << 10)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_thousand_random_operations(pool: Pool, seed: int) -> None:
    pool.run(_warm, RANKS)
    _check(pool.run(_play, RANKS, 10_000, seed, timeout_s=1200), 100 << 10)
