"""Shrink a Hugging Face configuration: few layers, narrow, the same architecture.

Many keys of a configuration do not fit a small model: lists with an entry per layer, tables for a head dim,
the id of the padding token. The given keys are kept as far as the small model builds and runs with them:
first all, then only flags and names, then only the model type. Sizes that are particular to a model type are
in tiny_sizes.toml.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from plait.errors import ModelError, PlaitError
from plait.fileio import parse_toml, read_text
from plait.models import causal_lm_on_meta, without_warnings

_TABLE = Path(__file__).with_name("tiny_sizes.toml")
_NUM_HEADS = 4
_KV_HEADS, _HEAD_DIM, _EXPERTS, _WIDTH = 2, 8, 4, 32

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "n_routed_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rotary_dim": 4,
    # latent attention
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}

_MAX_PARAMETERS = 3_000_000
_WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
_VARIANTS = (
    SIZES,
    {key: value for key, value in _WITHOUT_HEAD_DIM.items() if key != "q_lora_rank"},
    {**_WITHOUT_HEAD_DIM, "num_key_value_heads": _NUM_HEADS},
)
# Entries of a batch besides tokens, and their shapes in a sample, by the type of the model's configuration.
_INPUTS: dict[str, Callable[[Any], dict[str, tuple[int, ...]]]] = {
    "git": lambda config: {
        "pixel_values": (3, config.vision_config.image_size, config.vision_config.image_size)
    },
    "mllama_text_model": lambda config: {"cross_attention_states": (5, config.hidden_size)},
}
# Common sizes that a type does not have, and does not take.
_NOT_OF_TYPE = {
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    "xlstm": ("v_head_dim",),
}
_NOT_SHAPES = ("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path")


def shrink_config(values: Mapping[str, Any], layers: int, length: int = 16) -> dict[str, Any]:
    """Return the configuration of a small model of the same type, for sequences of `length`.

    Raises ModelError if none builds and runs.
    """
    failure: Exception | None = None
    with without_warnings():
        for kept in _kept_keys(values):
            for sizes in _VARIANTS:
                config = {**kept, **sizes, "num_hidden_layers": layers}
                config["attention_types"] = [[["global", "local"], (layers + 1) // 2]]  # GPT-Neo's, in pairs
                config |= sizes_of_type(config["model_type"], layers)
                config["max_position_embeddings"] = max(64, length)
                for key in _NOT_OF_TYPE.get(config["model_type"], ()):
                    del config[key]
                try:
                    _try(config, length)
                    return config
                except Exception as error:  # the model's code may raise anything
                    failure = failure or error
    reason = failure.fact if isinstance(failure, PlaitError) else str(failure).strip().split("\n")[0]
    raise ModelError(
        "cannot shrink the model",
        given=f"{values.get('model_type')}: {reason}",
        expected="a configuration that some smaller sizes fit",
        hint="plait verify --model MODULE:FUNCTION, a function that builds a small one",
    ) from failure


def left_out(values: Mapping[str, Any], small: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that are not sizes (flags, names, tables), and that the small configuration does not have."""
    are_more = {key for key, value in values.items() if value and type(value) not in (int, float)}
    return tuple(sorted(key for key in are_more - {*_NOT_SHAPES} if small.get(key) != values[key]))


def sizes_of_type(model_type: str, layers: int) -> dict[str, Any]:
    """Return the particular sizes of a type, {} for most."""
    sizes: dict[str, Any] = _resolve(_table()["types"].get(model_type, {}), layers)
    return sizes


def inputs_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a sample's entries besides tokens, of types that need them."""
    config = getattr(model, "config", None)
    find = _INPUTS.get(getattr(config, "model_type", ""))
    return {} if find is None else find(config)


@functools.cache
def _table() -> dict[str, Any]:
    return parse_toml(read_text(_TABLE))


def _resolve(value: Any, layers: int) -> Any:
    """Return a value of the table for a number of layers. tiny_sizes.toml says what its words mean."""
    if isinstance(value, str):
        return {"layers": layers, "half of the layers": layers // 2, "none": None}.get(value, value)
    if not isinstance(value, dict):
        return value
    if "each_layer" in value:
        return [value["each_layer"][layer % len(value["each_layer"])] for layer in range(layers)]
    resolved: dict[str, Any] = {}
    for name in value.get("use", ()):
        resolved |= SIZES if name == "sizes" else _resolve(_table()["sets"][name], layers)
    return resolved | {key: _resolve(inner, layers) for key, inner in value.items() if key != "use"}


def _kept_keys(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    model_type = {"model_type": values["model_type"]}
    keys = {key: value for key, value in values.items() if key not in _NOT_SHAPES}
    if len(keys) > 1:
        yield {key: value for key, value in keys.items() if not isinstance(value, list)}
        yield {key: value for key, value in keys.items() if isinstance(value, str | bool)}
    yield model_type


def _try(config: Mapping[str, Any], length: int) -> None:
    """Raise an error unless the model is small and runs."""
    model: Any = causal_lm_on_meta(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise ModelError(
            "the model is still large",
            given=f"{num_parameters:,} parameters",
            expected=f"at most {_MAX_PARAMETERS:,}",
            hint="--model MODULE:FUNCTION, a function that builds a small one",
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        type(model)(model.config)(torch.arange(length)[None] % 61 + 3, use_cache=False)
