"""A fine-tuned model answers as its conversations do, also in transformers, and its run resumes exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from plait.checkpoint import open_checkpoint
from plait.comm import connect
from plait.errors import CheckpointError
from plait.train.export import export
from plait.train.metrics import read_metrics
from plait.train.prepare import ResolvedRun, prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.chats import answer, tokenizer, user
from support.cli_runs import ROOT
from support.pool import Pool, RankError

RECIPE = """
plan = "dp=2 precision=fp32"
task = "sft"
[run]
dir = "{here}/run"
steps = 80
batch = 2
evaluate_every = 40
checkpoint_every = 40
keep_last = 2
[model]
path = "{here}/model"
[data]
dir = "{here}/data"
sources = ["{here}/a.jsonl", "{here}/b.jsonl"]
weights = [1, 3]
sequence = 96
validation = 0.2
workers = 0
[tokenizer]
chat_template = "{chat}"
[optimizer]
lr = 1e-2
"""
ANSWER = "it is four"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and its model, whose tokenizer has no chat template."""
    here = tmp_path_factory.mktemp("sft")
    made = tokenizer(None)
    made.save_pretrained(here / "model")
    config = LlamaConfig(
        vocab_size=len(made), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=96, eos_token_id=made.eos_token_id,
        bos_token_id=made.bos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(here / "model")
    for name in "ab":
        rows = [{"messages": [user(f"{name}{number}?"), answer(ANSWER)]} for number in range(60)]
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = here / "recipe.toml"
    path.write_text(RECIPE.format(here=here, chat=ROOT / "recipes/chat.jinja"))
    return path


def _train(run: Path) -> None:
    train(RunDir(run).read_recipe(), connect())


@pytest.fixture(scope="module")
def trained(pool: Pool, recipe: Path) -> ResolvedRun:
    run = prepare(recipe)
    pool.run(_train, 2, run.dir.path)
    return run


def test_a_fine_tuned_model_answers_in_transformers_and_stops(trained: ResolvedRun, tmp_path: Path) -> None:
    losses = [r["validation_loss"] for r in read_metrics(trained.dir.metrics) if "validation_loss" in r]
    assert losses[-1] < losses[0] / 10
    export(trained.dir, tmp_path / "out")
    made: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = made.apply_chat_template(
        [user("b99?")], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**words, max_new_tokens=20, do_sample=False)
    assert made.decode(found[0, words["input_ids"].shape[1] :]) == ANSWER + made.eos_token


def test_a_fine_tuning_that_resumes_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    saved = trained.dir.checkpoints / "step-00000040"
    again = prepare(recipe, sets=[f"run.dir={tmp_path / 'again'}"], start=saved)
    pool.run(_train, 2, again.dir.path)
    weights, found = (
        open_checkpoint(run.dir.checkpoints / "step-00000080").read() for run in (trained, again)
    )
    assert all(weights[key].equal(found[key]) for key in weights)


def test_a_run_without_the_weights_to_begin_with_names_the_command(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="make demo"):
        prepare(ROOT / "recipes/sft.toml", sets=[f"model.path={tmp_path}/none/export"])


def test_steps_that_train_nothing_end_the_run_with_that_reason(
    pool: Pool, recipe: Path, tmp_path: Path
) -> None:
    rows = [{"messages": [user("b " * (200 * (number > 2))), answer(ANSWER)]} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ["data.weights=", "data.samples=documents", "run.max_skipped=3", "data.validation=0.0"]
    sets += [
        f"run.dir={tmp_path}/run",
        f"data.dir={tmp_path}/data",
        f'data.sources=["{tmp_path}/rows.jsonl"]',
    ]
    run = prepare(recipe, sets=[*sets, "run.evaluate_every=0"])
    with pytest.raises(RankError, match="3 steps in a row were skipped, and the last one had no target"):
        pool.run(_train, 2, run.dir.path)
