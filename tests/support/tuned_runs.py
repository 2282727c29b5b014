"""Runs of a small Llama on two ranks of the pool, which recipes of pairs, answers and teachers describe."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plait.checkpoint import open_checkpoint
from plait.comm import connect
from plait.train.metrics import read_metrics
from plait.train.prepare import ResolvedRun, prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.chats import tokenizer
from support.cli_runs import ROOT
from support.pool import Pool

RECIPE = """
plan = "dp=2 zero=3 micro=2 precision=fp32"
task = "{task}"
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
sources = ["{here}/rows.jsonl"]
sequence = 64
validation = 0.1
workers = 0
[tokenizer]
chat_template = "{chat}"
[optimizer]
lr = {lr}
{more}
"""


def save_model(folder: Path, *, seed: int = 0, more_tokens: int = 0, **options: Any) -> None:
    """Save a model and its tokenizer, with so many tokens more than that has."""
    made = tokenizer(None)
    made.save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, **options}
    ends = {"eos_token_id": made.eos_token_id, "bos_token_id": made.bos_token_id}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(made) + more_tokens, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)


def recipe_of(
    folder: Path, task: str, rows: Iterable[Mapping[str, Any]], *, lr: float = 1e-2, more: str = ""
) -> Path:
    """Write a model, rows and a recipe that trains the one on the others; `more`: its last lines."""
    save_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.toml"
    chat = ROOT / "recipes/chat.jinja"
    path.write_text(RECIPE.format(here=folder, task=task, chat=chat, lr=lr, more=more))
    return path


def _train(run: Path) -> None:
    train(RunDir(run).read_recipe(), connect())


def run_of(pool: Pool, recipe: Path, *sets: str, **options: Any) -> ResolvedRun:
    """Run a recipe."""
    run = prepare(recipe, sets=sets, **options)
    pool.run(_train, 2, run.dir.path)
    return run


def records(run: ResolvedRun, key: str = "loss") -> dict[int, Any]:
    """Return a metric, by step."""
    return {record["step"]: record[key] for record in read_metrics(run.dir.metrics) if key in record}


def check_resumed(pool: Pool, recipe: Path, trained: ResolvedRun, folder: Path) -> None:
    """Resume a run from its first checkpoint in another folder, and compare the last one's weights."""
    first, last = sorted(trained.dir.checkpoints.glob("step-*"))
    again = run_of(pool, recipe, f"run.dir={folder}", start=first)
    weights, found = (open_checkpoint(path).read() for path in (last, again.dir.checkpoints / last.name))
    assert all(weights[key].equal(found[key]) for key in weights)


def check_plans(pool: Pool, recipe: Path, folder: Path, *plans: str) -> None:
    """Compare the losses of three steps under these plans, in float64."""
    found = []
    for number, plan in enumerate(plans):
        sets = (f"run.dir={folder}/{number}", "run.steps=3", f"plan={plan} precision=fp64")
        found.append(records(run_of(pool, recipe, *sets, "run.evaluate_every=0")))
    assert len(found[0]) == 3
    assert all(each == pytest.approx(found[0], rel=1e-9) for each in found)
