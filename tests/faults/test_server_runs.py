"""`plait train` with parameter servers, as users run it."""

import os
import signal
from pathlib import Path

import pytest
import torch

from plait.train.metrics import read_metrics
from support.cli_runs import finish, last_state, ranks_of, start, wait_for_step, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("servers"))


def test_a_run_that_is_stopped_and_loses_its_server_ends_when_resumed_with_the_bits_of_zero_1(
    recipe: Path,
) -> None:
    here, steps = recipe.parent, ("--set", "run.steps=16", "--set", "sample.tokens=0")
    finish(start("train", recipe, "--plan", "dp=2 micro=2 zero=1", *steps))
    ours = here / "ours"
    train = ("train", recipe, "--plan", "dp=2 micro=2 servers=1", *steps, "--set", f"run.dir={ours}")
    run = start(*train)
    wait_for_step(run, 3)
    os.kill(run.pid, signal.SIGTERM)
    out, _ = finish(run)
    assert "plait train" in out
    run = start("train", ours, "--resume")
    wait_for_step(run, 7)
    os.kill(ranks_of(run.pid)[2], signal.SIGKILL)
    _, err = finish(run, 128 + signal.SIGKILL)
    assert err.count("CommError") == 1
    assert "has lost server 0" in err
    out, _ = finish(start("train", ours, "--resume"))
    assert "servers=1 on 3 ranks (cpu)" in out
    expected, found = last_state(here / "run"), last_state(ours)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_recipe_that_servers_cannot_do_is_refused_and_a_killed_worker_joins_a_bounded_run_again(
    recipe: Path,
) -> None:
    plan = ("--plan", "dp=2 micro=2 servers=2 sync=stale:1")
    words = (*plan, "--set", f"run.dir={recipe.parent / 'bounded'}", "--set", "run.steps=12")
    _, refused = finish(start("train", recipe, *words, "--set", "run.spike_factor=3"), 2)
    assert "run.spike_factor cannot be combined with parameter servers" in refused
    run = start("train", recipe, *words)
    wait_for_step(run, 2)
    first, second = ranks_of(run.pid)[:2]
    os.kill(first, signal.SIGSTOP)  # it would go on without the other one
    os.kill(second, signal.SIGKILL)
    assert run.stderr is not None
    assert any("worker 1 has joined in step" in line for line in run.stderr)
    os.kill(first, signal.SIGCONT)
    out, _ = finish(run)
    assert "step 12/12" in out
    folder = recipe.parent / "bounded"
    counted = [record for record in read_metrics(folder / "metrics.jsonl") if "staleness" in record]
    assert {clock for record in counted for _, worker, clock in record["worker_clocks"] if worker} > {6, 7, 8}
    assert sum(sum(record["staleness"]) for record in counted) >= 12
    assert (folder / "clocks.png").exists()
