"""Tensor plans of families for which transformers ships none, or one that shards less than is possible.

Patterns match paths below the base model; styles as in `models/sharding/styles.py`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear

from plait.errors import ModelError
from plait.models.sharding.builder import TPPlanBuilder
from plait.models.sharding.heads import Heads
from plait.plan.sharding import ArgumentSharding

Patterns = dict[str, str]


_GPT2 = {
    "h.*.attn.c_attn": "packed_colwise:3",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}


_GPT_NEO = {
    "h.*.attn.attention.q_proj": "colwise",
    "h.*.attn.attention.k_proj": "colwise",
    "h.*.attn.attention.v_proj": "colwise",
    "h.*.attn.attention.out_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}


_GPTJ = {
    "h.*.attn.q_proj": "colwise",
    "h.*.attn.k_proj": "colwise",
    "h.*.attn.v_proj": "colwise",
    "h.*.attn.out_proj": "rowwise",
    "h.*.mlp.fc_in": "colwise",
    "h.*.mlp.fc_out": "rowwise",
}


_OPT = {
    "decoder.layers.*.self_attn.q_proj": "colwise",
    "decoder.layers.*.self_attn.k_proj": "colwise",
    "decoder.layers.*.self_attn.v_proj": "colwise",
    "decoder.layers.*.self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise",
    "decoder.layers.*.fc2": "rowwise",
}


def _bloom(config: Any, _cols: int) -> Patterns:
    """Queries, keys and values are interleaved by head, so splitting by heads keeps them together."""
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ModelError(
            "cannot shard a bloom model that slices its own weights",
            given=f"pretraining_tp={config.pretraining_tp} slow_but_exact=True",
            hint="slow_but_exact=False",
        )
    return {
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }


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
        "h.*.self_attention.query_key_value": packed,
        "h.*.self_attention.dense": end,
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }


# Latent attention, as in transformers' plan for deepseek_v2. Patterns for layers that a configuration does
# not have are ignored.
_DEEPSEEK = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}

# Their own plans gather gate and up, which are halves of one matrix: each half can be sharded.
_PACKED_GATE = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}

# Their own plan is colwise, for a single matrix; but gate and up are concatenated.
_PACKED_EXPERTS = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}


FAMILIES: dict[str, Patterns | Callable[[Any, int], Patterns]] = {
    "gpt2": _GPT2,
    "gpt_neo": _GPT_NEO,
    "gptj": _GPTJ,
    "opt": _OPT,
    "bloom": _bloom,
    "falcon": _falcon,
    "deepseek_v3": _DEEPSEEK,
    "phi3": _PACKED_GATE,
    "glm": _PACKED_GATE,
    "glm4": _PACKED_GATE,
    "inkling_text": _PACKED_EXPERTS,
    "inkling2_text": _PACKED_EXPERTS,
}

# Forwards that compute the same as nn.Linear's.
LINEAR_FORWARDS = (nn.Linear.forward, FalconLinear.forward)

# Per-head keyword arguments of attention modules, and the dim of the heads.
_HEAD_ARGUMENTS = {"bloom": (("alibi", -3),), "falcon": (("alibi", -3), ("attention_mask", -3))}


def family_plan(model: nn.Module, cols: int) -> Patterns:
    """The plan that plait has for a transformers model, which overrides the model's own."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, PreTrainedModel) or kind not in FAMILIES:
        return {}
    family = FAMILIES[kind]
    return family if isinstance(family, dict) else family(model.config, cols)


def add_head_arguments(builder: TPPlanBuilder, heads: Heads) -> None:
    """Add the per-head arguments of an attention module whose layers are sharded by heads."""
    kind = getattr(builder.config, "model_type", None)
    for argument, dim in _HEAD_ARGUMENTS.get(kind or "", ()):
        sharding = ArgumentSharding(heads.module, argument, dim, heads.num_heads, heads.queries(1))
        if sharding not in builder.arguments:
            builder.arguments.append(sharding)
