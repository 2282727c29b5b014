"""A rank that hangs ends the job within its limit, with the stacks of all who can still write them."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from plait.train.prepare import prepare
from support.cli_runs import LIMIT_S, ranks_of, start, two_ranks, wait_for_step, write_recipe

HANG_S = 2.0
ERROR_S = 8.0  # beyond that: the others' stacks are awaited for 2 s; the rest is a slow machine
LAUNCHER_S = 7.0  # and a launcher's, which kills 5 s after the first rank has ended

# A rank of a prepared run, whose loader does not come back from the fourth batch on the second rank.
RANK = """
import ctypes, os, sys, threading
from plait.cli.main import main
from plait.data.loader import Batches

read = Batches.__getitem__
run, kind = sys.argv[1:]

def reads_forever():
    if kind == "holds the interpreter":
        ctypes.PyDLL(None).sleep(1000)
    threading.Event().wait()

def stuck(self, number):
    if number == 3 and os.environ["RANK"] == "1":
        reads_forever()
    return read(self, number)

Batches.__getitem__ = stuck
sys.argv = ["plait", "rank", run]
main()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("hangs"))


def words(run: Path) -> list[str]:
    values = ("run.steps=300", "run.evaluate_every=0", "run.checkpoint_every=0")
    return [f"run.dir={run}", f"run.hang_s={HANG_S}", *values]


def stacks_of(run: Path, rank: int) -> str:
    return (run / "stacks" / f"rank-{rank:05d}.txt").read_text()


@pytest.mark.parametrize("kind", [pytest.param("waits", marks=pytest.mark.sweep), "holds the interpreter"])
def test_a_hanging_rank_is_named_and_its_stack_shows_where(recipe: Path, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    prepare(recipe, sets=words(run))
    began_s = time.monotonic()
    with two_ranks(RANK, tmp_path / "meet", str(run), kind, is_warm=True) as ranks:
        said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1]
    assert time.monotonic() - began_s < 20 + HANG_S + ERROR_S
    message = "".join(said)
    assert message.count("CommError") == 1, message
    assert "rank 1 hangs in step 4, and the other ranks wait" in message
    assert f"rank 1 (process {ranks[1].pid} on {os.uname().nodename}): in " in message
    assert "rank 0: in a step, in all-reduce of" in message
    if kind == "waits":
        assert f"in reading data for {HANG_S:.0f} s" in message
    else:
        assert "at its last status; one of its threads held the interpreter lock" in message
    assert str(run / "stacks") in message
    assert "in reads_forever" in stacks_of(run, 1)
    assert "reads_forever" not in stacks_of(run, 0)
    assert "in _finish" in stacks_of(run, 0)


@pytest.mark.parametrize(
    ("plan", "victim"),
    [
        ("dp=2 micro=2", 1),
        ("dp=2 micro=2 servers=1", 2),
        pytest.param("dp=2 micro=2 servers=1", 1, marks=pytest.mark.sweep),
    ],
)
def test_a_stopped_rank_ends_the_job_and_is_the_one_without_stacks(
    recipe: Path, tmp_path: Path, plan: str, victim: int
) -> None:
    run = tmp_path / "run"
    sets = [word for value in words(run) for word in ("--set", value)]
    process = start("train", recipe, "--plan", plan, *sets)
    wait_for_step(process, 3)
    stopped = ranks_of(process.pid)[victim]
    os.kill(stopped, signal.SIGSTOP)
    began_s = time.monotonic()
    _, err = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began_s < HANG_S + ERROR_S + LAUNCHER_S
    assert process.returncode == 1
    assert err.count("CommError") == 1, err
    assert f"rank {victim} hangs" in err
    assert f"process {stopped}" in err
    assert "the process is stopped (SIGSTOP)" in err
    assert re.search(rf"{run / 'stacks'}; none from ranks? .*{victim}", err)
    assert "in loop" in stacks_of(run, 0)
    assert not Path(f"/proc/{stopped}").exists()
