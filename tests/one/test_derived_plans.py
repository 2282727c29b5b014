"""Derived tensor plans: what runs on meta show, and that columns compute what the whole model does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MusicgenDecoderConfig, MusicgenForCausalLM

from plait.models import blocks_of, build_tp_plan, causal_lm_on_meta
from plait.plan.sharding import Style
from support.derived_models import (
    AttentionBlock,
    Block,
    Derived,
    LatentBlock,
    Layers,
    eager,
    fused,
    packed,
    short_convolution,
    sink,
)
from support.tensor_models import COMMON, plan_of, real
from support.threaded_ranks import differences

QKV = ("attn.q", "attn.k", "attn.v")
UP_DOWN = {"up": (24, 72), "down": (72, 24)}
COLUMN, GATHERED, ROW = (Style.COLUMN, False), (Style.COLUMN, True), (Style.ROW, False)
LATENT = {"attn.q": COLUMN, "attn.kv_b": COLUMN, "attn.out": ROW}
DERIVED: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[Style, bool]]]] = {
    "packed attention": (
        lambda: Block(24, 6),
        {"attn.qkv": GATHERED, "attn.proj": GATHERED, "fc1": COLUMN, "fc2": ROW},
    ),
    "fused attention of few keys": (
        lambda: AttentionBlock(fused),
        dict.fromkeys(QKV, COLUMN) | {"attn.out": ROW},
    ),
    "eager attention of few keys": (
        lambda: AttentionBlock(eager),
        dict.fromkeys(QKV, COLUMN) | {"attn.out": ROW},
    ),
    "attention with norms of each head": (
        lambda: AttentionBlock(lambda m, q, k, v: eager(m, m.norm(q), m.norm(k), v)),
        dict.fromkeys(QKV, COLUMN) | {"attn.out": ROW},
    ),
    "a norm of some heads": (
        lambda: AttentionBlock(lambda m, q, k, v: eager(m, m.norm(q), k, v) + m.norm(q.mean((0, 1, 2)))),
        dict.fromkeys([*QKV, "attn.out"], GATHERED),
    ),
    "a learned factor that heads share": (
        lambda: AttentionBlock(lambda m, q, k, v: eager(m, q * m.norm.weight, k, v)),
        dict.fromkeys(QKV, COLUMN) | {"attn.out": ROW},
    ),
    "a number for each head": (
        lambda: AttentionBlock(
            lambda m, q, k, v: eager(m, q * torch.arange(6.0, device=q.device).double()[:, None, None], k, v)
        ),
        dict.fromkeys([*QKV, "attn.out"], GATHERED),
    ),
    "a scale by the number of heads": (
        lambda: AttentionBlock(lambda m, q, k, v: eager(m, q, k, v, m.num_heads**-0.5)),
        dict.fromkeys([*QKV, "attn.out"], GATHERED),
    ),
    "heads that are mixed": (
        lambda: AttentionBlock(lambda m, q, k, v: eager(m, q, k, v).flip(1)),
        dict.fromkeys([*QKV, "attn.out"], GATHERED),
    ),
    "packed heads of another name": (
        lambda: Layers(packed, mix=(24, 72), out=(24, 24)),
        {"mix": COLUMN, "out": ROW},
    ),
    "a gate": (
        lambda: Layers(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), gate=(24, 72), **UP_DOWN),
        {"gate": COLUMN, "up": COLUMN, "down": ROW},
    ),
    "a factor of all features, whose gradient is their sum": (
        lambda: Layers(lambda m, x: m.down(m.up(x) * m.one(x).sigmoid()), one=(24, 1), **UP_DOWN),
        {"up": COLUMN, "down": ROW, "one": (Style.MLA_LATENT, False)},
    ),
    "a mask": (
        lambda: Layers(lambda m, x: m.down(m.up(x) * (x[..., :1] > 0)), **UP_DOWN),
        {"up": COLUMN, "down": ROW},
    ),
    "a norm between": (
        lambda: Layers(lambda m, x: m.down(m.norm(m.up(x))), **UP_DOWN),
        {"up": GATHERED, "down": GATHERED},
    ),
    "a parameter for each feature": (
        lambda: Layers(lambda m, x: m.down(m.scale * m.up(x)), **UP_DOWN),
        {"up": COLUMN, "down": ROW},
    ),
    "a key that heads share": (
        LatentBlock,
        {**LATENT, "attn.kv_a": (Style.MLA_LATENT, False)},
    ),
    "a normed key, in memory that is filled": (
        lambda: LatentBlock(fills=True),
        {**LATENT, "attn.kv_a": (Style.MLA_LATENT, False)},
    ),
    "a shared key that the stream reads too": (
        lambda: LatentBlock(reads=True),
        dict.fromkeys([*LATENT, "attn.kv_a"], GATHERED),
    ),
    "a sink for each head": (
        lambda: AttentionBlock(sink, 6),
        dict.fromkeys(QKV, COLUMN) | {"attn.out": ROW},
    ),
    "a gate and a convolution of each channel": (
        lambda: Layers(short_convolution, mix=(24, 72), out=(24, 24)),
        {"mix": COLUMN, "conv": (Style.DEPTHWISE, False), "out": ROW},
    ),
    "a matrix for each head": (
        lambda: AttentionBlock(lambda m, q, k, v: eager(m, q * m.sinks, k, v), 6, 1, 4),
        dict.fromkeys([*QKV, "attn.out"], GATHERED),
    ),
    "small layers": (
        lambda: Layers(
            lambda m, x: m.down(m.up(x)) + m.b(m.a(x)), a=(24, 2), b=(2, 24), up=(24, 240), down=(240, 24)
        ),
        {"up": COLUMN, "down": ROW},
    ),
    "another use of the features": (
        lambda: Layers(lambda m, x: m.down(u := m.up(x).relu()) + u.mean(-1, keepdim=True), **UP_DOWN),
        {"up": GATHERED, "down": GATHERED},
    ),
    "a weight that is read by a function": (
        lambda: Layers(lambda m, x: m.down(m.up(x).relu()) + F.linear(x, m.up.weight)[..., :24], **UP_DOWN),
        {"down": GATHERED},
    ),
    "three in a row": (
        lambda: Layers(lambda m, x: m.last(m.down(m.up(x).relu()).relu()), last=(24, 24), **UP_DOWN),
        {"up": COLUMN, "down": ROW, "last": GATHERED},
    ),
    "a sum with the input in place": (
        lambda: Layers(lambda m, x: m.last(x.clone().add_(m.first(x))), first=(24, 24), last=(24, 24)),
        {"first": GATHERED, "last": GATHERED},
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_plan_gathers_what_runs_do_not_show_to_be_independent(name: str) -> None:
    block, expected = DERIVED[name]
    model = Derived(block)
    plan = plan_of(model, 1, 2)
    layers = {layer.module: (layer.style, layer.gathers) for layer in plan.layers}
    assert {name: layers.get(f"blocks.1.{name}") for name in expected} == expected
    assert sum(name.startswith("blocks.1.") for name in layers) == len(expected)
    for cols in (2, 3):
        assert differences(model, plan_of(model, 1, cols)) == {}


@pytest.mark.parametrize("kind", ["bert", "rwkv"])
def test_a_derived_plan_of_a_family_computes_what_the_model_does(kind: str) -> None:
    model = real(causal_lm_on_meta({"model_type": kind, **COMMON, "is_decoder": True}))
    plan = plan_of(model, 1, 2)
    assert sum(layer.style in (Style.COLUMN, Style.ROW) for layer in plan.layers) >= 6
    assert differences(model, plan) == {}


def test_an_activation_that_all_blocks_share_is_found_by_each_of_its_names() -> None:
    model = causal_lm_on_meta({"model_type": "openai-gpt", "n_layer": 3, "n_embd": 24, "n_head": 4})
    assert model.transformer.h[0].mlp.act is model.transformer.h[1].mlp.act
    assert plan_of(model, 1, 2).layers


def test_a_list_of_heads_is_no_wrapper_of_the_largest() -> None:
    """A model that returns the logits of several heads as one tensor is divided in its blocks only."""
    sizes = {"hidden_size": 24, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = MusicgenForCausalLM(
            MusicgenDecoderConfig(**sizes, vocab_size=64, num_codebooks=2, pad_token_id=None)
        )
    ids, seen = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(2, 5, 24)
    batch = {"input_ids": ids, "encoder_hidden_states": seen}
    plan = build_tp_plan(model, 1, 2, sequence=False, blocks=blocks_of(model, None, batch), batch=batch)
    assert not [layer.module for layer in plan.layers if "lm_heads" in layer.module]
    assert [layer.module for layer in plan.layers if "fc1" in layer.module]
