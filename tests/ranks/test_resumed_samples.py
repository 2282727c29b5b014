"""A run that is resumed on another number of ranks equals one that never stopped, whatever its samples."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint import open_checkpoint
from plait.comm import connect
from plait.errors import CheckpointError, ConfigError, DataError, PlanError
from plait.train.metrics import read_metrics
from plait.train.prepare import ResolvedRun, prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.pool import Pool

RECIPE = """
plan = "dp=2 micro=2 precision=fp64"
[run]
dir = "{here}/run"
batch = 4
evaluate_every = 3
checkpoint_every = 3
keep_last = 99
log_every = 1
[model.config]
model_type = "llama"
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 1
[data]
dir = "{here}/data"
sources = ["{here}/a.jsonl", "{here}/b.jsonl"]
sequence = 24
validation = 0.2
workers = 0
[tokenizer]
vocab_size = 280
[optimizer]
lr = 1e-3
"""
DOCUMENTS, BUDGET = "data.samples=documents", "data.tokens_per_micro_batch=60"
CASES = {
    "bins": (["data.samples=bins", "run.steps=6"], "dp=4"),
    "grouped": ([DOCUMENTS, "data.group_by_length=5", "run.steps=6"], "dp=1 micro=2"),
    "budgeted": ([DOCUMENTS, BUDGET, "data.group_by_length=2", "run.epochs=0.5"], "dp=1 micro=4"),
    "mixed": (
        ["data.samples=bins", "data.long_documents=split", "data.weights=[1, 3]", "run.steps=6"],
        "dp=1",
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here, draw = tmp_path_factory.mktemp("resumed"), random.Random(0)
    for name, number in (("a", 150), ("b", 60)):
        texts = [" ".join([name, *draw.choices("abcdefghij", k=draw.randint(0, 18))]) for _ in range(number)]
        (here / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = here / "recipe.toml"
    path.write_text(RECIPE.format(here=here))
    return path


def prepared(recipe: Path, name: str, *sets: str, **options: Any) -> ResolvedRun:
    return prepare(recipe, sets=[f"run.dir={recipe.parent / name}", *sets], **options)


def _train(run: Path) -> None:
    train(RunDir(run).read_recipe(), connect())


def trained(pool: Pool, run: ResolvedRun) -> list[dict[str, Any]]:
    pool.run(_train, run.plan.num_ranks, run.dir.path)
    return list(read_metrics(run.dir.metrics))


def values_of(records: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records if record["step"] > 3 and name in record]


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_on_other_ranks_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, case: str
) -> None:
    sets, plan = CASES[case]
    straight = prepared(recipe, case, *sets)
    expected = trained(pool, straight)
    saved = straight.dir.checkpoints / "step-00000003"
    last = f"step-{straight.recipe.run.steps:08}"
    resumed = prepared(recipe, f"{case}-2", *sets, plan=f"{plan} precision=fp64", start=saved)
    found = trained(pool, resumed)
    assert resumed.recipe.run.steps == straight.recipe.run.steps >= 5
    assert values_of(found, "tokens") == values_of(expected, "tokens")
    assert len(set(values_of(found, "tokens"))) >= 2
    for name in ("loss", "grad_norm", "validation_loss"):
        assert values_of(found, name) == pytest.approx(values_of(expected, name), rel=1e-9), name
    weights, ours = (open_checkpoint(run.dir.checkpoints / last).read() for run in (straight, resumed))
    for key in (key for key in weights if key.startswith("weights/")):
        assert (weights[key] - ours[key]).abs().max() < 1e-9, key
    same = prepared(recipe, f"{case}-3", *sets, start=saved)
    trained(pool, same)
    again = open_checkpoint(same.dir.checkpoints / last).read()
    assert all(weights[key].equal(again[key]) for key in weights), "bit for bit on the same ranks"


def test_an_evaluation_of_full_rows_and_of_micro_batches_is_that_of_all_documents(
    pool: Pool, recipe: Path
) -> None:
    """Each document once, though rows, micro-batches and documents fill other numbers of batches."""
    kinds = {"rows": ["data.samples=bins"], "budget": [DOCUMENTS, BUDGET], "alone": [DOCUMENTS]}
    shared = ["run.steps=1", "run.evaluate_batches=99"]
    found = {}
    for kind, sets in kinds.items():
        more = (
            ["run.evaluate_batches=1", "run.batch=28", "plan='dp=2 precision=fp64'"]
            if kind == "alone"
            else []
        )
        run = prepared(recipe, f"evaluated-{kind}", *sets, *shared, *more)
        if kind == "alone":
            assert len(run.validation_samples[0]) == run.recipe.run.batch, "one batch of all documents"
        found[kind] = next(r["validation_loss"] for r in trained(pool, run) if "validation_loss" in r)
    assert found["rows"] == pytest.approx(found["alone"], rel=1e-9)
    assert found["budget"] == pytest.approx(found["alone"], rel=1e-9)


@pytest.mark.parametrize(
    ("error", "sets", "text"),
    [
        (ConfigError, [DOCUMENTS, "data.tokens_per_micro_batch=20"], "does not fit into a micro-batch"),
        (ConfigError, [BUDGET], "data.tokens_per_micro_batch has no effect"),
        (ConfigError, ["data.long_documents=split"], "data.long_documents has no effect"),
        (ConfigError, ["run.early_stopping=1", "run.evaluate_every=0"], "early_stopping needs a validation"),
        (ConfigError, ["data.weights=[1]"], "each source needs a weight"),
        (ConfigError, ["run.epochs=2"], "both run.steps and run.epochs"),
        (ConfigError, [DOCUMENTS, BUDGET, "batch_ramp={start=2, step=2, tokens=99}"], "a budget of tokens"),
        (PlanError, [DOCUMENTS, BUDGET, "run.batch=8"], "micro-batches of a step are not those of the plan"),
        (DataError, ["data.sequence=1000", "data.weights=[1, 1]", "run.batch=1", "plan=dp=1"], "no training"),
    ],
)
def test_options_without_effect_and_budgets_that_do_not_fit_are_refused(
    recipe: Path, error: type[Exception], sets: list[str], text: str
) -> None:
    with pytest.raises(error, match=text):
        prepared(recipe, "refused", "run.steps=3", *sets)


def test_a_checkpoint_of_other_samples_is_refused(pool: Pool, recipe: Path) -> None:
    sets = ["run.steps=1", "run.evaluate_every=0"]
    first = prepared(recipe, "first", "data.samples=bins", *sets)
    trained(pool, first)
    saved = first.dir.checkpoints / "step-00000001"
    for change in ("data.long_documents=split", "data.weights=[1, 2]"):
        with pytest.raises(CheckpointError, match="another order of samples"):
            prepared(recipe, "second", "data.samples=bins", change, *sets, start=saved)


def test_a_run_stops_early_on_all_ranks_and_goes_on_with_more_patience(pool: Pool, recipe: Path) -> None:
    """A learning rate of 9 makes every validation loss worse than the first."""
    sets = ["data.samples=bins", "run.steps=9", "run.evaluate_every=1", "run.checkpoint_every=2"]
    run = prepared(recipe, "early", "run.early_stopping=3", "optimizer.lr=9.0", "schedule.warmup=0", *sets)
    assert max(record["step"] for record in trained(pool, run)) == 3
    assert open_checkpoint(run.dir.checkpoints / "step-00000003").facts["best_score"][1] == 3
    again = prepare(run.dir.path, resume=True)
    assert max(record["step"] for record in trained(pool, again)) == 3, "it stays stopped"
    longer = prepare(run.dir.path, sets=["run.early_stopping=5"], resume=True)
    assert max(record["step"] for record in trained(pool, longer)) == 5
