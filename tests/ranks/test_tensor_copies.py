"""Replicated tensors have the same bits on all ranks of a grid, step after step."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import plait
from support import hf_models, programs
from support.pool import Pool

STEPS = 6


def _copies(plan: str, family: str) -> dict[str, Tensor]:
    """This rank's parameters that no axis cuts, after some steps."""
    engine = plait.parallelize(
        hf_models.model_of(family, exact=False), plan, optimizer_args=programs.ADAMW, clip_norm=programs.CLIP
    )
    for batch in programs.batches(STEPS):
        assert not engine.step(programs.share_of(batch, engine)).skipped
    return _whole_ones(engine)


def _whole_ones(engine: Any) -> dict[str, Tensor]:
    pieces = [piece for unit in engine.layout.units for piece in unit.params]
    whole = {piece.name for piece in pieces if piece.boxes.shape == piece.full_shape}
    found = {name: p.detach().clone() for name, p in engine.model.named_parameters() if name in whole}
    assert any("norm" in name or "ln_" in name for name in found)
    return found


def _assert_same_bits(found: list[dict[str, Tensor]]) -> None:
    differing = [
        name for name in found[0] for mine in found[1:] if not torch.equal(found[0][name], mine[name])
    ]
    assert not differing, f"copies drift apart: {sorted(set(differing))[:4]}"


@pytest.mark.parametrize(
    ("plan", "ranks", "family"),
    [
        ("tp=3", 3, "biased_llama"),
        ("tp=3 optim_dtype=bf16", 3, "biased_llama"),
        ("dp=2 tp=2 reduce=int8", 4, "llama"),
        ("dp=2 tp=3 reduce=int8 optim_dtype=bf16 zero=2", 6, "qwen3"),
        ("dp=2 tp=2 sp=true precision=bf16 reduce=bf16", 4, "gpt2"),
        ("dp=2 tp=2 reduce=powersgd:2", 4, "llama"),
    ],
)
def test_copies_never_drift_apart(pool: Pool, plan: str, ranks: int, family: str) -> None:
    _assert_same_bits(pool.run(_copies, ranks, plan, family))


def _with_dropout(seed: int) -> tuple[dict[str, Tensor], float]:
    """A loop of one's own, on ranks whose own generators differ."""
    torch.manual_seed(seed + plait.comm.connect().rank)
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=61, n_positions=64))
    engine = plait.parallelize(model, "tp=2 micro=2", optimizer_args=programs.ADAMW)
    loss = 0.0
    for batch in programs.batches(3):
        for number in range(2):
            micro = {key: value.chunk(2)[number] for key, value in batch.items()}
            engine.backward(*engine.loss(micro))
        loss = engine.update().loss
    return _whole_ones(engine), loss


def test_dropout_agrees_in_a_custom_loop(pool: Pool) -> None:
    (one, loss), (other, other_loss) = pool.run(_with_dropout, 2, 5)
    _assert_same_bits([one, other])
    assert loss == other_loss == pool.run(_with_dropout, 2, 6)[0][1]
