"""Mistakes in a model's configuration are errors that name the key; no configuration names code to run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import modeling_utils

from plait.errors import ModelError
from plait.models import causal_lm_on_meta, check_forward, huggingface, pretrained_causal_lm
from support.hf_models import CONFIGS, OTHERS, config_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "lama"}, "no such model type"),
        ({"model_type": "vit"}, "is not of a causal language model"),
        (Path("nowhere.json"), "cannot be read"),
        (5, "not an object"),
        ({"model_type": 5}, "invalid model_type"),
        ({"model_type": {}}, "invalid model_type"),
        *(
            ({**LLAMA, **values}, f"an invalid .*{next(iter(values))}")
            for values in (
                {"hidden_size": "wide"},
                {"hidden_act": "nope"},
                {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}},
                {"pad_token_id": 61},
                {"num_key_value_heads": 0},
                {"head_dim": 0},
                {"hidden_size": 0},
                {"vocab_size": -1},
                {"get_text_config": 5},
            )
        ),
        ({**LLAMA, "num_hidden_layers": 0}, "has no layers"),
        ({**LLAMA, "num_hidden_layers": -1}, "has no layers"),
        ({**LLAMA, "num_hidden_layers": 2**62}, "too large"),
        ({**GPT2, "n_layer": 10**6}, "too large"),
        ({**LLAMA, "num_labels": 10**10}, "too large"),
        ({**LLAMA, "vision_config": {"num_labels": 10**10}}, "too large"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**8]]}, "too large"),
        ({**GPT2, "attn_pdrop": 2.0}, "an invalid attn_pdrop"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_a_configuration_that_makes_no_model_is_an_error(config: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        causal_lm_on_meta(config)


def test_large_vocabularies_and_positions_are_not_refused() -> None:
    values = {
        "rope_theta": 10**11,
        "max_position_embeddings": 10**8,
        "vocab_size": 2**21,
        "num_labels": 2**10,
    }
    causal_lm_on_meta({**LLAMA, **values, "vocab_size_per_layer_input": 262144})


def test_a_misspelt_model_type_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ModelError) as caught:
        causal_lm_on_meta({"model_type": "lama"})
    assert caught.value.hint == "llama"


def test_a_model_of_too_many_modules_is_refused_whatever_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_MAX_MODULES", 40)
    causal_lm_on_meta({**LLAMA, "num_hidden_layers": 2})
    with pytest.raises(ModelError, match="too large"):
        causal_lm_on_meta({**LLAMA, "num_hidden_layers": 4})
    nn.Sequential(*[nn.Identity() for _ in range(41)])


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what transformers would download, with the package that it downloads with."""
    names: list[str] = []
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda name, **_: names.append(name))
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    return names


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
@pytest.mark.parametrize(
    "value",
    [
        "evil-org/x",
        "paged|evil-org/x",
        "org/x@main:y",
        "flash_attention_2",
        {"": "evil-org/x"},
        "paged|sdpa",
        5,
    ],
    ids=str,
)
def test_a_configuration_cannot_name_attention_to_download(
    key: str, value: object, fetched: list[str], tmp_path: Path
) -> None:
    values = {**LLAMA, key: value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for config in (values, tmp_path):
        with pytest.raises(ModelError) as caught:
            causal_lm_on_meta(config)
        assert key in str(caught.value.given)
        assert caught.value.expected
        assert caught.value.hint
    with pytest.raises(ModelError, match=r"implementation|not installed"):
        pretrained_causal_lm(str(tmp_path))
    assert not fetched


def test_other_parts_of_a_configuration_cannot_name_code_to_download(fetched: list[str]) -> None:
    for values in (
        {"experts_implementation": "evil-org/x"},
        {"text_config": {"_attn_implementation": "evil-org/x"}},
        {"per_layer_config": [{"attn_implementation": "evil-org/x"}]},
    ):
        with pytest.raises(ModelError, match="not one of transformers' own"):
            causal_lm_on_meta({**LLAMA, **values})
    model = causal_lm_on_meta({**LLAMA, "attn_implementation": "eager", "auto_map": {"AutoConfig": "a--b.c"}})
    assert model.config._attn_implementation == "eager"
    assert not fetched


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    values = {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="quantized"):
        pretrained_causal_lm(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**LLAMA, "attention_dropout": 2.0}, "attention_dropout"),
        ({**MIXTRAL, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts"),
        ({"model_type": "opt", "hidden_size": 32, "num_attention_heads": 4, "dropout": 2.0}, "dropout"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_a_configuration_whose_forward_fails_is_an_error_that_names_the_key(
    values: dict[str, Any], key: str
) -> None:
    causal_lm_on_meta(values)
    with pytest.raises(ModelError, match=f"an invalid .*{key}"):
        check_forward(values)


@pytest.mark.parametrize("family", [*CONFIGS, *OTHERS, "mamba"])
def test_a_valid_configuration_passes_the_trial_of_its_forward(family: str) -> None:
    sizes = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61}
    state = torch.get_rng_state()
    check_forward(sizes if family == "mamba" else config_of(family).to_dict())
    assert torch.equal(torch.get_rng_state(), state)
