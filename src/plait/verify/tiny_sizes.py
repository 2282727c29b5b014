"""Sizes of small models: those that many model types have, and those that are particular to one.

The latter have other names, belong to nested configurations, or have to fit each other: facts about
configurations.
"""

from collections.abc import Callable
from typing import Any

NUM_HEADS = 4
_KV_HEADS, _HEAD_DIM, _EXPERTS, _WIDTH = 2, 8, 4, 32

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": NUM_HEADS,
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

# Stand for numbers of layers in the tables below. A tuple is repeated, for a list with an entry per layer.
_LAYERS, _HALF = "layers", "half of the layers"

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT: dict[str, Any] = {**SIZES, "num_hidden_layers": _LAYERS, "max_position_embeddings": 64}
_GEMMA: dict[str, Any] = {
    **_TEXT,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
    "sliding_window": 8,
    "num_kv_shared_layers": 0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_NESTED = {"text_config": _TEXT, "vision_config": _VISION}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_HALVES = {
    "d_model": 32,
    "decoder_layers": _LAYERS,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_layers": 1,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
}
_BLT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
_BLT_LOCAL = {**_BLT, "vocab_size": 64, "hidden_size_global": 32, "cross_attn_k": 2}
_DOTS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 10,
    "swa_head_dim": 10,
    "swa_qk_nope_head_dim": 6,
    "swa_v_head_dim": 5,
    "num_key_value_heads": 4,
    "shared_experts_intermediate_size": 16,
    "sliding_window": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
_QWEN4 = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ("linear_attention", "full_attention"),
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 64,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_FULL_ATTENTION = {"attention_type": "original_full"}  # as these compute short sequences in any case
_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bart": _HALVES,
    "big_bird": _FULL_ATTENTION,
    "bigbird_pegasus": {**_HALVES, **_FULL_ATTENTION},
    "blenderbot": _HALVES,
    "blenderbot-small": _HALVES,
    "blt": {
        "encoder_config": _BLT_LOCAL,
        "decoder_config": {**_BLT_LOCAL, "num_hidden_layers": _LAYERS},
        "global_config": _BLT,
        "patcher_config": {**_BLT, "vocab_size": 64},
        "encoder_hash_byte_group_vocab": 64,
    },
    "cohere_compass_text": {
        "layer_types": ("sliding_attention", "full_attention"),
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "cpmant": {
        "dim_ff": 48,
        "dim_head": 8,
        "prompt_types": 4,
        "prompt_length": 4,
        "segment_types": 4,
        "position_bias_num_buckets": 8,
        "position_bias_max_distance": 32,
    },
    "ctrl": {"dff": 48},
    "marian": _HALVES,
    "mbart": _HALVES,
    "mvp": _HALVES,
    "pegasus": _HALVES,
    "plbart": _HALVES,
    "whisper": {**_HALVES, "max_source_positions": 16, "max_target_positions": 64, "num_mel_bins": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "granitemoehybrid": {**_MAMBA, "layer_types": ("mamba", "attention")},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "got_ocr2": {
        "text_config": _TEXT,
        "vision_config": {**_VISION, "mlp_dim": 48, "output_channels": 8, "image_size": 32},
    },
    "llama4": {
        "text_config": {**_TEXT, "intermediate_size_mlp": 48},
        "vision_config": {**_VISION, "vision_output_dim": 32}
        | {"projector_input_dim": 32, "projector_output_dim": 32},
    },
    "qwen3_5": {"text_config": _TEXT, "vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"text_config": _TEXT, "vision_config": _QWEN_VISION},
    "git": {"vision_config": {**_VISION, "image_size": 16, "patch_size": 8}},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ("local", "lsh"),
        "axial_pos_embds": False,
        "hash_seed": 1,
        "feed_forward_size": 48,
        "attention_head_size": 8,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 64,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 64,
        "shape_embed_dim": 8,
    },
    "rwkv": {"rescale_every": 0},  # otherwise evaluation changes weights in place
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": _DOTS,
    "dots3_note": {
        "text_config": {**_TEXT, **_DOTS},
        "vision_config": {
            **_VISION,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "num_local_experts": 2,
            "moe_intermediate_size": 16,
            "per_layer_config": {},
        },
        "audio_config": {
            **_VISION,
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 8,
            "feature_size": 8,
            "max_position_embeddings": 32,
        },
    },
    "emu3": {"text_config": _TEXT, "vq_config": {"base_channels": 32, "hidden_size": 32, "embed_dim": 4}},
    "gemma3": _NESTED,
    "gemma3n_text": {
        **_GEMMA,
        "laurel_rank": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "activation_sparsity_pattern": None,
    },
    "gemma4": {
        "text_config": _GEMMA,
        "vision_config": {**_VISION, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "gemma4_text": _GEMMA,
    "gemma4_unified": {
        "text_config": _GEMMA,
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 16},
    },
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_experts_per_token": 2,
        "num_key_value_heads": 4,
        "qk_head_dim": 10,
        "layer_types": ("linear_attention", "full_attention"),
        "mlp_layer_types": ("dense", "sparse"),
    },
    "lfm2_moe": {
        "layer_types": ("conv", "full_attention"),
        "num_dense_layers": 1,
    },
    "longcat_flash": {
        "num_layers": _HALF,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "qk_head_dim": 10,
    },
    "mllama": {
        "text_config": {**_TEXT, "cross_attention_layers": [1]},
        "vision_config": {
            **_VISION,
            "attention_heads": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
            "image_size": 16,
            "patch_size": 8,
        },
    },
    "moshi": {"ffn_dim": 48, "num_key_value_heads": 4},
    "moss_transcribe_diarize": {"text_config": _TEXT, "audio_config": {**_VISION, "num_mel_bins": 8}},
    "phi4_multimodal": {
        "vision_config": {**_VISION, "image_size": 28, "crop_size": 28, "feature_layer": -1},
        "audio_config": {
            **_VISION,
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
            "feature_layer": -1,
        },
    },
    "prophetnet": {
        "decoder_ffn_dim": 48,
        "num_decoder_layers": _LAYERS,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "num_encoder_layers": 1,
        "num_encoder_attention_heads": 4,
    },
    "qwen4_exp": {"text_config": {**_TEXT, **_QWEN4}, "vision_config": _QWEN_VISION},
    "qwen4_exp_text": _QWEN4,
    "zamba2": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "adapter_rank": 4,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ("linear_attention", "hybrid"),
        "num_key_value_heads": 4,
    },
    "zamba": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
        "layers_block_type": ("linear_attention", "hybrid"),
        "num_key_value_heads": 4,
    },
    "xglm": {"ffn_dim": 48, "d_model": 32, "attention_heads": 4, "num_layers": _LAYERS},
    "xlnet": {"d_inner": 48, "d_head": 8},
}

# Entries of a batch besides tokens, and their shapes in a sample, by the type of the model's configuration.
_INPUTS: dict[str, Callable[[Any], dict[str, tuple[int, ...]]]] = {
    "git": lambda config: {
        "pixel_values": (3, config.vision_config.image_size, config.vision_config.image_size)
    },
    "mllama_text_model": lambda config: {"cross_attention_states": (5, config.hidden_size)},
}

# Common sizes that a type does not have, and does not take.
NOT_OF_TYPE = {
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    "xlstm": ("v_head_dim",),
}


def sizes_of_type(model_type: str, layers: int) -> dict[str, Any]:
    """Return the particular sizes of a type, {} for most."""
    sizes: dict[str, Any] = _resolve(_OF_TYPE.get(model_type, {}), layers)
    return sizes


def inputs_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a sample's entries besides tokens, of types that need them."""
    config = getattr(model, "config", None)
    find = _INPUTS.get(getattr(config, "model_type", ""))
    return {} if find is None else find(config)


def _resolve(value: Any, layers: int) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(inner, layers) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [value[layer % len(value)] for layer in range(layers)]
    return {_LAYERS: layers, _HALF: layers // 2}.get(value, value) if isinstance(value, str) else value
