"""`plait checkpoint`: what is in one, whether it is whole, what two differ in, as a user types it."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from plait import checkpoint
from plait.api import parallelize
from plait.checkpoint import Saver, compare, open_checkpoint
from plait.cli.main import app
from plait.comm import World, connect
from plait.models import causal_lm_on_meta
from plait.parallel.zero.state_io import StateShard

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FACTS = {"plan": "dp=1", "data": {"digest": "[ab12]", "files": 3}}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    alone = connect()
    yield alone
    alone.close()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weights/a": torch.randn(6, 8, generator=generator),
        "weights/b": torch.randn(24, generator=generator, dtype=torch.float64),
        "exp_avg/a": torch.randn(6, 8, generator=generator).bfloat16(),
        "engine/num_steps": torch.tensor(7),
    }


def save(
    world: World, folder: Path, values: dict[str, Tensor], step: int = 1, *, parts: int = 1, **facts: object
) -> Path:
    """As so many ranks would cut it."""
    whole = [StateShard.from_tensor(key, tensor) for key, tensor in values.items()]
    cut = [kept.chunk(n, parts) for kept in whole for n in range(parts)]
    Saver(folder, world).save(step, [kept for kept in cut if kept.num_bytes], FACTS | facts)
    return checkpoint.step_path(folder, step)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)], env={"COLUMNS": "150"})


# --- diff


def test_the_same_tensors_in_other_chunks_are_the_same(world: World, tmp_path: Path) -> None:
    one = save(world, tmp_path / "one", tensors())
    other = save(world, tmp_path / "other", tensors(), parts=5, plan="tp=5")
    found = compare(open_checkpoint(one), open_checkpoint(other), at_a_time=7)
    assert found.is_same
    assert found.same == 4
    assert found.facts == (("plan", "dp=1", "tp=5"),)
    result = run("diff", one, other)
    assert result.exit_code == 0
    assert 'fact plan: "dp=1" | "tp=5"' in result.stdout
    assert "4 tensors the same, 0 not" in result.stdout


def test_tensors_that_differ_are_named_with_how_much(world: World, tmp_path: Path) -> None:
    values = tensors()
    one = save(world, tmp_path / "one", values)
    changed = values["weights/a"].clone()
    changed[2, 3] += 0.5
    nan = values["weights/b"].clone()
    nan[0] = math.nan
    others = {"weights/a": changed, "weights/b": nan, "exp_avg/a": values["exp_avg/a"].view(8, 6)}
    other = save(world, tmp_path / "other", others | {"weights/c": torch.ones(2)}, parts=3)
    found = compare(open_checkpoint(one), open_checkpoint(other))
    assert not found.is_same
    assert found.only == (("engine/num_steps",), ("weights/c",))
    differ = {each.key: each for each in found.differ}
    assert differ.keys() == others.keys()
    assert differ["weights/a"].elements == 1
    assert differ["weights/a"].largest == pytest.approx(0.5)
    assert differ["weights/a"].relative == pytest.approx(0.5 / float(values["weights/a"].norm()))
    assert math.isnan(differ["weights/b"].largest)
    assert differ["exp_avg/a"].given == "shapes [6, 8] and [8, 6]"
    result = run("diff", one, other)
    assert result.exit_code == 1
    assert "weights/a: 1 elements differ, by up to 0.5" in result.stdout
    assert "only in B: weights/c" in result.stdout
    said = json.loads(run("diff", one, other, "--json", "-").stdout, parse_constant=pytest.fail)
    assert said["is_same"] is False
    assert said["only"] == [["engine/num_steps"], ["weights/c"]]


def test_the_same_nan_is_the_same_and_another_dtype_is_not(world: World, tmp_path: Path) -> None:
    one = save(world, tmp_path / "one", {"a": torch.tensor([math.nan, 1.0]), "b": torch.ones(2)})
    other = save(world, tmp_path / "two", {"a": torch.tensor([math.nan, 1.0]), "b": torch.ones(2).double()})
    found = compare(open_checkpoint(one), open_checkpoint(other))
    assert [(each.key, each.given, each.elements) for each in found.differ] == [
        ("b", "dtypes F32 and F64", 0)
    ]


def test_damage_is_not_taken_for_a_difference(world: World, tmp_path: Path) -> None:
    one, other = (save(world, tmp_path / name, tensors()) for name in ("one", "other"))
    flip(other)
    result = run("diff", one, other)
    assert result.exit_code == 2
    assert "the checkpoint is damaged" in result.stderr


# --- verify


def flip(path: Path) -> None:
    """A bit of weights/b."""
    chunk = open_checkpoint(path).manifest.tensors["weights/b"].chunks[0]
    with (path / "rank-00000.0.safetensors").open("r+b") as file:
        file.seek(chunk.offset)
        byte = file.read(1)[0]
        file.seek(chunk.offset)
        file.write(bytes([byte ^ 1]))


def test_verify_prints_what_it_read_or_where_the_damage_is(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        path = save(world, folder, tensors(), step)
    for place in (path, folder, tmp_path / "run"):
        result = run("verify", place)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"{path}: complete, 1 file, 4 tensors, ")
        assert "GB/s" in result.stdout
    flip(checkpoint.step_path(folder, 2))
    assert run("verify", tmp_path / "run").exit_code == 0
    result = run("verify", tmp_path / "run", "--all")
    assert result.exit_code == 2
    assert re.findall(r"step-\d+: complete", result.stdout) == [
        "step-00000001: complete",
        "step-00000003: complete",
    ]
    assert "step-00000002/rank-00000.0.safetensors: weights/b[0:24], from byte" in result.stderr


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        result = run("verify", place)
        assert result.exit_code == 2
        assert result.stderr.startswith("CheckpointError: ")


# --- show


def test_show_prints_a_checkpoints_content_and_plan(world: World, tmp_path: Path) -> None:
    path = save(world, tmp_path, tensors(), 12, parts=2)
    shown = run("show", tmp_path, "--tensors")
    assert shown.exit_code == 0
    for words in ("step-00000012", "dp=1", '"digest": "[ab12]"', "exp_avg", "BF16", "rank-00000", "100.0 %"):
        assert words in shown.stdout
    assert "weights/a [6, 8] F32 2 chunks" in shown.stdout
    said = json.loads(run("show", path, "--tensors", "--json", "-").stdout)
    assert (said["step"], said["facts"]["plan"]) == (12, "dp=1")
    kinds = {kind["name"]: kind for kind in said["kinds"]}
    assert kinds.keys() == {"weights", "exp_avg", "engine"}
    assert kinds["weights"]["dtypes"] == ["F32", "F64"]
    assert (kinds["weights"]["tensors"], kinds["weights"]["elements"]) == (2, 72)
    assert kinds["weights"]["bytes"] == 4 * 48 + 8 * 24
    assert sum(said["written"].values()) == said["bytes"] == sum(said["files"].values())
    assert said["tensors"]["weights/b"] == {"shape": [24], "dtype": "F64", "chunks": 2}


# --- convert


def test_convert_writes_what_auto_model_loads(world: World, tmp_path: Path) -> None:
    engine = parallelize(causal_lm_on_meta(LLAMA), "dp=1", world=world)
    engine.save(tmp_path, {"model": {"config": LLAMA, "path": None}})
    words = ("--to", "hf", "--dtype", "bf16", "--max-shard-size", "8KiB")
    result = run("convert", tmp_path, tmp_path / "out", *words)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    for key, tensor in engine.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor.bfloat16()), key
    assert run("convert", tmp_path, tmp_path / "out").exit_code == 2


@pytest.mark.parametrize("size", ["5 GBs", "0", "-1GB", "lots"])
def test_an_invalid_size_is_an_error(tmp_path: Path, size: str) -> None:
    result = run("convert", tmp_path, tmp_path / "out", "--max-shard-size", size)
    assert result.exit_code == 2
    assert "not a size" in result.stderr
