"""Small models of every family that tensor parallelism cuts."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from plait.models import blocks_of, build_tp_plan, causal_lm_on_meta
from plait.plan.sharding import ParamSharding, TPPlan

LENGTH = 7  # tokens of a sequence

COMMON = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
ALIBI = {"alibi": True, "multi_query": False, "new_decoder_architecture": False, "num_kv_heads": 6}

# By a name of ours: the model type, and what its configuration has of its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 6}),
    "gemma2": ("gemma2", {"head_dim": 4}),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "gpt2": ("gpt2", {}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    "gptj": ("gptj", {"rotary_dim": 2}),
    "opt": ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 16}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon multi-query": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "falcon by head": ("falcon", ALIBI),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "deepseek_v2": ("deepseek_v2", {**MLA, **EXPERTS, "num_key_value_heads": 6}),
    "deepseek_v2 dense": (
        "deepseek_v2",
        {**MLA, **EXPERTS, "num_key_value_heads": 6, "first_k_dense_replace": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {**MLA, **EXPERTS, "num_key_value_heads": 6}),
}


def small(name: str, **more: Any) -> PreTrainedModel:
    """On meta."""
    kind, own = FAMILIES[name]
    return causal_lm_on_meta({"model_type": kind, **COMMON, **own, **more})


def plan_of(
    model: nn.Module, rows: int, cols: int, *, sequence: bool = False, given: dict[str, str] | None = None
) -> TPPlan:
    return build_tp_plan(model, rows, cols, sequence=sequence, blocks=blocks_of(model), given=given)


def places(plan: TPPlan) -> Iterator[tuple[int, int]]:
    return itertools.product(range(plan.rows), range(plan.cols))


def piece(whole: Tensor, cut: ParamSharding, row: int, col: int) -> Tensor:
    """What the rank at this place holds of a parameter."""
    for dim, ranges in enumerate(cut.ranges(whole.shape, row, col)):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return whole


def real(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with random weights, in float64, in training mode without dropout."""
    made = AutoModelForCausalLM.from_config(model.config, experts_implementation="eager").double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return made.eval()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits.double()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
