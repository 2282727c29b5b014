"""The host transport when ranks die, stop, leave or mean different things."""

import atexit
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plait.comm import (
    Group,
    World,
    all_gather,
    all_reduce,
    barrier,
    connect,
    reduce_scatter,
    start_all_reduce,
    start_exchange,
    start_receive,
    start_send,
)
from plait.errors import CommError
from support.pool import Pool, RankError

RANKS = 4
SOON_S = 3.0  # from a rank's death to its peers' messages


# --- what ranks are at when one of them dies


def _collectives(world: World, group: Group) -> None:
    tensor = world.empty(400_000, torch.float32).fill_(1.0)
    all_reduce(tensor, group, label="w")


def _foreign(world: World, group: Group) -> None:
    all_gather(torch.empty(400_000 * group.size), torch.ones(400_000), group, label="w")


def _small(world: World, group: Group) -> None:
    all_reduce(torch.ones(16), group, label="w")


def _barriers(world: World, group: Group) -> None:
    barrier(group, label="w")


def _started(world: World, group: Group) -> None:
    pendings = [start_all_reduce(torch.ones(20_000), group, label="w") for _ in range(5)]
    for pending in pendings:
        pending.wait()


def _messages(world: World, group: Group) -> None:
    size = group.size
    out = torch.empty(300_000)
    gives = start_send(
        world.empty(300_000, torch.float32).fill_(1.0), group, (group.rank + 1) % size, label="w"
    )
    start_receive(out, group, (group.rank - 1) % size, label="w").wait()
    gives.wait()


def _sums(world: World, group: Group) -> None:
    out = torch.empty(300_000)
    sums = [start_exchange(torch.ones(300_000), group, label="w") for _ in range(3)]
    for summing in sums:
        for _ in summing.into(out):
            pass
    for summing in sums:
        summing.release()


def _groups(world: World, group: Group) -> None:
    world.new_group(group.ranks, "w")


WORK: dict[str, tuple[Callable[[World, Group], None], str]] = {
    "collectives in place": (_collectives, "all-reduce of w"),
    "collectives through slots": (_foreign, "all-gather of w"),
    "small collectives": (_small, "all-reduce of w"),
    "barriers": (_barriers, "barrier of w"),
    "started calls": (_started, "all-reduce of w"),
    "messages": (_messages, "(send|receive) of w"),
    "sums": (_sums, "all-reduce of w"),
    "groups": (_groups, r"the group of ranks \[0, 1, 2, 3\] cannot be created|barrier of a new group failed"),
}


def _die_at_work(name: str, victim: int, after_s: float, folder: Path) -> None:
    world = connect(transport="host", timeout_s=30)
    world.barrier()
    if world.rank == victim:
        threading.Timer(after_s, _kill_myself, (folder,)).start()
    message = ""
    while not message:
        try:
            WORK[name][0](world, world.group)
        except CommError as error:
            message = str(error)
    (folder / f"rank-{world.rank}").write_text(json.dumps([time.monotonic(), message]))


def _kill_myself(folder: Path) -> None:
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def _errors_of_peers(folder: Path, victim: int) -> list[tuple[float, str]]:
    """When, after the victim's death, and what."""
    died_s = float((folder / "died").read_text())
    peers = {*range(RANKS)} - {victim}
    found = [json.loads((folder / f"rank-{rank}").read_text()) for rank in sorted(peers)]
    return [(at_s - died_s, message) for at_s, message in found]


def assert_nothing_remains(pool: Pool) -> None:
    until_s = time.monotonic() + SOON_S  # ranks leave when they have written their results for the test
    while _remains(pool) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert _remains(pool) == []


