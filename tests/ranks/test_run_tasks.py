"""Tasks of a recipe are scored during the run, which trains as without them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from plait.comm import connect
from plait.errors import ConfigError, DataError
from plait.train.evaluate import EvaluationRequest, evaluate
from plait.train.metrics import read_metrics
from plait.train.prepare import ResolvedRun, prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.pool import Pool
from support.task_rows import ROWS

RECIPE = """
plan = "dp=2 zero=1"
[run]
dir = "{here}/run"
steps = 4
batch = 4
evaluate_every = 0
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 128
attention_dropout = 0.1
[data]
dir = "{here}/data"
sources = ["{here}/text.txt"]
sequence = 16
validation = 0
[tokenizer]
vocab_size = 280
[optimizer]
lr = 1e-2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["ship", "harbour", "sails", "miles", "red"], k=2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    for form, rows in ROWS.items():
        (tmp_path / f"{form}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(here=tmp_path))
    return path


def _train(run: Path) -> None:
    train(RunDir(run).read_recipe(), connect())


def _evaluate(run: str, tasks: list[str]) -> Any:
    return evaluate(EvaluationRequest(run, None, "dp=2", tasks=tasks), connect()).to_values()["tasks"]


def run_of(pool: Pool, recipe: Path, name: str, *sets: str) -> ResolvedRun:
    run = prepare(recipe, sets=[f"run.dir={recipe.parent / name}", *sets])
    pool.run(_train, 2, run.dir.path)
    return run


def records(run: ResolvedRun, key: str) -> dict[int, Any]:
    return {record["step"]: record[key] for record in read_metrics(run.dir.metrics) if key in record}


def test_a_run_records_the_scores_of_tasks_and_trains_as_without_them(pool: Pool, recipe: Path) -> None:
    tasks = [f"{form}={recipe.parent}/{form}.jsonl" for form in ("arc", "lambada", "gsm8k")]
    plain = run_of(pool, recipe, "plain")
    scored = run_of(pool, recipe, "scored", f"eval.tasks={json.dumps(tasks)}", "eval.every=2")
    assert records(scored, "loss") == records(plain, "loss")
    assert list(records(scored, "tasks")) == [2, 4]
    last = records(scored, "tasks")[4]
    assert last.keys() == {"arc/arc", "lambada/lambada", "gsm8k/gsm8k"}
    assert pool.run(_evaluate, 2, str(scored.dir.path), tasks)[0] == last


def test_a_run_has_absolute_paths_of_its_tasks(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it resumes in another directory than it began in."""
    monkeypatch.chdir(tmp_path)
    run = prepare(recipe, sets=['eval.tasks=["arc=arc.jsonl,arc.jsonl"]', "eval.shots=1"])
    file = tmp_path / "arc.jsonl"
    assert run.recipe.eval.tasks == (f"arc={file},{file}",)


def test_a_task_that_cannot_be_read_is_an_error_before_the_ranks_start(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="a task is a format and a file"):
        prepare(recipe, sets=['eval.tasks=["ark=rows.jsonl"]'])
    with pytest.raises(DataError, match="none of the task 'arc'"):
        prepare(recipe, sets=[f'eval.tasks=["arc={recipe.parent}/piqa.jsonl"]'])
