"""The checkpoint that a run resumes from; damaged or newer ones are renamed, and never removed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plait
from plait import checkpoint
from plait.checkpoint import Checkpoint
from plait.comm import World
from plait.engine.engine import Engine
from plait.errors import CheckpointError
from plait.train.prepare import num_local_ranks
from plait.train.resume import find_newest, load_newest, rewind, start_from


def any_of_them(_: Checkpoint) -> None:
    """Each is one of this run."""


def another_model(found: Checkpoint) -> None:
    raise CheckpointError("the checkpoint is of another model", given=found.path)


def engine_of(width: int = 8) -> Engine:
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    world = World.alone(torch.device("cpu"))
    return plait.parallelize(model, "dp=1", loss=lambda out, _: (out.square().sum(), len(out)), world=world)


def take_a_step(engine: Engine) -> None:
    generator = torch.Generator().manual_seed(engine.num_steps)
    engine.step({"input": torch.randn(3, 4, generator=generator)})


@pytest.fixture
def saved(tmp_path: Path) -> list[dict[str, Tensor]]:
    """The states after steps 1, 2 and 3, saved in `tmp_path`."""
    engine, states = engine_of(), []
    for _ in range(3):
        take_a_step(engine)
        engine.save(tmp_path)
        states.append({key: tensor.clone() for key, tensor in engine.state().items()})
    return states


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 4
    path.write_bytes(content)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def files(folder: Path, step: int) -> tuple[Path, Path]:
    place = checkpoint.step_path(folder, step)
    return place / "manifest.json", place / "rank-00000.0.safetensors"


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*checkpoint.*")
def test_the_newest_that_is_whole_is_taken_and_damaged_ones_are_renamed(
    saved: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    flip_a_bit(files(tmp_path, 3)[0])
    flip_a_bit(files(tmp_path, 2)[1])
    (tmp_path / "step-00000003.damaged").mkdir()  # of an earlier time
    opened = find_newest(tmp_path)
    assert opened is not None
    assert opened.step == 2, "its tensors are for the ranks to read"
    engine = engine_of()
    found, warnings = load_newest(engine, tmp_path, any_of_them)
    assert found is not None
    assert found.step == engine.num_steps == 1
    assert_same(engine.state(), saved[0])
    assert names(tmp_path) == [
        "step-00000001",
        *(f"step-0000000{n}" for n in ("2.damaged", "3.damaged", "3.damaged-2")),
    ]
    assert [
        str(path) in text
        for path, text in zip((files(tmp_path, 3)[0], files(tmp_path, 2)[1]), warnings, strict=True)
    ]
    take_a_step(engine)
    engine.save(tmp_path)
    found, warnings = load_newest(engine_of(), tmp_path, any_of_them)
    assert found is not None
    assert (found.step, warnings) == (2, []), "they change nothing"
    assert_same(found.read(), saved[1])


def test_a_run_resumes_with_the_optimizers_options_of_its_recipe(
    saved: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    assert "engine/param_groups.0.weight_decay" in saved[0]
    engine = engine_of()
    engine.optimizer.param_groups[0]["weight_decay"] = 0.5
    load_newest(engine, tmp_path, any_of_them)
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_where_none_is_whole_the_error_names_all_and_nothing_is_renamed(
    saved: list[dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3):
        flip_a_bit(files(tmp_path, step)[step % 2])
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match="all checkpoints of the run are damaged") as caught:
        load_newest(engine_of(), tmp_path, any_of_them)
    assert all(str(files(tmp_path, step)[step % 2]) in str(caught.value.given) for step in (1, 2, 3))
    assert names(tmp_path) == before
    assert load_newest(engine_of(), tmp_path / "empty", any_of_them) == (None, [])
    assert find_newest(tmp_path / "empty") is None


def test_a_checkpoint_of_something_else_is_no_reason_to_take_an_older_one(
    saved: list[dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        load_newest(engine_of(), tmp_path, another_model)
    with pytest.raises(CheckpointError, match="another model"):
        load_newest(engine_of(width=6), tmp_path, any_of_them)
    assert names(tmp_path) == before


def test_a_run_that_goes_back_keeps_what_was_newer_under_another_name(
    saved: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    rewind(tmp_path, checkpoint.step_path(tmp_path, 3), any_of_them)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    rewind(tmp_path, checkpoint.step_path(tmp_path, 1), any_of_them)
    assert names(tmp_path) == ["step-00000001", "step-00000002.aside", "step-00000003.aside"]
    found, warnings = load_newest(engine_of(), tmp_path, any_of_them)
    assert found is not None
    assert (found.step, warnings) == (1, [])
    (tmp_path / "step-00000002.aside").rename(tmp_path / "step-00000002")  # it is all there
    assert_same(checkpoint.open_checkpoint(tmp_path / "step-00000002").read(), saved[1])


def test_a_new_run_begins_with_anothers_checkpoint_without_copying_it(
    saved: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    start, folder = checkpoint.step_path(tmp_path, 2), tmp_path / "other"
    start_from(folder, start, any_of_them)
    assert [path.name for path in checkpoint.steps(folder)] == ["step-00000002"]
    for path in start.iterdir():
        assert (folder / start.name / path.name).stat().st_ino == path.stat().st_ino, "one file of two names"
        path.unlink()  # as when the other run removes it
    engine = engine_of()
    assert load_newest(engine, folder, any_of_them)[1] == []
    assert_same(engine.state(), saved[1])


def test_dp_auto_starts_as_few_local_ranks_on_a_cpu_as_can_be() -> None:
    texts = {"dp=auto": 1, "dp=auto tp=2 pp=2": 4, "dp=auto zero=1 shard=2": 2, "dp=3": 3}
    for text, ranks in texts.items():
        assert num_local_ranks(plait.Plan.parse(text), "cpu") == ranks
