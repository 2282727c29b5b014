"""An export is the model of the checkpoint: its weights and its persistent buffers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait.api import parallelize
from plait.checkpoint import Keep, Saver
from plait.comm import World, connect
from plait.data.tokenizer import file_hashes, save_tokenizer, train_tokenizer
from plait.engine.engine import Engine
from plait.errors import CheckpointError, RunError
from plait.models import causal_lm_on_meta
from plait.parallel.zero.state_io import StateShard
from plait.train.config import Recipe, parse_recipe
from plait.train.export import export
from plait.train.generate import GenerationRequest, generate
from plait.train.run_dir import RunDir
from plait.train.saved_recipe import SavedRecipe

# It keeps a bias that no gradient moves, e_score_correction_bias, as a persistent buffer.
GLM = {
    "model_type": "glm4_moe",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


@pytest.fixture
def world() -> Iterator[World]:
    alone = connect()
    yield alone
    alone.close()


@pytest.fixture
def trained(tmp_path: Path, world: World) -> tuple[RunDir, Engine]:
    """A run's directory with one checkpoint of a model with a persistent buffer, and the engine of it."""
    engine = parallelize(causal_lm_on_meta(GLM), "dp=1", world=world)
    for name, buffer in engine.model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([5.0, -5.0, 3.0, -3.0]))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    words = train_tokenizer(iter(["the ship sails " * 50]), 300, None)
    save_tokenizer(words, run.tokenizer)
    SavedRecipe(_recipe(tmp_path).model_dump(mode="json"), file_hashes(run.tokenizer)).write(run.recipe)
    _save(run, engine, 1)
    return run, engine


def _save(run: RunDir, engine: Engine, step: int, *more: StateShard) -> None:
    facts = {"model": {"config": GLM, "path": None}, "plan": "dp=1"}
    Saver(run.checkpoints, engine.world, keep=Keep(1)).save(step, [*engine.state_shards(), *more], facts)


def _recipe(here: Path) -> Recipe:
    values = {
        "plan": "dp=1",
        "run": {"dir": str(here / "run"), "steps": 1, "batch": 1},
        "model": {"config": GLM},
        "data": {"dir": str(here / "data"), "sources": ["*.txt"], "sequence": 16},
        "tokenizer": {"vocab_size": 300},
        "optimizer": {"lr": 1e-3},
    }
    return parse_recipe(values, source="test")


def text_of(run: RunDir) -> str:
    request = GenerationRequest(str(run.path), "dp=1", prompt="the ship", sampling={"max_new_tokens": 2})
    (row,) = generate(request, connect())
    text: str = row["text"]
    return text


def test_persistent_buffers_are_exported_with_the_weights(
    trained: tuple[RunDir, Engine], tmp_path: Path
) -> None:
    run, engine = trained
    export(run, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, theirs = engine.model.state_dict(), exported.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    engine.model.eval()
    with torch.no_grad():
        assert torch.equal(engine.model(input_ids=ids).logits, exported(input_ids=ids).logits)
    assert text_of(run).startswith("the ship")


def test_a_changed_tokenizer_or_recipe_is_not_used(trained: tuple[RunDir, Engine]) -> None:
    run, _ = trained
    file = run.tokenizer / "tokenizer.json"
    file.write_text(file.read_text().replace('"!": 1', '"!": 2').replace('"\\"": 2', '"\\"": 1'))
    for use in (lambda: export(run, run.path.with_name("out")), lambda: text_of(run)):
        with pytest.raises(RunError, match="tokenizer is damaged") as failure:
            use()
        assert str(failure.value.given).endswith("tokenizer: tokenizer.json")
    run.recipe.write_text(run.recipe.read_text().replace("0.001", "0.003"))
    with pytest.raises(RunError, match="recipe is damaged"):
        export(run, run.path.with_name("out"))
    assert not list(run.path.parent.glob("out*"))


def test_a_checkpoint_with_a_tensor_too_many_is_of_another_model(trained: tuple[RunDir, Engine]) -> None:
    run, engine = trained
    _save(run, engine, 2, StateShard.from_tensor("buffers/model.surplus", torch.zeros(2)))
    with pytest.raises(CheckpointError, match="another model"):
        export(run, run.path.with_name("out"))
    assert not list(run.path.parent.glob("out*"))
