"""A run's directory outlives a power cut from the moment that a rank may write into it."""

import json
import os
import random
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.comm import World
from plait.errors import ConfigError, PlanError, RunError
from plait.train.metrics import read_metrics
from plait.train.prepare import discard_unused, prepare
from plait.train.run_dir import RunDir, is_later_attempt
from plait.train.trainer import train
from support import checkpoints

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


def test_a_changed_bit_of_a_runs_recipe_is_found_or_changes_nothing(recipe: Path) -> None:
    run = prepare(recipe).dir
    values, content, chance = run.read_recipe(), run.recipe.read_bytes(), random.Random(3)
    hints = set()
    for place in chance.sample(range(len(content)), 300):
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        run.recipe.write_bytes(changed)
        try:
            assert run.read_recipe() == values, "1E-05 is 1e-05"
        except RunError as error:
            hints.add(error.hint)
    assert len(hints) == 1
    assert "--resume --set KEY=VALUE" in str(hints.pop())


def test_a_recipe_that_was_edited_stops_a_resume_and_set_does_not(recipe: Path) -> None:
    run = prepare(recipe).dir
    text = run.recipe.read_text()
    for edit in (("0.001", "0.003"), ('"steps": 1', '"steps": 1, "steps": 1'), ('"sha256"', '"sha512"')):
        assert edit[0] in text
        run.recipe.write_text(text.replace(*edit))
        for source in (run.path, recipe):
            with pytest.raises(RunError, match="recipe is damaged, or was edited"):
                prepare(source, resume=True)
        with pytest.raises((RunError, ConfigError), match=r"is damaged|is repeated"):
            prepare(run.recipe, sets=[f"run.dir={run.path}-2"])
    run.recipe.write_text(text)
    assert prepare(run.path, sets=["optimizer.lr=0.003"], resume=True).recipe.optimizer.lr == 0.003
    assert prepare(run.path, resume=True).recipe.optimizer.lr == 0.003
    again = prepare(run.recipe, sets=[f"run.dir={run.path}-2"])
    assert again.recipe.optimizer.lr == 0.003, "a run's recipe can start another run"
    (run.tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match="tokenizer is damaged"):
        prepare(run.path, resume=True)


def test_packed_documents_are_numbered_as_the_model_numbers_tokens(recipe: Path) -> None:
    """Positions of a RoBERTa begin after that of padding."""
    roberta = {
        "model_type": "roberta",
        "is_decoder": "true",
        "pad_token_id": 1,
        "max_position_embeddings": 64,
    }
    sets = [f"model.config.{key}={value}" for key, value in roberta.items()]
    samples, _ = prepare(recipe, sets=["data.samples=packed", *sets]).train_samples
    assert samples.batch(np.arange(1))["position_ids"].tolist() == [[2, 3, 4, 5, 6, 7, 8, 9]]


def test_a_resumed_run_says_that_its_schedule_was_stretched(recipe: Path) -> None:
    sets = ["run.steps=3", "schedule.name=cosine", "data.workers=0"]
    run, alone = prepare(recipe, sets=sets).dir, World.alone(torch.device("cpu"))
    train(run.read_recipe(), alone)
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lr": null}\n')
    for change in ([], ["run.steps=8"], []):
        prepare(run.path, sets=change, resume=True)
        train(run.read_recipe(), alone)
    warnings = [record for record in read_metrics(run.metrics) if "warning" in record]
    assert warnings == [{"step": 3, "warning": "the schedule now ends at step 8: lr 2.5e-04 -> 6.9e-04"}], (
        "once, at the change"
    )


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
    with pytest.raises(ConfigError, match="loss scaling requires fp16") as caught:
        prepare(run, plan="dp=1 precision=bf16", resume=True)
    assert "--set loss_scale= " in str(caught.value.hint)
    changed = prepare(run, plan="dp=1 precision=bf16", sets=["loss_scale="], resume=True)
    assert changed.recipe.run.offload_dir == recipe.parent


def test_only_ranks_that_the_same_job_of_torchrun_has_started_again_go_on_unasked(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(recipe.parent / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not is_later_attempt(run), "there is no run"
    prepare(recipe)
    assert is_later_attempt(run), "by the same process, as when hosts join"
    run_id, process = json.loads(run.job.read_text())
    run.job.write_text(json.dumps([run_id, f"{process}0"]))
    assert not is_later_attempt(run), "another process: a job that uses an id again"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_later_attempt(run), "the first rank has come to another host"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
    assert not is_later_attempt(run), "another job, which was refused and tries again"
    run.job.write_text(json.dumps(["none", f"{process}0"]))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not is_later_attempt(run), "another job, neither has an id"
    prepare(run.path, resume=True)
    assert is_later_attempt(run), "it was resumed by this one"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not is_later_attempt(run), "not torchrun"


def test_a_run_that_took_no_step_is_discarded_and_one_with_a_step_or_a_save_is_kept(recipe: Path) -> None:
    run = prepare(recipe).dir
    run.metrics.write_text('{"step": 0, "validation_loss": 5.0}\n')
    discard_unused(run)
    assert not run.path.exists()
    run = prepare(recipe).dir  # as the same command would
    run.stacks.mkdir()
    (run.stacks / "rank-00000.txt").write_text("")
    (run.stacks / "rank-00001.txt").write_text("Thread 1")
    aside = discard_unused(run)
    assert aside is not None
    assert (aside / "stacks" / "rank-00001.txt").exists()
    assert not run.path.exists()
    run = prepare(recipe).dir
    run.metrics.write_text('{"step": 1, "loss": 5.0}\n')
    assert discard_unused(run) is None
    assert run.path.exists()
    run.metrics.unlink()
    saved = checkpoints.save(run.checkpoints, 3, checkpoints.some_tensors())
    discard_unused(run)
    assert run.path.exists()
    discard_unused(run, saved)  # where it started from
    assert not run.path.exists()


def test_one_job_at_a_time_trains_a_run(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.train.run_dir._LOCK_TIMEOUT_S", 0.0)
    with ExitStack() as ours:
        prepare(recipe, lock=ours)
        before = (recipe.parent / "run" / "recipe.json").read_bytes()
        with ExitStack() as theirs, pytest.raises(RunError, match="another job is training this run"):
            prepare(recipe, sets=["optimizer.lr=2e-3"], resume=True, lock=theirs)
        assert (recipe.parent / "run" / "recipe.json").read_bytes() == before
    with ExitStack() as theirs:
        prepare(recipe, resume=True, lock=theirs)


def test_dp_auto_stays_in_the_recipe_and_is_judged_for_the_ranks_of_each_start(recipe: Path) -> None:
    prepare(recipe, plan="dp=auto", sets=["run.batch=4"], ranks=4)
    run = RunDir(recipe.parent / "run")
    assert run.read_recipe().plan == "dp=auto"
    for ranks in (2, 1, None):
        assert prepare(run.path, resume=True, ranks=ranks).recipe.plan == "dp=auto"
    with pytest.raises(PlanError, match="does not divide") as caught:
        prepare(run.path, resume=True, ranks=3)
    assert caught.value.hint == "run.batch=3"
