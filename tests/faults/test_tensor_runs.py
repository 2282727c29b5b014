"""`plait train` whose ranks share layers: on a grid, from a grid to one rank, with a probe before it."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from plait.errors import PlanError
from plait.train.metrics import read_metrics
from plait.train.prepare import prepare
from support.cli_runs import STEPS, finish, last_step, start, wait_for_step, write_recipe

GRID = "dp=2 tp=2 zero=3"
SHORT = ("run.steps=2", "run.evaluate_every=0", "sample.tokens=0", "schedule.warmup=0")


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe without dropout, whose masks depend on the plan."""
    path = write_recipe(tmp_path_factory.mktemp("grids"))
    path.write_text(path.read_text().replace("attention_dropout = 0.1", "attention_dropout = 0.0"))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Path:
    """A run on one rank."""
    finish(start("train", recipe, "--plan", "dp=1"))
    return recipe.parent / "run"


def exported(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


@pytest.mark.sweep
def test_a_run_resumed_on_one_rank_ends_like_one_that_was_never_sharded(alone: Path, recipe: Path) -> None:
    run = recipe.parent / "cut"
    process = start("train", recipe, "--plan", GRID, *sets(f"run.dir={run}"))
    wait_for_step(process, 8)
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    assert 8 <= last_step(run) < STEPS
    stopped_at = last_step(run)
    out, _ = finish(start("train", run, "--resume", "--plan", "tp=1"))
    assert f"resumed after step {stopped_at}" in out
    assert "dp=1 on 1 rank" in out
    ours, theirs = exported(run), exported(alone)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert float((ours[name] - weight).abs().max()) <= 1e-5 * float(weight.abs().max()), name
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(run)[-1] < losses(run)[0]


@pytest.mark.sweep  # the rank pool loads every plan's checkpoint on grids
def test_a_run_on_one_rank_goes_on_on_a_grid(alone: Path, recipe: Path) -> None:
    found = []
    for plan in ("tp=2 sp=true", "tp=1"):
        run = recipe.parent / f"then {plan}"
        shutil.copytree(alone, run)
        how = sets(f"run.steps={STEPS + 2}", "sample.tokens=0")
        out, _ = finish(start("train", run, "--resume", "--plan", plan, *how))
        assert f"resumed after step {STEPS}" in out
        found.append(losses(run))
    assert len(found[0]) == STEPS + 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.sweep
def test_a_probe_before_a_run_passes_and_the_run_goes_on(recipe: Path) -> None:
    run = recipe.parent / "probed"
    finish(start("train", recipe, "--plan", "tp=2x1", "--probe", *sets(f"run.dir={run}", *SHORT)))
    assert len(losses(run)) == 2


WRONG = (  # up's features are not those of gate, with which they are multiplied
    'model.tensor_plan={"model.layers.1.mlp.up_proj"="packed_colwise:2"}'
)


def test_a_probe_refuses_a_plan_that_the_model_does_not_fit(recipe: Path) -> None:
    run = recipe.parent / "refused"
    words = ["--plan", "tp=2", *sets(f"run.dir={run}", WRONG, *SHORT)]
    _, err = finish(start("train", recipe, "--probe", *words), 2)
    assert err.count("ModelError: the sharded model computes a different function") == 1
    assert "the gradient of model." in err
    assert not run.exists()


@pytest.mark.sweep
def test_weights_that_a_run_starts_from_are_cut_or_refused_before_a_rank_starts(
    alone: Path, recipe: Path
) -> None:
    run = recipe.parent / "from weights"
    weights = ["model.config=", f"model.path={alone / 'export'}", "model.pretrained=true"]
    how = [f"run.dir={run}", *weights, *SHORT]
    with pytest.raises(
        PlanError, match=r"cannot shard the heads of model\.layers\.0\.self_attn over 4 columns"
    ):
        prepare(recipe, sets=how, plan="tp=4")
    assert not run.exists()
    finish(start("train", recipe, *sets(*how), "--plan", "tp=2"))
    assert losses(run)[0] == pytest.approx(losses(alone)[STEPS - 1], rel=0.1)
