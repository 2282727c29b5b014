"""Every causal language model of transformers that ships a tensor plan and can be built small: cut,
it computes what it does unsharded, or it is refused with an error."""

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import plait
from plait.errors import PlaitError
from plait.models.sharding.families import FAMILIES as BUILT_IN
from support.pool import Pool

AT_ONCE = 10  # architectures in one call of the pool
MOST_PARAMETERS = 3_000_000

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES |= {"n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SIZES |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1}
SIZES |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SIZES |= {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
SIZES |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
VARIANTS: list[dict[str, Any]] = [
    SIZES,
    {key: value for key, value in WITHOUT_HEAD_DIM.items() if key != "q_lora_rank"},
    {**WITHOUT_HEAD_DIM, "num_key_value_heads": 4},
]

PLANS = {"tp=2": 80, "tp=2 sp=true": 40, "tp=2x1": 40}  # how many are cut, at least


def small(kind: str) -> PreTrainedModel | None:
    """With random weights; None where there is no plan, or nothing small can be built and run."""
    for sizes in VARIANTS:
        try:
            config = CONFIG_MAPPING[kind](**sizes)
            if kind not in BUILT_IN and not config.get_text_config().base_model_tp_plan:
                return None
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
                continue
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            with torch.no_grad():
                model(torch.arange(16)[None] + 3, use_cache=False)
        except Exception:  # whatever a family's own code raises
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.ndim == 1:  # ones and zeros tell little
                    parameter += torch.randn_like(parameter) * 0.1
        return model
    return None


def _outcomes(kinds: list[str], plan: str) -> dict[str, str]:
    """The models that were built: an error, or nothing."""
    found = {}
    logging.set_verbosity_error()
    try:
        for kind in kinds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # families' own
                model = small(kind)
                if model is not None:
                    found[kind] = _probed(kind, model, plan)
    finally:
        logging.set_verbosity_warning()
    return found


def _probed(kind: str, model: PreTrainedModel, plan: str) -> str:
    try:
        plait.parallelize(model, plan, probe=True)
    except PlaitError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{kind} fails without an error of ours") from error
    return ""


# A number for every head; a sum of what a module gives, of whose input nothing is said.
ALWAYS = {"doge", "inkling_text"}

# Mixtures of experts; layers in the stream of which nothing is said.
UNSHARDED_STREAM = """
    afmoe aria_text axk1 axk2 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 dots1 dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite
    glm_moe_dsa granitemoe granitemoe_swa granitemoeshared hrm_text hunyuan_v1_moe hy_v3 hy_v4
    inkling2_text jamba kolibri1 laguna llama4_text mellum mimo_v2_flash minimax minimax_m2
    minimax_m3_vl_text mixtral nemotron_h olmo_hybrid olmoe phimoe qwen2_moe qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text solar_open youtu
"""
REFUSED = {
    "tp=2": ALWAYS,
    "tp=2 sp=true": ALWAYS | {*UNSHARDED_STREAM.split()},
    "tp=2x1": ALWAYS | {*UNSHARDED_STREAM.split(), "minicpm3"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
def test_every_architecture_computes_the_same_or_is_refused(pool: Pool, plan: str) -> None:
    outcomes: dict[str, str] = {}
    kinds = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    for begin in range(0, len(kinds), AT_ONCE):
        per_rank = pool.run(_outcomes, 2, kinds[begin : begin + AT_ONCE], plan, timeout_s=300)
        assert per_rank[0] == per_rank[1]
        outcomes |= per_rank[0]
    messages = {kind: message for kind, message in outcomes.items() if message}
    print(f"{plan}: {len(outcomes) - len(messages)} cut, {len(messages)} refused")
    assert {kind: message for kind, message in messages.items() if kind not in REFUSED[plan]} == {}
    assert all("\n  try     : " in message for message in messages.values())
    assert len(outcomes) - len(messages) >= PLANS[plan]
