"""A loss spike takes the run back to a checkpoint from before, and on without the batches that led there."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait import checkpoint
from plait.comm import World, connect
from plait.data.loader import Batches
from plait.engine.engine import StepResult
from plait.errors import RunError
from plait.train.loss_spikes import LossSpikeGuard
from plait.train.metrics import read_metrics
from plait.train.prepare import prepare
from plait.train.run_dir import RunDir
from plait.train.sections import RunConfig
from plait.train.trainer import train

STEPS = 14
SPIKE = 9  # the number of the batch, from 0
SKIP = 2
BACK = 4  # the newest checkpoint before the window of the four steps before the spike, of 2, 4, 6, 8
AHEAD = SPIKE + 1 + SKIP - BACK

RECIPE = """
plan = "dp=1"
[run]
dir = "{here}/run"
steps = 14
batch = 4
evaluate_every = 0
checkpoint_every = 2
keep_last = 4
spike_factor = 3.0
spike_window = 4
spike_skip = 2
device = "cpu"
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 1
attention_dropout = 0.1
[data]
dir = "{here}/data"
sources = ["{here}/text.txt"]
sequence = 16
validation = 0
workers = 0
[tokenizer]
vocab_size = 260
[optimizer]
lr = 2e-2
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("spikes")
    words = random.Random(0).choices(["ship", "harbour", "sails", "wind"], k=2000)
    (here / "text.txt").write_text(" ".join(words))
    path = here / "recipe.toml"
    path.write_text(RECIPE.format(here=here))
    return path


@pytest.fixture
def world() -> Iterator[World]:
    alone = connect(device="cpu")
    yield alone
    alone.close()


READ = Batches.__getitem__


def poisoned(self: Batches, number: int) -> dict[str, Tensor]:
    """A batch that is all one byte, which these texts do not have: a loss far off."""
    batch = READ(self, number)
    if number == SPIKE:
        batch = {name: torch.full_like(tokens, 3) for name, tokens in batch.items()}
    return batch


def without(self: Batches, number: int) -> dict[str, Tensor]:
    """The data of a run whose corpus never had the batches that are skipped."""
    return READ(self, number + AHEAD if number >= BACK else number)


def trained(
    recipe: Path, run: Path, world: World, data: object, monkeypatch: pytest.MonkeyPatch, *sets: str
) -> dict[str, Tensor]:
    """The last checkpoint of a run with such data."""
    monkeypatch.setattr(Batches, "__getitem__", data)
    prepared = prepare(recipe, sets=[f"run.dir={run}", *sets], resume=run.exists())
    assert train(prepared.recipe, world) is None
    found = checkpoint.newest(RunDir(run).checkpoints)
    assert found is not None
    assert found.step == STEPS
    return found.read()


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(RunDir(run).metrics) if "loss" in record]


@pytest.mark.quick
def test_after_a_rollback_the_weights_are_those_of_a_run_without_the_skipped_batches(
    recipe: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = trained(recipe, tmp_path / "ours", world, poisoned, monkeypatch)
    said = capsys.readouterr().out
    assert "loss spike" in said
    assert f"rolled back to step {BACK}, skipping batches {BACK} to {BACK + AHEAD - 1}" in said
    theirs = trained(recipe, tmp_path / "theirs", world, without, monkeypatch, "run.spike_factor=0")
    never = trained(recipe, tmp_path / "never", world, poisoned, monkeypatch, "run.spike_factor=0")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not all(torch.equal(tensor, never[name]) for name, tensor in ours.items())
    assert losses(tmp_path / "ours") == losses(tmp_path / "theirs")


def test_a_run_that_ends_after_a_rollback_and_is_resumed_goes_on_as_if_it_had_not(
    recipe: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that it went back to knows what is skipped, and there is no later one."""
    whole = trained(recipe, tmp_path / "whole", world, poisoned, monkeypatch)

    class Killed(Exception):
        pass

    def killed_at_once(self: Batches, number: int) -> dict[str, Tensor]:
        if number == BACK + AHEAD:
            raise Killed
        return poisoned(self, number)

    with pytest.raises(Killed):
        trained(recipe, tmp_path / "killed", world, killed_at_once, monkeypatch)
    assert [path.name for path in checkpoint.steps(tmp_path / "killed" / "checkpoints")][-1].endswith("4")
    resumed = trained(recipe, tmp_path / "killed", world, poisoned, monkeypatch)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def settings(**changed: object) -> RunConfig:
    values = {"dir": ".", "steps": 100, "batch": 1, "spike_factor": 5.0, "spike_window": 5, "spike_skip": 3}
    return RunConfig.model_validate({**values, **changed})


def guard(folder: Path, **changed: object) -> LossSpikeGuard:
    return LossSpikeGuard(settings(**changed), folder, World.alone(torch.device("cpu")))


def seen(spikes: LossSpikeGuard, losses: list[float], first: int = 1) -> list[str | None]:
    return [
        spikes.observe(step, StepResult(loss, 1.0, 1, skipped=False), lambda: None)
        for step, loss in enumerate(losses, first)
    ]


def test_losses_within_the_usual_spread_or_before_the_window_is_full_are_no_spike(
    tmp_path: Path,
) -> None:
    spikes = guard(tmp_path)
    assert seen(spikes, [3.0, 9.0, 3.1, 2.9, 3.0, 3.2, 3.3]) == [None] * 7
    assert seen(spikes, [4.5], 8) != [None]
    assert spikes.rollback_to is None, "there is no checkpoint to go back to: it goes on"


def test_the_run_goes_back_before_the_window_and_too_many_spikes_end_it(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        (tmp_path / f"step-{step:08d}").mkdir()
    spikes = guard(tmp_path, max_spikes=1)
    calm = [3.0, 3.1, 2.9, 3.0, 3.1, 2.9, 3.0, 3.1, 3.0]
    assert seen(spikes, calm) == [None] * 9
    assert seen(spikes, [8.0], 10) == [
        "loss spike: 8 in step 10, 3 is typical; rolling back to step-00000004"
    ]
    spikes.load({})
    assert spikes.skip_batches(4) == "rolled back to step 4, skipping batches 4 to 12"
    assert spikes.num_skipped == 9
    again = guard(tmp_path, max_spikes=1)
    again.load({"spikes": spikes.facts()})
    assert again.facts() == spikes.facts()
    assert seen(again, calm, 5) == [None] * 9
    with pytest.raises(RunError, match="max_spikes = 1"):
        seen(again, [8.0], 14)


def test_a_later_range_takes_in_the_one_that_was_skipped_after_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    spikes = guard(tmp_path)
    spikes.load({"spikes": {"times": 1, "skipped_batches": [[4, 13]], "recent": [3.0] * 5}})
    assert seen(spikes, [8.0], 7) != [None]  # batch 6 + 9
    spikes.load({})  # a checkpoint from before the first
    assert spikes.skip_batches(2).endswith("skipping batches 2 to 18")
    assert spikes.facts()["times"] == 2
