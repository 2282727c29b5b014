"""Ranks that a scheduler has started without torchrun: rank 0's process holds their store."""

import signal
import socket
import subprocess
from pathlib import Path

from support import warm
from support.cli_runs import LIMIT_S, environment, last_step, wait_for_step, write_recipe


def start(rank: int, port: int, *words: object, script: Path | None = None) -> subprocess.Popen[str]:
    """Start `plait words...`, or the script, as one of two ranks that rendezvous at rank 0's port."""
    return warm.Popen(
        [*map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment()
        | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
        script=script,
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_ranks_that_stop_end_with_one_code_whichever_got_the_signal(tmp_path: Path) -> None:
    recipe, port = write_recipe(tmp_path), free_port()
    ranks = [start(rank, port, "train", recipe, "--set", "run.steps=2000") for rank in range(2)]
    wait_for_step(ranks[0], 3)
    for _ in range(20):
        ranks[1].send_signal(signal.SIGINT)
    ended = [(*rank.communicate(timeout=LIMIT_S), rank.returncode) for rank in ranks]
    assert [code for _, _, code in ended] == [130, 130]
    assert [errors for _, errors, _ in ended][1] == ""
    assert last_step(tmp_path / "run") >= 3


WAITS = """
import sys, time
from plait.comm import connect
world = connect(timeout_s=20)
if world.rank == 1:
    time.sleep(1)
    world.store.wait_for("done")
else:
    world.store.set("done")
"""


def test_the_store_lives_until_every_rank_has_left(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    port = free_port()
    ranks = [start(rank, port, script=tmp_path / "waits.py") for rank in range(2)]
    ended = [(*rank.communicate(timeout=LIMIT_S), rank.returncode) for rank in ranks]
    assert ended == [("", "", 0)] * 2


STARTS = """
import os, signal, sys
from plait.comm import connect
world = connect(timeout_s=20)
print(world.store.get("prepared"), flush=True)
world.barrier()
world.store.set("prepared", sys.argv[1])
world.barrier()
if sys.argv[1] == "first":
    os.kill(os.getpid(), signal.SIGKILL)
world.close()
"""


def test_a_job_that_is_started_again_after_a_kill_has_a_store_of_its_own(tmp_path: Path) -> None:
    """As in a loop of one `mpirun`, whose ranks have one file name; here rank 1 is first."""
    (tmp_path / "starts.py").write_text(STARTS)
    shared = environment() | {"WORLD_SIZE": "2", "PLAIT_RENDEZVOUS_FILE": str(tmp_path / "ranks")}
    printed = []
    for word in ("first", "second"):
        ranks = [
            warm.Popen(
                [word],
                script=tmp_path / "starts.py",
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (1, 0)
        ]
        printed += [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert printed == [("None\n", "")] * 4
    assert not [*tmp_path.glob("ranks*")]
