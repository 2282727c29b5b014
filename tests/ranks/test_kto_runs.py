"""Runs of single answers learn which are good, resume exactly, and do not depend on the plan."""

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.train.config import read_recipe
from plait.train.prepare import ResolvedRun
from support.chats import answer, user
from support.pool import Pool
from support.tuned_runs import check_plans, check_resumed, recipe_of, records, run_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"prompt": [user(f"{n}?")], "completion": [answer("yes" if n % 3 else "no")], "label": bool(n % 3)}
        for n in range(90)
    ]
    return recipe_of(tmp_path_factory.mktemp("answers"), "kto", rows)


@pytest.fixture(scope="module")
def trained(pool: Pool, recipe: Path) -> ResolvedRun:
    return run_of(pool, recipe)


def test_a_run_learns_which_answers_are_good(trained: ResolvedRun) -> None:
    losses = records(trained)
    assert losses[1] == 0.5, "1 - sigmoid(0), as the reference is the same model"
    assert losses[20] < 0.45
    assert records(trained, "reward_margin")[20] > 0.1
    assert records(trained, "batch")[1] == 8


def test_a_run_that_resumes_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    check_resumed(pool, recipe, trained, tmp_path / "again")


def test_plans_agree(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    check_plans(pool, recipe, tmp_path, "dp=2 zero=3 micro=2", "tp=2 micro=4", "pp=2 micro=2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.kind=preference", "rows of answers"),
        ("preference.loss=sigmoid", "need each other"),
        ("preference.reference=precomputed", "no precomputed reference"),
        ("preference.sft_weight=1", "sft_weight is not valid"),
        ("data.samples=bins", "both rows in one micro-batch"),
    ],
)
def test_a_recipe_of_answers_that_cannot_run_is_refused(recipe: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_recipe(recipe, [change])
