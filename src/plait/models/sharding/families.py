"""Tensor plans of families for which transformers ships none, or none that cuts what can be cut.

Patterns are of paths below the base model; words as in `models/tensor_words.py`.
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
    """Queries, keys and values are interleaved by head: cut at heads they stay what they are."""
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ModelError(
            "a bloom model that multiplies slices of its weights by itself cannot be cut",
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

    Where columns would share keys, the matrix has a part that is cut and a part that is shared: its output is
    gathered instead.
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


# Latent attention, as transformers says it of deepseek_v2. A layer that a configuration does not have is not
# missed.
_DEEPSEEK = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}

# Their own plans gather gate and up, which are halves of one matrix: each half can be cut.
_PACKED_GATE = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}

# It says colwise, which is of one matrix; gate and up lie one after the other.
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

# Forwards that compute what nn.Linear's does.
LINEAR_FORWARDS = (nn.Linear.forward, FalconLinear.forward)

# Keywords of attention modules that hold something of every head, and the dim in which.
_HEAD_ARGUMENTS = {"bloom": (("alibi", -3),), "falcon": (("alibi", -3), ("attention_mask", -3))}


def family_plan(model: nn.Module, cols: int) -> Patterns:
    """What this house says of a transformers model, over what the model says itself."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, PreTrainedModel) or kind not in FAMILIES:
        return {}
    family = FAMILIES[kind]
    return family if isinstance(family, dict) else family(model.config, cols)


def add_head_arguments(draft: TPPlanBuilder, heads: Heads) -> None:
    """What an attention module, whose layers are cut at heads, is handed for all of them."""
    kind = getattr(draft.config, "model_type", None)
    for argument, dim in _HEAD_ARGUMENTS.get(kind or "", ()):
        cut = ArgumentSharding(heads.module, argument, dim, heads.count, heads.queries(1))
        if cut not in draft.arguments:
            draft.arguments.append(cut)
