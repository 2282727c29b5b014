"""A Hugging Face model made small: few layers, narrow, the same architecture.

A configuration's keys say much that a small model contradicts: lists with an entry per layer, tables for a
head dim, the number of the token that pads. So what was given is taken over as far as the small model builds
and runs with it: all of it first, then its flags and names alone, then nothing but the family.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.utils import logging

from plait.errors import ModelError, PlaitError
from plait.models import causal_lm_on_meta

_MOST_PARAMETERS = 3_000_000
_HEADS, _KV_HEADS, _HEAD_DIM, _EXPERTS, _WIDTH = 4, 2, 8, 4, 32

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": _HEADS,
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
_WITHOUT_HEAD_DIM = {key: value for key, value in _SIZES.items() if key != "head_dim"}
_VARIANTS = (
    _SIZES,
    {key: value for key, value in _WITHOUT_HEAD_DIM.items() if key != "q_lora_rank"},
    {**_WITHOUT_HEAD_DIM, "num_key_value_heads": _HEADS},
)
_SILENT = 60  # above errors: configurations that fit are looked for by trying
_NOT_SHAPES = ("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path")


def shrink_config(values: Mapping[str, Any], layers: int, length: int = 16) -> dict[str, Any]:
    """The configuration of a small model of that kind, with so many layers, for sequences of this length.

    Raises ModelError where none builds and runs.
    """
    failure: Exception | None = None
    verbosity = logging.get_verbosity()
    logging.set_verbosity(_SILENT)
    try:
        for taken in _taken_over(values):
            for sizes in _VARIANTS:
                config = {**taken, **sizes, **_of_layers(layers)}
                config["max_position_embeddings"] = max(64, length)
                try:
                    _try(config, length)
                    return config
                except Exception as error:  # whatever a family's own code raises
                    failure = failure or error
    finally:
        logging.set_verbosity(verbosity)
    reason = failure.fact if isinstance(failure, PlaitError) else str(failure).strip().split("\n")[0]
    raise ModelError(
        "the model cannot be made small",
        given=f"{values.get('model_type')}: {reason}",
        hint="a small config.json of your own and --full",
    ) from failure


def _taken_over(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = {"model_type": values["model_type"]}
    given = {key: value for key, value in values.items() if key not in _NOT_SHAPES}
    if len(given) > 1:
        yield {key: value for key, value in given.items() if not isinstance(value, list)}
        yield {key: value for key, value in given.items() if isinstance(value, str | bool)}
    yield kind


def _of_layers(layers: int) -> dict[str, Any]:
    """GPT-Neo says how its layers attend, in pairs, and for how many."""
    return {"num_hidden_layers": layers, "attention_types": [[["global", "local"], (layers + 1) // 2]]}


def _try(config: Mapping[str, Any], length: int) -> None:
    """Raises whatever it does unless the model is small, and runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = causal_lm_on_meta(config)
        num_parameters = sum(p.numel() for p in model.parameters())
        if num_parameters > _MOST_PARAMETERS:
            raise ModelError("it stays large", given=f"{num_parameters:,} parameters")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            type(model)(model.config)(torch.arange(length)[None] % 61 + 3, use_cache=False)
