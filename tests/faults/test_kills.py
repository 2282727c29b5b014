"""Ranks that are killed at any instant lose no more than the steps since the last save, and nothing of that
is wrong.

`kill_ranks.py` checks the state of the run after every kill.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import cli_runs
from support.cli_runs import ROOT

KILL_RANKS = Path(__file__).parents[1] / "support" / "kill_ranks.py"
PREPARE = """
import sys
from pathlib import Path
from plait.train.prepare import prepare

prepare(Path(sys.argv[1]), sets=sys.argv[2:])
"""


def prepared(here: Path, *sets: str) -> Path:
    """A run that has not started, and the undisturbed one to compare it with."""
    recipe = cli_runs.write_recipe(here)
    common = [
        word for each in (*sets, "run.checkpoint_every=1", "run.evaluate_every=0") for word in ("--set", each)
    ]
    keep = ["--set", "run.keep_last=1000", "--set", f"run.dir={here}/whole"]
    cli_runs.finish(cli_runs.start("train", recipe, *common, *keep))
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(recipe), *common[1::2]], env=cli_runs.environment(), check=False
    )
    assert done.returncode == 0
    return here / "run"


def killed(here: Path, kills: int, seed: int, *sets: str) -> list[dict[str, Any]]:
    run = prepared(here, *sets)
    words = [
        str(KILL_RANKS),
        str(run),
        str(here / "whole" / "checkpoints"),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(
        [sys.executable, *words],
        env=cli_runs.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    return [each for each in found if each["killed"]]


def test_a_rank_killed_at_any_instant_costs_the_steps_since_the_last_save_alone(tmp_path: Path) -> None:
    assert len(killed(tmp_path, 3, 1, "run.save_in_background=true")) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("sets", [(), ("run.save_in_background=true",)], ids=["at once", "in the background"])
def test_a_hundred_kills(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """Kill one rank or both, while they start, train and save."""
    found = killed(tmp_path, 100, 2, *sets)
    assert len(found) == 100
    assert sum(each["partial"] > 0 for each in found) > 10, "some were killed while they saved"
    assert {each["killed"] for each in found} == {1, 2}