def _kill_at_work(pool: Pool, folder: Path, name: str, chance: random.Random) -> None:
    # A first rank killed while it leaves word of a group may leave half a record in torch's FileStore,
    # on which readers turn forever.
    victim, after_s = chance.randrange(name == "groups", RANKS), chance.uniform(0.001, 0.3)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        pool.run(_die_at_work, RANKS, name, victim, after_s, folder)
    for after_s, message in _errors_of_peers(folder, victim):
        assert f"rank {victim} is gone" in message
        assert re.search(WORK[name][1], message), message
        assert after_s < SOON_S
    assert_nothing_remains(pool)


def _remains(pool: Pool) -> list[str]:
    """Memory of groups and arenas that live processes still map."""
    found = [name for name in os.listdir("/dev/shm") if "plait" in name]  # noqa: PTH208
    for pid in pool.pids:
        with contextlib.suppress(FileNotFoundError):  # the one that was killed
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found += [line for line in maps if "memfd:plait" in line]
            found += [
                str(fd.readlink())
                for fd in Path(f"/proc/{pid}/fd").iterdir()
                if "memfd" in str(fd.readlink())
            ]
    return found


@pytest.mark.parametrize("name", [*WORK])
def test_peers_of_a_killed_rank_name_it_within_seconds(pool: Pool, tmp_path: Path, name: str) -> None:
    _kill_at_work(pool, tmp_path, name, random.Random(name))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", [*WORK])
def test_peers_of_a_rank_killed_at_any_point_name_it(
    pool: Pool, tmp_path: Path, name: str, seed: int
) -> None:
    _kill_at_work(pool, tmp_path, name, random.Random(f"{name} {seed}"))


def _stopped(folder: Path) -> tuple[str, float]:
    world = connect(transport="host", timeout_s=2)
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    world.barrier()
    begin_s = time.monotonic()
    try:
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        all_reduce(torch.ones(100_000), world.group, label="h7")
    except CommError as error:
        took_s = time.monotonic() - begin_s
        if world.rank == 0:
            time.sleep(0.5)
            os.kill(int((folder / "pid-2").read_text()), signal.SIGCONT)
        return str(error), took_s
    return "no error", 0.0


