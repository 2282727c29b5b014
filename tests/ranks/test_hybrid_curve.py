"""A hundred steps of a hybrid follow the one-process curve: what few steps would hide has grown by then."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import plait
from support import programs
from support.pool import Pool

STEPS, WARMUP, LR, LENGTH = 120, 40, 3e-3, 64
PLANS = ("pp=2 dp=2 tp=2 zero=1 micro=4", "dp=2 zero=3 tp=2x2")
CURVES = Path(__file__).resolve().parents[2] / "build" / "hybrid_curve.json"


def losses_under(plan: str) -> list[float]:
    """The demo's optimizer and schedule, on a smaller Llama that reads Python."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=True, **sizes))
    programs.with_exact_norms(model.double())
    adamw = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1}
    engine = plait.parallelize(model, f"{plan} precision=fp64", optimizer_args=adamw, clip_norm=1.0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    found = []
    for step in range(STEPS):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        for group in engine.optimizer.param_groups:
            group["lr"] = LR * (step / WARMUP if step < WARMUP else cosine)
        ids = text[torch.randint(len(text) - LENGTH, (8, 1)) + torch.arange(LENGTH)]
        share = ids[engine.data_rank :: engine.data_ranks]
        found.append(engine.step({"input_ids": share, "labels": share}).loss)
    return found


@pytest.mark.sweep
def test_hybrids_of_eight_ranks_follow_the_one_process_curve(pool: Pool) -> None:
    """Leaves the curves for tools/plot_hybrid_curve.py."""
    [expected] = pool.run(losses_under, 1, "dp=1", timeout_s=600)
    assert expected[-1] < 0.7 * expected[0], "it learns"
    curves = {"one process": expected}
    for plan in PLANS:
        curves[plan] = pool.run(losses_under, 8, plan, timeout_s=600)[0]
        assert curves[plan] == pytest.approx(expected, rel=1e-9)
    CURVES.parent.mkdir(exist_ok=True)
    CURVES.write_text(json.dumps(curves))
