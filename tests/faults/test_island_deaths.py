"""Islands on parameter servers that are killed between two exchanges, and join again."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from plait.comm import launch_local
from plait.comm.rank_monitor import RestartPolicy
from support.local_steps import ledger_engine

WORKERS, STEPS, LOCAL_STEPS, DEATH, RETURN = 3, 12, 2, 3, 8
LIMIT_S = 120.0


def wait_until(path: Path) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.01)


def job(folder: Path, words: str) -> None:
    """A worker or server. Worker 1 kills itself after `DEATH` steps, in the middle of a round; started again,
    it joins when worker 0 has taken `RETURN` steps, in a round that worker 0 does not end before."""
    rank = int(os.environ["RANK"])
    returns = rank == 1 and (folder / "death").exists()
    if returns:
        wait_until(folder / "return")
    engine = ledger_engine(WORKERS, f"local_steps={LOCAL_STEPS} {words}")
    if returns:
        (folder / "joined").write_text(str(engine.num_steps))
    while engine.num_steps < STEPS:
        engine.step({"worker": torch.tensor([rank])})
        if rank == 1 and not returns and engine.num_steps == DEATH:
            (folder / "death").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and engine.num_steps == RETURN:
            (folder / "return").touch()
            wait_until(folder / "joined")
    rows, counts = -engine.full_parameters()["rows"], engine.server_counts()
    if rank == 0:
        (folder / "result").write_text(json.dumps([rows.amin(1).tolist(), rows.amax(1).tolist(), counts]))
    engine.world.close()


@pytest.mark.parametrize(
    "words",
    ["servers=1", pytest.param("servers=2 server=replicated", marks=pytest.mark.sweep)],
)
def test_islands_go_on_without_a_killed_one_and_with_it_again_as_the_mean_of_the_living(
    tmp_path: Path, words: str
) -> None:
    servers = 2 if "=2" in words else 1
    code = launch_local(
        WORKERS + servers,
        [],
        function=lambda: job(tmp_path, words),
        policy=RestartPolicy(range(1, WORKERS), range(1, WORKERS), max_restarts=1),
    )
    assert code == 0
    fewest, most, counts = json.loads((tmp_path / "result").read_text())
    exchanged = DEATH // LOCAL_STEPS * LOCAL_STEPS  # steps of worker 1 before it dies
    of_all = (exchanged + STEPS - RETURN) / WORKERS
    of_others = of_all + (RETURN - exchanged) / (WORKERS - 1)
    expected = [of_others, of_all, of_others]
    assert fewest == pytest.approx(expected, rel=1e-9)
    assert most == pytest.approx(expected, rel=1e-9)
    assert (tmp_path / "joined").read_text() == str(RETURN)
    assert (counts["joined"], counts["decided"]) == (WORKERS + 1, STEPS // LOCAL_STEPS)
