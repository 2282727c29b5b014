"""A run's directory outlives a power cut from the moment that a rank may write into it."""

import os
import random
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.train.run import RunDir, prepare

RECIPE = """
plan = "dp=1"
[run]
dir = "{here}/run"
steps = 1
batch = 1
evaluate_every = 0
[model.config]
model_type = "llama"
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 1
[data]
dir = "{here}/data"
sources = ["{here}/text.txt"]
sequence = 8
validation = 0
[tokenizer]
vocab_size = 260
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["ship", "harbour", "sails", "wind"], k=200)
    (tmp_path / "text.txt").write_text(" ".join(words))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(here=tmp_path))
    return path


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is synced to the disk, from now on."""
    names: list[str] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        names.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return names


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_new_run_is_on_disk_with_its_name(recipe: Path, synced: list[str]) -> None:
    prepare(recipe)
    of_the_run = synced[max(place for place, name in enumerate(synced) if name == "data") + 1 :]
    made = recipe.parent / "run"
    for path in (made / "tokenizer").iterdir():
        assert path.name in of_the_run
    assert "tokenizer" in of_the_run
    assert any(name.startswith(".recipe.json") for name in of_the_run)
    assert of_the_run[-2].startswith("run.tmp-"), "all that is in it, before it gets its name"
    assert of_the_run[-1] == recipe.parent.name, "the name"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_changed_recipe_is_on_disk_before_the_run_goes_on(recipe: Path, synced: list[str]) -> None:
    prepare(recipe)
    synced.clear()
    prepare(recipe, sets=["optimizer.lr=2e-3"], resume=True)
    assert synced[0].startswith(".recipe.json")
    assert synced[1] == "run"
    assert not [path for path in (recipe.parent / "run").iterdir() if "tmp" in path.name]


def test_a_folder_to_offload_to_is_found_again_from_elsewhere(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    with pytest.raises(ConfigError, match="cannot be used"):
        prepare(recipe, sets=["run.offload_dir=fast"], plan="dp=1 offload=disk")
    (recipe.parent / "fast").mkdir()
    prepare(recipe, sets=["run.offload_dir=fast"], plan="dp=1 offload=disk")
    assert list((recipe.parent / "fast").iterdir()) == []
    saved = RunDir(recipe.parent / "run").read_recipe()
    assert saved.run.offload_dir == recipe.parent / "fast"
    # the recipe as it was and the run agree, also from another directory
    monkeypatch.chdir("/")
    prepare(recipe.parent / "run", resume=True)


def test_a_run_goes_on_under_a_plan_that_has_no_use_for_its_settings(recipe: Path) -> None:
    words = [f"run.offload_dir={recipe.parent}", "loss_scale.initial=1024"]
    prepare(recipe, sets=words, plan="dp=1 offload=disk precision=fp16")
    run = recipe.parent / "run"
    with pytest.raises(ConfigError, match="a loss scale is for fp16") as caught:
        prepare(run, plan="dp=1 precision=bf16", resume=True)
    assert "--set loss_scale= " in str(caught.value.hint)
    changed = prepare(run, plan="dp=1 precision=bf16", sets=["loss_scale="], resume=True)
    assert changed.run.offload_dir == recipe.parent
