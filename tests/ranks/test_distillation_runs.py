"""Runs with a teacher resume exactly, do not depend on the plan, and come nearer to the teacher."""

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
from support.chats import tokenizer
from support.pool import Pool

RECIPE = """
plan = "dp=2 zero=3 micro=2 precision=fp32"
[run]
dir = "{here}/run"
steps = 8
batch = 8
log_every = 4
evaluate_every = 4
checkpoint_every = 4
keep_last = 2
[model]
path = "{here}/student"
pretrained = true
[distillation]
teacher = "{here}/teacher"
weight = 0.9
temperature = 2.0
top_tokens = 8
[data]
dir = "{here}/data"
sources = ["{here}/text/*.txt"]
sequence = 32
validation = 0.2
workers = 0
[tokenizer]
path = "{here}/student"
[optimizer]
lr = 1e-2
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("distillation")
    made = tokenizer(None)
    for name, hidden, seed in (("student", 32, 0), ("teacher", 48, 1), ("larger", 48, 1)):
        config = LlamaConfig(
            vocab_size=len(made) + (name == "larger"), hidden_size=hidden, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
            eos_token_id=made.eos_token_id, bos_token_id=made.bos_token_id, initializer_range=0.3,
        )  # fmt: skip
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(here / name)
        made.save_pretrained(here / name)
    (here / "text").mkdir()
    for number in range(20):
        (here / f"text/{number}.txt").write_text(f"{number} apples and {number + 1} pears. " * 20)
    path = here / "recipe.toml"
    path.write_text(RECIPE.format(here=here))
    return path


def _train(run: Path) -> None:
    train(RunDir(run).read_recipe(), connect())


def run_of(pool: Pool, recipe: Path, *sets: str, **options: Any) -> ResolvedRun:
    run = prepare(recipe, sets=sets, **options)
    pool.run(_train, 2, run.dir.path)
    return run


def losses(run: ResolvedRun, key: str = "loss") -> dict[int, Any]:
    return {record["step"]: record[key] for record in read_metrics(run.dir.metrics) if key in record}


@pytest.fixture(scope="module")
def trained(pool: Pool, recipe: Path) -> ResolvedRun:
    return run_of(pool, recipe)


def test_a_run_comes_nearer_to_its_teacher(trained: ResolvedRun) -> None:
    found = losses(trained)
    assert found[8] < 0.9 * found[1]
    assert set(losses(trained, "validation_loss")) == {0, 4, 8}


def test_a_run_that_resumes_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    start = trained.dir.checkpoints / "step-00000004"
    again = run_of(pool, recipe, f"run.dir={tmp_path / 'again'}", start=start)
    weights, found = (
        open_checkpoint(run.dir.checkpoints / "step-00000008").read() for run in (trained, again)
    )
    assert all(weights[key].equal(found[key]) for key in weights)


def test_plans_agree(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    found = []
    for number, plan in enumerate(("dp=2 zero=3 micro=2", "tp=2 micro=4", "pp=2 micro=2")):
        sets = [f"run.dir={tmp_path}/{number}", "run.steps=2", f"plan={plan} precision=fp64"]
        found.append(losses(run_of(pool, recipe, *sets, "run.evaluate_every=0")))
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("distillation.weight=2", "weight is not valid"),
        ("run.probe=true", "loss of tokens, and a teacher"),
        ("plan=dp=2 servers=1", "loss of tokens, and a teacher"),
    ],
)
def test_a_recipe_with_a_teacher_that_cannot_run_is_refused(recipe: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_recipe(recipe, [change])


def test_a_teacher_of_more_tokens_is_refused(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    larger = f"distillation.teacher={recipe.parent / 'larger'}"
    run = prepare(recipe, sets=[f"run.dir={tmp_path / 'run'}", larger])
    with pytest.raises(Exception, match="other tokens than the student"):
        pool.run(_train, 2, run.dir.path)
