"""`plait train` with parameter servers, as users run it."""

import os
import signal
from pathlib import Path

import pytest
import torch

from support.cli_runs import finish, last_state, start, wait_for_step, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("servers"))


def test_a_run_with_servers_that_is_stopped_and_resumed_ends_with_the_bits_of_zero_1(recipe: Path) -> None:
    here, steps = recipe.parent, ("--set", "run.steps=10", "--set", "sample.tokens=0")
    finish(start("train", recipe, "--plan", "dp=2 micro=2 zero=1", *steps))
    ours = here / "ours"
    train = ("train", recipe, "--plan", "dp=2 micro=2 servers=1", *steps, "--set", f"run.dir={ours}")
    run = start(*train)
    wait_for_step(run, 3)
    os.kill(run.pid, signal.SIGTERM)
    out, _ = finish(run)
    assert "plait train" in out
    finish(start("train", ours, "--resume"))
    expected, found = last_state(here / "run"), last_state(ours)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_bounded_run_trains_and_a_recipe_that_servers_cannot_do_is_refused(
    recipe: Path,
) -> None:
    ours = recipe.parent / "bounded"
    words = (
        "--plan",
        "dp=2 micro=2 servers=2 sync=stale:1",
        "--set",
        f"run.dir={ours}",
        "--set",
        "run.steps=6",
    )
    _, refused = finish(start("train", recipe, *words, "--set", "run.spike_factor=3"), 2)
    assert "run.spike_factor cannot be combined with parameter servers" in refused
    out, _ = finish(start("train", recipe, *words))
    assert "step 6/6" in out
