"""Tensor plans of families for which transformers ships none, or one that shards less than is possible.

Patterns match paths below the base model; styles as in `models/sharding/styles.py`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models.sharding import mixer_families
from plait.models.sharding.builder import TPPlanBuilder
from plait.models.sharding.heads import Heads
from plait.models.sharding.styles import Patterns
from plait.models.sharding.styles import plan_of_layers as _plan
from plait.models.task import pretrained_base
from plait.plan.sharding import ArgumentSharding

_BLOOM = _plan(
    "h.*", "self_attention.query_key_value mlp.dense_h_to_4h", "self_attention.dense mlp.dense_4h_to_h"
)


def _bloom(config: Any, _cols: int) -> Patterns:
    """Queries, keys and values are interleaved by head, so splitting by heads keeps them together."""
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ModelError(
            "cannot shard a bloom model that slices its own weights",
            given=f"pretraining_tp={config.pretraining_tp} slow_but_exact=True",
            expected="weights that are used in full",
            hint="slow_but_exact=False",
        )
    return _BLOOM


def _falcon(config: Any, cols: int) -> Patterns:
    """Three layouts of one matrix: by head, one key for all heads, one key for a group of heads.

    If columns share keys, one part of the matrix is sharded and another shared: its output is gathered
    instead.
    """
    grouped = config.new_decoder_architecture
    kv_heads = config.num_kv_heads if grouped else 1 if config.multi_query else config.num_attention_heads
    packed, end = ("grouped_colwise" if grouped or config.multi_query else "colwise"), "rowwise"
    if cols > kv_heads:
        packed, end = "colwise_gather_output", "rowwise_split_input"
    return {
        **_BLOOM,
        "h.*.self_attention.query_key_value": packed,
        "h.*.self_attention.dense": end,
    }


# Their own plans gather gate and up, which are halves of one matrix: each half can be sharded.
_PACKED_GATE = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}

# Their own plan is colwise, for a single matrix; but gate and up are concatenated.
_PACKED_EXPERTS = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}

# Experts that all tokens go to, in tensors of the same form as those of the others.
_SHARED_EXPERTS = {"layers.*.mlp.shared_experts": "moe_tp_experts"}

# A layer that reads the values of all heads decides which tokens a head sees.
_GATHERED_ATTENTION = {
    **dict.fromkeys((f"layers.*.self_attn.{key}_proj" for key in "qkv"), "colwise_gather_output"),
    "layers.*.self_attn.dt_proj": "replicate",
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}

# Experts that return their input are next to the others: a sum over columns would count them several times.
_REPLICATED_EXPERTS = dict.fromkeys(
    (f"layers.*.mlp.experts{part}" for part in ("", ".gate_up_proj", ".down_proj", ".identity_expert")),
    "replicate",
)

# Its code reads where patches of bytes end, so no plan can be derived from a run on meta.
_BLT = _plan(
    "*.layers.*",
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
    "self_attn.o_proj mlp.down_proj",
)


FAMILIES: dict[str, Patterns | Callable[[Any, int], Patterns]] = {
    "gpt2": {"h.*.attn.c_attn": "packed_colwise:3", **_plan("h.*", "mlp.c_fc", "attn.c_proj mlp.c_proj")},
    "gpt_neo": _plan(
        "h.*",
        "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj mlp.c_fc",
        "attn.attention.out_proj mlp.c_proj",
    ),
    "gptj": _plan("h.*", "attn.q_proj attn.k_proj attn.v_proj mlp.fc_in", "attn.out_proj mlp.fc_out"),
    "opt": _plan(
        "decoder.layers.*", "self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1", "self_attn.out_proj fc2"
    ),
    "bloom": _bloom,
    "blt": _BLT,
    "falcon": _falcon,
    "deepseek_v3": mixer_families.LATENT_ATTENTION,
    "doge": _GATHERED_ATTENTION,
    # It reads numbers of tokens from the device, so no plan can be derived from a run on meta.
    "jetmoe": {"layers.*.self_attention.kv_proj": "colwise_gather_output"},
    "longcat_flash": _REPLICATED_EXPERTS,
    "phi3": _PACKED_GATE,
    "glm": _PACKED_GATE,
    "glm4": _PACKED_GATE,
    "inkling_text": {**_PACKED_EXPERTS, **_SHARED_EXPERTS},
    "inkling2_text": _PACKED_EXPERTS,
    **dict.fromkeys(("lfm2", "lfm2_moe"), mixer_families.LFM2),
    **dict.fromkeys(("mamba", "falcon_mamba"), mixer_families.MAMBA),
    "jamba": mixer_families.JAMBA,
    "zamba": mixer_families.zamba,
    "mamba2": mixer_families.mamba2,
    "bamba": mixer_families.bamba,
    "granitemoehybrid": mixer_families.granitemoehybrid,
    "nemotron_h": mixer_families.nemotron_h,
    "zamba2": mixer_families.zamba2,
    "qwen3_next": mixer_families.qwen3_next,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), mixer_families.qwen3_5),
    "olmo_hybrid": mixer_families.olmo_hybrid,
    "kimi_linear": mixer_families.kimi_linear,
    "recurrent_gemma": mixer_families.recurrent_gemma,
}

# Per-head keyword arguments of attention modules, and the dim of the heads.
_HEAD_ARGUMENTS = {"bloom": (("alibi", -3),), "falcon": (("alibi", -3), ("attention_mask", -3))}


def family_plan(model: nn.Module, cols: int) -> Patterns:
    """The plan that plait has for a transformers model, which overrides the model's own."""
    base = pretrained_base(model)
    if base is None or base.config.model_type not in FAMILIES:
        return {}
    family = FAMILIES[base.config.model_type]
    return family if isinstance(family, dict) else family(base.config.get_text_config(), cols)


def add_head_arguments(builder: TPPlanBuilder, heads: Heads) -> None:
    """Add the per-head arguments of an attention module whose layers are sharded by heads."""
    kind = getattr(builder.config, "model_type", None)
    for argument, dim in _HEAD_ARGUMENTS.get(kind or "", ()):
        sharding = ArgumentSharding(heads.module, argument, dim, heads.num_heads, heads.queries(1))
        if sharding not in builder.arguments:
            builder.arguments.append(sharding)
