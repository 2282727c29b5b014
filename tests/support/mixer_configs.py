"""Small configurations of families with state-space, recurrent or linear-attention mixers."""

from typing import Any

_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 6, "mamba_chunk_size": 8}
_DELTA = {
    **_LAYERS,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "head_dim": 12,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 6,
    "chunk_size": 8,
    "head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    "mamba": {"state_size": 6, "time_step_rank": 5, "use_bias": True},
    "falcon_mamba": {"state_size": 6, "time_step_rank": 5},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "attention_head_dim": 24,
        "n_mamba_heads": 4,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
    },
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 1, "state_size": 6, "chunk_size": 8},
    "grouped_mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 12,
        "n_groups": 4,
        "state_size": 6,
        "chunk_size": 8,
        "use_bias": True,
    },
    "bamba": {**_MAMBA2, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "nemotron_h": {**_NEMOTRON, "n_groups": 4, "num_hidden_layers": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "num_key_value_heads": 4,
        "attention_head_dim": 24,
        "n_mamba_heads": 8,
        "mamba_headdim": 12,
        "mamba_ngroups": 2,
        "mamba_d_state": 6,
        "chunk_size": 8,
        "adapter_rank": 4,
    },
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **_LAYERS,
        **LATENT,
        **_EXPERTS,
        "linear_num_heads": 4,
        "linear_head_dim": 6,
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": 1,
        "topk_group": 1,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 48,
        "attention_window_size": 8,
        "head_dim": 12,
    },
}
