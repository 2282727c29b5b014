"""Runs with a teacher resume exactly, do not depend on the plan, and come nearer to the teacher."""

import json
from pathlib import Path

import pytest
import torch

from plait import parallelize
from plait.comm import connect
from plait.errors import ConfigError
from plait.models import causal_lm_on_meta
from plait.train.config import read_recipe
from plait.train.explain_recipe import cluster_from_recipe, explain_recipe
from plait.train.preferences import teacher_engine
from plait.train.prepare import ResolvedRun, prepare
from plait.train.run_dir import RunDir
from support.pool import Pool, RankError
from support.tuned_runs import check_plans, check_resumed, records, run_of, save_model

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
    save_model(here / "student", initializer_range=0.3)
    for name, more in (("teacher", 0), ("larger", 1)):
        save_model(here / name, seed=1, more_tokens=more, hidden_size=48, initializer_range=0.3)
    (here / "text").mkdir()
    for number in range(20):
        (here / f"text/{number}.txt").write_text(f"{number} apples and {number + 1} pears. " * 20)
    path = here / "recipe.toml"
    path.write_text(RECIPE.format(here=here))
    return path


@pytest.fixture(scope="module")
def trained(pool: Pool, recipe: Path) -> ResolvedRun:
    return run_of(pool, recipe)


def test_a_run_comes_nearer_to_its_teacher(trained: ResolvedRun) -> None:
    found = records(trained)
    assert found[8] < 0.9 * found[1]
    assert set(records(trained, "validation_loss")) == {0, 4, 8}


def test_a_run_that_resumes_equals_one_that_never_stopped(
    pool: Pool, recipe: Path, trained: ResolvedRun, tmp_path: Path
) -> None:
    check_resumed(pool, recipe, trained, tmp_path / "again")


def test_plans_agree(pool: Pool, recipe: Path, tmp_path: Path) -> None:
    check_plans(pool, recipe, tmp_path, "dp=2 zero=3 micro=2", "tp=2 micro=4", "pp=2 micro=2")


def test_a_student_that_starts_from_scratch_has_a_teacher_of_another_shape(
    pool: Pool, recipe: Path, tmp_path: Path
) -> None:
    config = json.loads((recipe.parent / "student/config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    lines = [f"{key} = {config[key]}" for key in kept]
    text = (
        recipe.read_text()
        .replace("pretrained = true\n", "")
        .replace(f'path = "{recipe.parent}/student"\n', "", 1)
    )
    scratch = tmp_path / "recipe.toml"
    scratch.write_text(text + "\n".join(["[model.config]", 'model_type = "llama"', *lines]))
    assert len(records(run_of(pool, scratch, f"run.dir={tmp_path}/run", "run.steps=1"))) == 1


def _teacher(run: Path) -> tuple[int, float]:
    """Heads and base of the rotary embedding in the teacher's model."""
    world = connect()
    resolved = ResolvedRun.open(RunDir(run).read_recipe(), world.size)
    config = teacher_engine(resolved, resolved.build_engine(world), world).model.config
    return config.num_attention_heads, config.rope_parameters["rope_theta"]


def test_a_teacher_of_the_same_shapes_has_its_own_configuration(
    pool: Pool, recipe: Path, tmp_path: Path
) -> None:
    save_model(
        tmp_path / "teacher",
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 123.0},
    )
    sets = (f"run.dir={tmp_path}/run", f"distillation.teacher={tmp_path}/teacher", "run.steps=1")
    run = prepare(recipe, sets=sets)
    assert pool.run(_teacher, 2, run.dir.path) == [(2, 123.0)] * 2


def _frozen_bytes(folder: Path, plan: str) -> int:
    model = causal_lm_on_meta(json.loads((folder / "config.json").read_text())).requires_grad_(False)
    return parallelize(model, plan, optimizer=torch.optim.SGD, weights=folder).memory().total


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "tp=2"])
def test_explain_counts_the_teacher(pool: Pool, recipe: Path, plan: str) -> None:
    given = read_recipe(recipe, [f"plan={plan} precision=fp32 micro=2"])
    cluster = cluster_from_recipe(given, None, None)
    found = explain_recipe(given, cluster).of_rank(0)
    measured = pool.run(_frozen_bytes, 2, recipe.parent / "teacher", f"{plan} precision=fp32")[0]
    assert found.memory.frozen == measured > 0
    assert (
        found.memory.total == explain_recipe(given, cluster, is_saved=True).of_rank(0).memory.total + measured
    )


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
    with pytest.raises(RankError, match="other tokens than the student"):
        run_of(pool, recipe, f"run.dir={tmp_path / 'run'}", larger)
