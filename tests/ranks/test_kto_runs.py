"""Runs of single answers learn which are good, resume exactly, and do not depend on the plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plait.checkpoint import open_checkpoint
from plait.comm import connect
from plait.errors import ConfigError
from plait.train.config import read_recipe
from plait.train.metrics import read_metrics
from plait.train.prepare import ResolvedRun, prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.chats import answer, tokenizer, user
from support.cli_runs import ROOT
from support.pool import Pool

RECIPE = """
plan = "dp=2 zero=3 micro=2 precision=fp32"
task = "kto"
[run]
dir = "{here}/run"
steps = 20
batch = 8
log_every = 5
evaluate_every = 10
checkpoint_every = 10
keep_last = 2
[model]
path = "{here}/model"
[data]
dir = "{here}/data"
sources = ["{here}/answers.jsonl"]
sequence = 64
validation = 0.1
workers = 0
[tokenizer]
chat_template = "{chat}"
[optimizer]
lr = 1e-2
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("answers")
    made = tokenizer(None)
    made.save_pretrained(here / "model")
    config = LlamaConfig(
        vocab_size=len(made), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, eos_token_id=made.eos_token_id,
        bos_token_id=made.bos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(here / "model")
    rows = [
        {"prompt": [user(f"{n}?")], "completion": [answer("yes" if n % 3 else "no")], "label": bool(n % 3)}
        for n in range(90)
    ]
    (here / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = here / "recipe.toml"
    path.write_text(RECIPE.format(here=here, chat=ROOT / "recipes/chat.jinja"))
    return path


def _train(run: Path) -> None:
    train(RunDir(run).read_recipe(), connect())


def run_of(pool: Pool, recipe: Path, *sets: str, **options: Any) -> ResolvedRun:
    run = prepare(recipe, sets=sets, **options)
    pool.run(_train, 2, run.dir.path)
    return run


def records(run: ResolvedRun, key: str = "loss") -> dict[int, Any]:
    return {record["step"]: record[key] for record in read_metrics(run.dir.metrics) if key in record}


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
    start = trained.dir.checkpoints / "step-00000010"
    again = run_of(pool, recipe, f"run.dir={tmp_path / 'again'}", start=start)
    weights, found = (
        open_checkpoint(run.dir.checkpoints / "step-00000020").read() for run in (trained, again)
    )
    assert all(weights[key].equal(found[key]) for key in weights)


def test_plans_agree(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    found = []
    for number, plan in enumerate(("dp=2 zero=3 micro=2", "tp=2 micro=4", "pp=2 micro=2")):
        sets = [f"run.dir={tmp_path}/{number}", "run.steps=3", f"plan={plan} precision=fp64"]
        found.append(records(run_of(pool, recipe, *sets, "run.evaluate_every=0")))
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)


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
