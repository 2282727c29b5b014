"""The recipes that we ship: each runs, in its smallest form; options of batches and samples, end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import open_checkpoint
from plait.plan import Plan
from plait.plan.devices import device
from plait.train.config import check_batches, read_recipe
from plait.train.explain_recipe import cluster_from_recipe, explain_recipe
from plait.train.metrics import read_metrics
from support.cli_runs import ROOT, finish, start

FOR_GPUS = ("llama-8b-8gpu",)
OF_MODELS = ("dpo", "lora", "qlora", "sft")  # they begin with a trained model: docs/recipes.md runs them
RECIPES = sorted({path.stem for path in (ROOT / "recipes").glob("*.toml")} - {*FOR_GPUS, *OF_MODELS})


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 1,200 documents of unequal length."""
    folder = tmp_path_factory.mktemp("recipes")
    rows = [{"text": f"Ship {n}" + " sails many miles" * (n % 17)} for n in range(1200)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(name: str, run: Path, *words: str, **changes: Any) -> tuple[Path, str]:
    """Run a recipe of ours on little text, with these keys changed."""
    here = run.parent
    keys = {"run.dir": run, "run.evaluate_batches": 1, "data.dir": here / f"data-{name}", "sample.tokens": 1}
    keys |= {"data.sources": f'["{here / "text.jsonl"}"]', "data.validation": 0.3}
    sets = [f"{key}={value}" for key, value in (keys | changes).items()]
    options = [word for assignment in sets for word in ("--set", assignment)]
    out, _ = finish(start("train", ROOT / "recipes" / f"{name}.toml", *options, *words))
    return run, out


def records(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_for_gpus_fits_them_and_divides_its_batch(name: str) -> None:
    recipe = read_recipe(ROOT / "recipes" / f"{name}.toml")
    plan = Plan.parse(recipe.plan)
    check_batches(recipe, plan)
    h100 = device("h100")
    explanation = explain_recipe(recipe, cluster_from_recipe(recipe, 8, h100))
    assert explanation.num_parameters > 8e9
    assert 0.5 < explanation.fullest().memory.total / h100.memory_bytes < 0.9, "fits, with a reserve"
    assert recipe.data.sequence == recipe.model.config["max_position_embeddings"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_in_its_smallest_form(here: Path, name: str) -> None:
    small = {"run.steps": 2, "run.batch": 4, "schedule.warmup": 1, "model.config.num_hidden_layers": 1}
    small |= {"schedule.decay": 1, "batch_ramp.start": 2, "batch_ramp.step": 2} if name == "pretrain" else {}
    small |= {"run.batch": 2, "data.sequence": 256} if name == "long" else {}
    run, out = train(name, here / f"small-{name}", **small)
    assert (run / "export" / "config.json").is_file()
    assert "perplexity" in out
    assert [record["step"] for record in records(run)] == [1, 2]
    if name == "documents":
        assert {record["loss_scale"] for record in records(run)} == {1024.0}


@pytest.mark.parametrize(
    ("name", "plans", "changes"),
    [
        ("pretrain", ("dp=2", "dp=1 micro=2"), {"batch_ramp.tokens": 6144}),
        ("documents", ("dp=2 micro=2 precision=fp32", "dp=4 precision=fp32"), {"loss_scale": ""}),
        ("long", ("cp=2", "dp=2 micro=2"), {"data.sequence": 128, "run.batch": 8}),
    ],
)
def test_a_run_resumed_under_another_plan_has_the_same_samples_in_the_same_batches(
    here: Path, name: str, plans: tuple[str, str], changes: dict[str, Any]
) -> None:
    """Over a ramp, over documents in groups of similar length, and over packed ones."""
    changes |= {"run.steps": 8, "schedule.warmup": 0, "run.checkpoint_every": 4, "run.log_every": 1}
    if name == "pretrain":
        changes |= {"schedule.decay": 2, "optimizer.groups": '[{match="*.mlp.*", lr=0.0}]'}
    straight, _ = train(name, here / f"straight-{name}", "--plan", plans[0], **changes)
    saved = straight / "checkpoints" / "step-00000004"
    resumed, _ = train(name, here / f"resumed-{name}", "--plan", plans[1], "--from", str(saved), **changes)
    expected, found = records(straight), records(resumed)
    assert [record["step"] for record in found] == [5, 6, 7, 8]
    for ours, theirs in zip(found, expected[4:], strict=True):
        assert (ours["batch"], ours["tokens"]) == (theirs["batch"], theirs["tokens"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    batches = [record["batch"] for record in expected]
    assert batches == ([4, 4, 4, 4, 8, 8, 12, 12] if name == "pretrain" else [8] * 8)
    if name == "pretrain":  # a group whose learning rate is zero, at whatever factor
        before, after = (open_checkpoint(path).read() for path in (saved, saved.with_name("step-00000008")))
        weights = [key for key in before if key.startswith("weights/")]
        fixed = {key for key in weights if torch.equal(before[key], after[key])}
        assert fixed == {key for key in weights if ".mlp." in key}
    else:
        lengths = [
            one["tokens"] - other["tokens"] for one, other in zip(expected[1:], expected, strict=False)
        ]
        assert len(set(lengths)) > 1, "documents of unequal length"