def test_a_stopped_rank_is_named_after_the_time_limit(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(_stopped, 3, tmp_path, timeout_s=20)
    for message, took_s in results[:2]:
        assert "all-reduce of h7 failed: rank 2 did not arrive within 2 s" in message
        assert 1.9 < took_s < 4
    assert "failed" in results[2][0]  # it comes back to a group that has gone on without it


def _leave_at_once() -> int:
    return connect(transport="host", timeout_s=10).new_group((0, 1, 2), "lane").size


def test_ranks_that_leave_at_once_have_formed_their_groups(pool: Pool) -> None:
    for _ in range(10):
        assert pool.run(_leave_at_once, 3) == [3] * 3


def _late_for_a_group(how: str) -> str:
    world = connect(transport="host", timeout_s=2)
    world.barrier()
    if world.rank == 1:
        if how == "raises":
            raise ValueError("a mistake of its own")
        time.sleep(0.5 if how == "late" else 3)
    try:
        group = world.new_group((0, 1, 2), "lane")
    except CommError as error:
        return str(error)
    all_reduce(tensor := torch.ones(3), group)
    return str(tensor.tolist())


def test_a_rank_that_comes_late_to_a_group_is_waited_for(pool: Pool) -> None:
    assert pool.run(_late_for_a_group, 3, "late") == [str([3.0] * 3)] * 3


def test_a_rank_that_never_comes_to_a_group_is_named_after_the_time_limit(pool: Pool) -> None:
    messages = pool.run(_late_for_a_group, 3, "never")
    for rank in (0, 2):
        expected = "the group of ranks [0, 1, 2] cannot be created: rank 1 did not arrive within 2 s"
        assert expected in messages[rank]


def _raise_or_wait(folder: Path) -> None:
    world = connect(transport="host", timeout_s=30)
    world.barrier()
    begin_s = time.monotonic()
    if world.rank == 1:
        raise ValueError("a mistake of its own")
    try:
        reduce_scatter(torch.empty(10), torch.ones(30), world.group, label="h2")
    except CommError as error:
        (folder / f"rank-{world.rank}").write_text(json.dumps([time.monotonic() - begin_s, str(error)]))
        raise


@pytest.mark.quick
def test_a_rank_that_raises_and_leaves_is_gone_for_its_peers(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a mistake of its own") as caught:
        pool.run(_raise_or_wait, 3, tmp_path)
    assert caught.value.failures[0].rank == 1  # the cause comes first, before its consequences
    for rank in (0, 2):
        took_s, message = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert "reduce-scatter of h2 failed: rank 1 is gone" in message
        assert took_s < SOON_S
    assert_nothing_remains(pool)


# --- forks and signals


def _fork_and_end(how: str) -> float:
    world = connect(transport="host", timeout_s=20)
    tensor, message = torch.ones(10), torch.ones(500_000)
    pendings = [start_all_reduce(tensor, world.group)] if world.rank == 0 else []
    pendings.append(start_send(message, world.group, 1 - world.rank))  # more than the channel holds
    if world.rank == 0:
        child = os.fork()
        if child == 0:
            if how == "exit":
                atexit._run_exitfuncs()  # a Python that ends in order
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    else:
        time.sleep(0.2)
        all_reduce(tensor, world.group)
    arrived = torch.zeros(500_000)
    pendings.append(start_receive(arrived, world.group, 1 - world.rank))
    for pending in pendings:
        pending.wait()
    all_reduce(tensor, world.group)
    return float(tensor[0] * arrived.mean())


@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_a_forked_process_that_ends_is_not_the_rank(pool: Pool, how: str) -> None:
    assert pool.run(_fork_and_end, 2, how) == [4.0, 4.0]


def _load_with_workers() -> int:
    world = connect(transport="host", timeout_s=20)
    num = 0
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            torch.arange(64), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        for batch in loader:
            all_reduce(batch, world.group)
            num += int(batch.sum())
    return num


def test_forked_data_workers_start_and_end_while_ranks_communicate(pool: Pool) -> None:
    assert pool.run(_load_with_workers, 2) == [2 * 2 * sum(range(64))] * 2


def _interrupted() -> tuple[float, bool]:
    """Ctrl-C while a started call waits; afterwards the call can be waited for again."""
    world = connect(transport="host", timeout_s=30)
    tensor = torch.ones(100)
    if world.rank == 1:
        time.sleep(2.5)
        all_reduce(tensor, world.group)
        return 0.0, True
    pending = start_all_reduce(tensor, world.group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin_s = time.monotonic()
    try:
        pending.wait()
    except KeyboardInterrupt:
        took_s = time.monotonic() - begin_s
        pending.wait()
        return took_s, bool((tensor == 2).all())
    return 0.0, False


def test_ctrl_c_ends_the_wait_for_a_started_call_but_not_the_call(pool: Pool) -> None:
    (took_s, finished), _ = pool.run(_interrupted, 2)
    assert 0.2 < took_s < 1.5
    assert finished


def _two_threads() -> None:
    """Each of two threads talks in a group of its own, at its own pace."""
    world = connect(transport="host", timeout_s=30)
    groups = [world.group, world.new_group(tuple(range(world.size)), "lane")]
    wrong: list[object] = []

    def talk(which: int) -> None:
        group = groups[which]
        for turn in range(200):
            tensor = torch.full(((turn % 7) * 3000 + 1,), float(turn + group.rank))
            if (turn + which) % 2:
                all_reduce(tensor, group)
            else:
                start_all_reduce(tensor, group).wait()
            expected = sum(turn + rank for rank in range(group.size))
            if not bool((tensor == expected).all()):
                wrong.append((which, turn))

    threads = [threading.Thread(target=talk, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_threads_communicate_on_two_groups_at_once(pool: Pool) -> None:
    pool.run(_two_threads, 3)
