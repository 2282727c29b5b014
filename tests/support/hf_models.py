"""Small models of many Hugging Face families; `exact` ones compute in float64 wherever they can: see
[Note: float64 instead of float32] in `plait/verify/model_spec.py`."""

import functools
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from plait.verify.model_spec import compute_in_float64
from support import mixer_configs, programs

_SIZES = {
    "vocab_size": programs.VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": programs.VOCABULARY}
_NO_GPT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT |= {"bos_token_id": 0, "eos_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied_llama": {"model_type": "llama", "tie_word_embeddings": True},
    "one_kv_llama": {"model_type": "llama", "num_key_value_heads": 1},
    "biased_llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 12, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 8, "tie_word_embeddings": True},
    "phi": {"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "partial_rotary_factor": 0.5},
    "phi3": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": None},
    "olmo2": {},
    "gpt_neox": {"rotary_pct": 0.5, **_NO_DROPOUT},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "gpt2": {**_GPT, **_NO_GPT_DROPOUT},
    "gptj": {**_GPT, "rotary_dim": 8, **_NO_GPT_DROPOUT, "tie_word_embeddings": False},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "opt": {"ffn_dim": 88, "word_embed_proj_dim": 24, "dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, **_NO_DROPOUT},
    "grouped_falcon": {
        "model_type": "falcon",
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        **_NO_DROPOUT,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **mixer_configs.LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
OTHERS: dict[str, dict[str, Any]] = {  # outside of the covering sets
    "gpt_oss": {  # experts with biases, and learned sinks next to the keys
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "qwen2_moe": {  # a shared expert with a gate
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "head_dim": 12,
    },
    "gemma3_text": {  # windows, and norms of queries and keys
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "llama4_text": {  # chunks
        "num_local_experts": 4,
        "head_dim": 12,
        "intermediate_size_mlp": 88,
        "attention_chunk_size": 32,
    },
    **mixer_configs.CONFIGS,
}
WITH_EXPERTS = ("mixtral", "deepseek_v3")  # not over rows
_OF_THEIR_OWN = ("gpt2", "gptj")  # families whose sizes have other names


def config_of(family: str, **more: Any) -> Any:
    given = dict({**CONFIGS, **OTHERS}[family])
    kind = given.pop("model_type", family)
    sizes = {} if kind in _OF_THEIR_OWN else _SIZES
    return AutoConfig.for_model(kind, **{**sizes, **given, **more})


def model_of(
    family: str, *, on_meta: bool = True, exact: bool = True, auto: Any = AutoModelForCausalLM, **more: Any
) -> nn.Module:
    """Build the family's causal language model, or that of another `auto` class. `more`: configuration
    options."""
    config = config_of(family, **more)
    attention = "sdpa" if _has_sdpa(config) else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if exact else torch.float32)  # of tables in buffers
    try:
        with torch.device("meta" if on_meta else "cpu"):
            model: nn.Module = auto.from_config(
                config, attn_implementation=attention, experts_implementation="eager"
            )
    finally:
        torch.set_default_dtype(before)
    if exact:  # blocks too, because they may run again in backward
        blocks = [block for found in model.modules() if isinstance(found, nn.ModuleList) for block in found]
        compute_in_float64(model, blocks)
    return model


def builder(family: str) -> Any:
    """`build` of a `programs.Task`."""
    return functools.partial(model_of, family)


def _has_sdpa(config: Any) -> bool:
    without = ("bloom", "gemma2", "gpt_neo", "gpt_oss", "gptj", "mamba", "falcon_mamba", "mamba2")
    return config.model_type not in without
