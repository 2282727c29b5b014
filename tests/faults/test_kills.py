"""Ranks that are killed at any instant lose no more than the steps since the last save, and nothing of that
is wrong.

`kill_ranks.py` checks the state of the run after every kill.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plait.train.metrics import read_metrics
from plait.train.prepare import prepare
from support import cli_runs, warm
from support.cli_runs import ROOT

KILL_RANKS = Path(__file__).parents[1] / "support" / "kill_ranks.py"


def prepared(here: Path, *sets: str) -> Path:
    """A run that has not started, and the undisturbed one to compare it with."""
    recipe = cli_runs.write_recipe(here)
    common = [
        word for each in (*sets, "run.checkpoint_every=1", "run.evaluate_every=0") for word in ("--set", each)
    ]
    keep = ["--set", "run.keep_last=1000", "--set", f"run.dir={here}/whole"]
    cli_runs.finish(cli_runs.start("train", recipe, *common, *keep))
    prepare(recipe, sets=common[1::2])
    return here / "run"


def killed(here: Path, kills: int, seed: int, *sets: str) -> list[dict[str, Any]]:
    run = prepared(here, *sets)
    process = warm.Popen(
        [str(run), str(here / "whole" / "checkpoints"), str(kills), str(seed)],
        script=KILL_RANKS,
        env=cli_runs.environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed, errors = process.communicate()
    found = [json.loads(line) for line in printed.splitlines()]
    assert process.returncode == 0, errors[-3000:]
    return [each for each in found if each["killed"]]


def test_a_rank_killed_at_any_instant_costs_the_steps_since_the_last_save_alone(tmp_path: Path) -> None:
    assert len(killed(tmp_path, 3, 1, "run.save_in_background=true")) == 3


def test_killed_islands_continue_with_the_same_bits_between_their_exchanges(tmp_path: Path) -> None:
    plan = "plan=dp=2 local_steps=4 outer=nesterov:0.7:0.9 exchange=int8 exchange_parts=2"
    assert len(killed(tmp_path, 2, 5, plan)) == 2


def test_after_the_death_of_an_island_the_others_continue_without_it(tmp_path: Path) -> None:
    recipe, outer = cli_runs.write_recipe(tmp_path), "local_steps=2 outer=nesterov:0.7:0.9"
    sets = ("run.batch=6", "run.checkpoint_every=2", "run.evaluate_every=0", "run.steps=400")
    words = [word for each in sets for word in ("--set", each)]
    run = tmp_path / "run"
    process = cli_runs.start("train", recipe, "--plan", f"dp=3 {outer}", *words)
    cli_runs.wait_for_step(process, 5)
    os.kill(cli_runs.ranks_of(process.pid)[1], signal.SIGKILL)
    process.communicate(timeout=cli_runs.LIMIT_S)
    before, step = cli_runs.last_state(run), cli_runs.last_step(run)
    words = ["--plan", f"dp=2 {outer}", "--set", f"run.steps={step + 2}"]
    cli_runs.finish(cli_runs.start("train", run, "--resume", *words))
    islands = [
        {key.split("/")[1] for key in of if key.startswith("islands/")}
        for of in (before, cli_runs.last_state(run))
    ]
    assert islands == [{"0", "1", "2"}, {"0", "1"}]
    assert cli_runs.last_step(run) == step + 2
    records = read_metrics(run / "metrics.jsonl")
    assert any(record["step"] == step + 2 and "island_drift" in record for record in records)


@pytest.mark.sweep
@pytest.mark.parametrize("sets", [(), ("run.save_in_background=true",)], ids=["at once", "in the background"])
def test_a_hundred_kills(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """Kill one rank or both, while they start, train and save."""
    found = killed(tmp_path, 100, 2, *sets)
    assert len(found) == 100
    assert sum(each["partial"] > 0 for each in found) > 10, "some were killed while they saved"
    assert {each["killed"] for each in found} == {1, 2}
