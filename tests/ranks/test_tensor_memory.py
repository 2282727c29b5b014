"""Memory that tensor parallelism keeps for backward: estimated, measured, and by published formulas."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import plait
from support import hf_models, programs
from support.pool import Pool
from support.tensor_cost import Activations, gpt2_activation_bytes, llama_activation_bytes

PLANS = ["tp=2", "tp=2 sp=true", "tp=2x2", "tp=2 sp=true recompute=selective"]


def _kept(family: str, plan: str) -> tuple[int | None, int | None]:
    """Estimated before, and measured in, the first step."""
    engine = plait.parallelize(hf_models.model_of(family, exact=False), f"{plan} precision=fp32", seed=3)
    estimated = engine.estimated_memory((programs.SEQUENCES, programs.LENGTH)).activations
    ids = programs.batches(1)[0]["input_ids"]
    engine.step({"input_ids": ids, "labels": ids})  # each but a row's last token has a target
    return estimated, engine.memory().activations


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "falcon"])
def test_bytes_kept_by_a_grid_are_estimated_exactly(pool: Pool, family: str, plan: str) -> None:
    for estimated, measured in pool.run(_kept, 4 if "x2" in plan else 2, family, plan):
        assert estimated is not None
        assert estimated == measured


H, HEADS, KV_HEADS, FFN, BATCH, LENGTH = 256, 8, 4, 512, 2, 128
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": H,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": LENGTH,
    },
    # Attention's kernel on the CPU knows no dropout.
    "gpt2": {"n_embd": H, "n_head": HEADS, "n_positions": LENGTH, "resid_pdrop": 0.1},
}


def _of_a_block(family: str, plan: str, more: dict[str, Any]) -> float:
    """Bytes that a block keeps: what four keep more than two, in a step, halved."""
    kept = []
    for blocks in (2, 4):
        layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": blocks}
        config = hf_models.config_of(family, **{**SIZES[family], **layers, **more})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        engine = plait.parallelize(model, f"{plan} precision=bf16", optimizer=torch.optim.SGD)
        ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
        engine.step({"input_ids": ids, "labels": ids})
        activations = engine.memory().activations
        assert activations is not None
        kept.append(activations)
    return (kept[1] - kept[0]) / 2


def _sizes(cols: int, sequence: bool) -> Activations:
    return Activations(BATCH * LENGTH, H, HEADS, LENGTH, cols, sequence, flash=True)


def _plan(cols: int, sequence: bool) -> str:
    return f"tp={cols}" + (" sp=true" if sequence else "")


CUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


@pytest.mark.parametrize(("cols", "sequence"), CUTS)
def test_a_llama_block_keeps_the_bytes_of_the_formula(pool: Pool, cols: int, sequence: bool) -> None:
    said = llama_activation_bytes(_sizes(cols, sequence), kv_heads=KV_HEADS, head_dim=H // HEADS, ffn=FFN)
    for kept in pool.run(_of_a_block, cols, "llama", _plan(cols, sequence), {}):
        assert kept == pytest.approx(said, rel=0.01)


@pytest.mark.parametrize(("cols", "sequence"), CUTS)
@pytest.mark.parametrize(("activation", "tensors"), [("gelu_new", 4), ("gelu_pytorch_tanh", 1)])
def test_a_gpt2_block_keeps_the_bytes_of_the_formula(
    pool: Pool, activation: str, tensors: int, cols: int, sequence: bool
) -> None:
    said = gpt2_activation_bytes(_sizes(cols, sequence), mask_bytes=2, gelu_tensors=tensors)
    more = {"activation_function": activation}
    for kept in pool.run(_of_a_block, cols, "gpt2", _plan(cols, sequence), more):
        assert kept == pytest.approx(said, rel=0.01)
