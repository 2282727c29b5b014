"""A rank that dies, stops or fails while it writes its part of a checkpoint ends the save on the others."""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import Saver, saver, steps
from plait.comm import World, connect
from plait.comm.store import JobStore
from plait.errors import CommError, PlaitError
from plait.parallel.zero.state_io import StateShard
from support.pool import Pool, RankError

TIMEOUT_S = 1.5
SHARDS = [StateShard.from_tensor("weights/a", torch.arange(1000.0))]


def _connect(transport: str = "auto") -> World:
    """Join the ranks, for which a busy machine needs longer than the timeout of what follows."""
    world = connect(timeout_s=20.0, transport=transport)
    world.store.close()
    world.store = JobStore(world._connection.store, world.rank, TIMEOUT_S)
    world.store.is_gone = world._is_gone
    world.barrier()
    return world


def _save(transport: str, event: str, victim: int, background: bool, folder: Path) -> None:
    """Save, with an event on one rank while it writes; record what the others raise, and after how long."""
    world = _connect(transport)
    saves = Saver(folder / "checkpoints", world, background=background)
    saves.save(1, SHARDS[: world.rank == 0], {})
    saves.finish()
    write = saver.write_rank_files

    def act(*args: Any) -> Any:
        (folder / "pid").write_text(str(os.getpid()))
        if event == "slow":
            time.sleep(2 * TIMEOUT_S)
            return write(*args)
        os.kill(os.getpid(), signal.SIGKILL if event == "killed" else signal.SIGSTOP)
        return write(*args)

    if world.rank == victim:
        saver.write_rank_files = act
    began_s, error = time.monotonic(), ""
    try:
        saves.save(2, SHARDS[: world.rank == 0], {})
        saves.finish()
    except PlaitError as raised:
        error = raised.message()
    finally:
        saver.write_rank_files = write
    (folder / f"rank-{world.rank}").write_text(json.dumps([time.monotonic() - began_s, error]))
    if event == "stopped" and world.rank != victim:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("transport", "event", "victim", "background"),
    [
        ("host", "killed", 1, False),
        ("host", "killed", 0, True),
        ("gloo", "stopped", 1, True),
        ("gloo", "stopped", 0, False),
    ],
)
def test_a_rank_that_is_lost_while_it_saves_ends_the_save_on_the_others(
    pool: Pool, tmp_path: Path, transport: str, event: str, victim: int, background: bool
) -> None:
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        pool.run(_save, 2, transport, event, victim, background, tmp_path)
    took_s, message = json.loads((tmp_path / f"rank-{1 - victim}").read_text())
    silent = f"CommError: rank {victim} does not respond"
    assert message.startswith(f"CommError: rank {victim} is gone" if transport == "host" else silent)
    assert took_s < (1.0 if transport == "host" else 3 * TIMEOUT_S)
    assert [path.name for path in steps(tmp_path / "checkpoints")] == ["step-00000001"]


def test_a_rank_that_writes_for_longer_than_the_timeout_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save, 2, "gloo", "slow", 1, False, tmp_path)
    assert [path.name for path in steps(tmp_path / "checkpoints")] == ["step-00000001", "step-00000002"]


def _fails_to_copy(folder: Path) -> str:
    world = _connect()
    saves = Saver(folder, world, background=True)
    if world.rank == 0:
        saves._copy = _no_memory  # type: ignore[method-assign]
    try:
        saves.save(1, SHARDS[: world.rank == 0], {})
        saves.finish()
    except (MemoryError, PlaitError) as error:
        return repr(error)
    return ""


def _no_memory(_: object) -> Any:
    raise MemoryError("too little")


def test_a_rank_that_has_no_memory_for_its_copy_fails_the_save_on_all(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(_fails_to_copy, 2, tmp_path)
    assert found == ["MemoryError('too little')", "CheckpointError('a checkpoint cannot be written')"]


def _waits_for_what_never_comes() -> str:
    world = _connect()
    done = threading.Event()
    if world.rank == 1:
        done.wait(2 * TIMEOUT_S)  # alive: the other one waits on
        world.close()
        return ""
    try:
        world.store.wait_for("nothing", rank=1)
    except CommError as error:
        return error.fact
    return "waited"


def test_a_rank_waits_for_one_that_lives_and_no_longer(pool: Pool) -> None:
    assert pool.run(_waits_for_what_never_comes, 2)[0] == "rank 1 is gone"
