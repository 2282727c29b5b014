"""Recipes with an adapter: their keys, what they start from, and what their checkpoints record."""

from pathlib import Path
from typing import Any

import pytest

from plait.errors import CheckpointError, ConfigError, ModelError
from plait.plan import Plan
from plait.train.config import Recipe, parse_recipe
from plait.train.explain_recipe import cluster_from_recipe, explain_recipe
from plait.train.model import adapter_facts, complete_adapter
from plait.train.sections import AdapterConfig
from support import adapters

LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "plan": "dp=1",
        "run": {"dir": "run", "steps": 2, "batch": 2},
        "model": {"config": LLAMA},
        "data": {"dir": "data", "sources": ["README.md"], "sequence": 32},
        "tokenizer": {"vocab_size": 512},
        "optimizer": {"lr": 1e-3},
    }
    return parse_recipe(values | changes, source="a test")


def memory_of(words: dict[str, Any]) -> Any:
    made = recipe(**words)
    return explain_recipe(made, cluster_from_recipe(made)).fullest().memory


@pytest.mark.parametrize("plan", ["dp=1 precision=bf16", "dp=2 zero=3 precision=bf16", "tp=2"])
def test_frozen_weights_are_estimated_without_gradients_and_states(plan: str) -> None:
    full, adapted = (memory_of({"plan": plan, **more}) for more in ({}, {"adapter": {"r": 2}}))
    assert adapted.optimizer < full.optimizer / 10
    assert adapted.gradients < full.gradients / 4
    assert adapted.parameters < full.parameters * 1.2


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"rank": 4}, ("adapter has no key 'rank'", "adapter.r")),
        ({"r": 0}, ("adapter.r has an invalid value", "greater than or equal to 1")),
        ({"init_lora_weights": "pissa"}, ("adapter.init_lora_weights", "invalid value")),
    ],
)
def test_unknown_keys_of_an_adapter_are_refused(adapter: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(adapter=adapter)
    assert all(word in str(error.value) for word in words), error.value


def test_a_target_that_no_layer_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="no module 'q_prj'") as error:
        memory_of({"adapter": {"target_modules": ["q_prj"]}})
    assert "q_proj" in str(error.value)


def test_the_facts_of_a_base_change_with_its_weights_and_not_with_its_path(tmp_path: Path) -> None:
    adapters.save_base(tmp_path / "base", "llama")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    config = AdapterConfig(r=2)

    def facts(name: str) -> dict[str, Any]:
        model = recipe().model.model_copy(
            update={"path": tmp_path / name, "config": None, "pretrained": True}
        )
        return adapter_facts(model, config, 0, Plan())

    assert facts("base")["base"]["sha256"] == facts("link")["base"]["sha256"]
    assert facts("base")["adapter"]["default"]["r"] == 2
    before = facts("base")["base"]["sha256"]
    path = tmp_path / "base" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-8 * 24 : -8 * 23] = b"\0" * 8  # of the last tensor, a norm of 48 elements
    path.write_bytes(bytes(content))
    assert facts("base")["base"]["sha256"] != before
    drawn = adapter_facts(recipe().model, config, 3, Plan())["base"]
    assert drawn["seed"] == 3
    assert adapter_facts(recipe().model, config, 3, Plan.parse("base=nf4"))["base"]["format"] == "nf4"


def test_an_adapter_to_start_from_has_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "use_dora": false}'
    )
    found = complete_adapter(AdapterConfig(path=tmp_path))
    assert found is not None
    assert (found.r, found.lora_alpha, found.target_modules) == (3, 6, ("q_proj",))
    with pytest.raises(ConfigError, match="has its own keys"):
        complete_adapter(AdapterConfig(path=tmp_path, r=4))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ConfigError, match="recipes have no such adapter"):
        complete_adapter(AdapterConfig(path=tmp_path))
    with pytest.raises(CheckpointError, match="configuration cannot be read"):
        complete_adapter(AdapterConfig(path=tmp_path / "none"))
