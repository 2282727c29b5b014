"""`plait.launch`: a function on local ranks, its result, its errors, and its end by Ctrl-C."""

import gc
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.comm import connect
from plait.errors import CommError, PlanError
from support import warm


def train(plan: str) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = plait.parallelize(model, plan, loss=lambda out, _: (out.square().sum(), out.numel()))
    share = torch.arange(16.0).view(4, 4)[engine.data_rank :: engine.data_ranks]
    return engine.step({"input": share}).loss, engine.full_parameters()


@pytest.mark.quick
def test_a_function_is_run_on_ranks_and_the_first_ones_result_is_returned() -> None:
    torch.ones(10**6).add_(1)  # with all threads of this process
    alone, weights = train("dp=1")
    loss, of_ranks = plait.launch(train, 2, "dp=2 zero=3")
    assert loss == pytest.approx(alone, rel=1e-6)
    assert of_ranks.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(of_ranks[name], tensor)


def test_a_parameter_server_is_a_rank_that_returns_nothing() -> None:
    alone, weights = train("dp=1")
    loss, of_workers = plait.launch(train, 3, "dp=2 servers=1")
    assert loss == pytest.approx(alone, rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(of_workers[name], tensor)


def test_a_ranks_garbage_collections_leave_out_what_the_launcher_had_imported() -> None:
    assert plait.launch(lambda: len(gc.get_objects()), 1) < 10_000 < len(gc.get_objects())


def test_closures_and_programs_with_other_threads_can_be_launched() -> None:
    stop, factor = threading.Event(), 3
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert plait.launch(lambda x: factor * x + connect().size, 2, 5) == 17
    finally:
        stop.set()
        thread.join()


def test_the_error_of_the_rank_that_failed_is_raised_with_its_traceback() -> None:
    def fail_on_one() -> None:
        world = connect()
        if world.rank == 1:
            raise KeyError("of rank 1")
        world.barrier()

    with pytest.raises(KeyError, match="of rank 1") as caught:
        plait.launch(fail_on_one, 2)
    assert "in fail_on_one" in "".join(caught.value.__notes__)
    with pytest.raises(PlanError, match="degrees do not multiply") as refused:
        plait.launch(train, 2, "dp=4")
    assert refused.value.hint is not None


def test_a_rank_that_is_killed_and_a_result_that_cannot_be_returned_are_errors() -> None:
    with pytest.raises(CommError, match="rank 0 was killed"):
        plait.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)
    with pytest.raises(CommError, match="rank 0 returned a value that cannot be pickled"):
        plait.launch(lambda: lambda: 0, 1)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda: plait.launch(train("dp=1"), 2), "a tuple"),
        (lambda: plait.launch(plait.launch, 1, train, 1, "dp=1"), "a rank itself"),
    ],
    ids=["a call", "nested"],
)
def test_calls_and_nested_launches_are_refused(call: Any, given: str) -> None:
    with pytest.raises(CommError, match="launch cannot start ranks") as caught:
        call()
    assert given in str(caught.value.given)


_INTERRUPTED = """
import os, pathlib, sys, time
import plait

def wait(folder):
    (pathlib.Path(folder) / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)

try:
    plait.launch(wait, 2, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted here", flush=True)
time.sleep(60)
"""


def test_ctrl_c_ends_all_ranks_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(_INTERRUPTED)
    folder = tmp_path / "pids"
    folder.mkdir()
    program = warm.Popen(
        [str(folder)],
        script=tmp_path / "interrupted.py",
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(pids := [path.read_text() for path in folder.iterdir()]) < 2 or "" in pids:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        assert program.stdout is not None
        assert program.stdout.readline() == "interrupted here\n"
        assert not any(Path("/proc", pid).exists() for pid in pids)
        program.send_signal(signal.SIGINT)  # its own handlers are back
        assert program.wait(timeout=20) != 0
    finally:
        program.kill()
        program.communicate()
