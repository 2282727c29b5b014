"""Seeded bad input of every kind is an error of four parts, or succeeds, in bounded time and memory."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import fuzz, warm
from support.cli_runs import environment, finish, write_recipe
from support.fuzz_cases import GENERATORS

CHANGES = {
    "dp=2 micro=2": "dp=1 micro=2",
    "steps = 24": "steps = 6",
    "checkpoint_every = 6": "checkpoint_every = 3",
    "tokens = 8": "tokens = 0",
    "num_hidden_layers = 2": "num_hidden_layers = 1",
}
NUM_CASES, NUM_IN_SWEEP = 15, 415  # of each kind
LIMIT_S = 1500.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short finished run."""
    base = tmp_path_factory.mktemp("fuzz") / "base"
    base.mkdir()
    recipe = write_recipe(base)
    text = recipe.read_text().replace(f"{base}/", "")  # so that a copy of the folder is of the same data
    for before, after in CHANGES.items():
        assert before in text
        text = text.replace(before, after)
    recipe.write_text(text)
    finish(
        warm.Popen(["train", "recipe.toml"], env=environment(), cwd=base, stderr=subprocess.PIPE, text=True)
    )
    return base


def start_cases(kind: str, first: int, last: int, base: Path) -> tuple[Any, Path]:
    out = base.parent / f"{kind}-{first}.out"
    words = [kind, str(first), str(last), str(base), str(out)]
    return warm.Popen(
        words, env=environment(), script=Path(fuzz.__file__), stderr=subprocess.PIPE, text=True
    ), out


def check(process: Any, out: Path, num_cases: int) -> None:
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    results = [fuzz.Result(**json.loads(line)) for line in out.read_text().splitlines()]
    assert len(results) == num_cases
    slowest, largest = max(each.seconds for each in results), max(each.peak_bytes for each in results)
    succeeded = sum(each.code == 0 for each in results)
    print(f"{len(results)} cases, {succeeded} succeed; up to {slowest:.1f} s and {largest >> 20} MiB")
    broken = [f"{each.kind} {each.number}: {each.problem}" for each in results if each.problem]
    assert not broken, f"{len(broken)} cases:\n" + "\n\n".join(broken)


@pytest.fixture(scope="module")
def started(base: Path) -> dict[str, tuple[Any, Path]]:
    """All kinds at the same time."""
    return {kind: start_cases(kind, 0, NUM_CASES, base) for kind in GENERATORS}


@pytest.mark.parametrize("kind", GENERATORS)
def test_bad_input_is_an_error_of_four_parts_in_bounded_time_and_memory(
    started: dict[str, tuple[Any, Path]], kind: str
) -> None:
    check(*started[kind], NUM_CASES)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", GENERATORS)
def test_much_bad_input_is_an_error_of_four_parts_in_bounded_time_and_memory(base: Path, kind: str) -> None:
    check(*start_cases(kind, NUM_CASES, NUM_CASES + NUM_IN_SWEEP, base), NUM_IN_SWEEP)
