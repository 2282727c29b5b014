"""The probe: passes where the cut model is the whole one, catches code that a plan does not fit, changes
nothing of a training."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb

import plait
from plait.errors import ConfigError, ModelError
from plait.models import causal_lm_on_meta
from support import hf_models, programs
from support.pool import Pool
from support.trainings import copied, differing


def num_ranks(plan: str) -> int:
    return plait.Plan.parse(plan).num_ranks


def _probed(family: str, plan: str, options: dict[str, Any] | None = None, probe: Any = True) -> plait.Engine:
    return plait.parallelize(
        hf_models.model_of(family, exact="fp64" in plan),
        plan,
        optimizer_args=programs.ADAMW,
        probe=probe,
        seed=3,
        **options or {},
    )


def _passes(family: str, plans: list[str]) -> None:
    for plan in plans:
        _probed(family, plan)


PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


@pytest.mark.parametrize("grid", ["tp=2", "tp=2x1", "tp=2x2", "tp=2 sp=true"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_models_that_are_cut_rightly_pass(pool: Pool, family: str, grid: str) -> None:
    pool.run(_passes, num_ranks(grid), family, [f"{grid} precision={word}" for word in PRECISIONS])


@pytest.mark.parametrize(
    "words",
    [
        "tp=2 zero=3",
        "tp=2 zero=3 micro=2 precision=bf16",
        "tp=2 zero=1 reduce=bf16",
        "tp=2x1 zero=2 precision=bf16 reduce=bf16 micro=3",
        "tp=2 zero=2 offload=cpu recompute=full",
        "zero=2 shard=2 tp=2 sp=true optim_dtype=bf16",
        "tp=2 zero=2 reduce=fp16 precision=bf16",
    ],
)
def test_a_probe_passes_with_data_ranks(pool: Pool, words: str) -> None:
    pool.run(_passes, 4, "tied_llama", [f"dp=2 {words}"])


def _refused(plan: str) -> str:
    with pytest.raises(ConfigError, match="a probe compares gradients") as caught:
        _probed("llama", plan)
    return str(caught.value)


def test_meaningless_gradients_are_not_compared(pool: Pool) -> None:
    for words in ("int8", "powersgd:2"):
        messages = pool.run(_refused, 4, f"dp=2 tp=2 reduce={words}")
        assert all(f"reduce={words}" in message and "reduce=fp32" in message for message in messages)


# --- it changes nothing

SMALL = {"n_positions": 64, "vocab_size": programs.VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}


def _trained(plan: str, probe: bool) -> Any:
    """With dropout."""
    torch.manual_seed(1)
    model = causal_lm_on_meta({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, **SMALL})
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, probe=probe, seed=3)
    assert any(module.training and getattr(module, "p", 0) > 0 for module in model.modules())
    drawn = torch.rand(3)
    results = [engine.step(programs.share_of(batch, engine)) for batch in programs.batches(3)]
    return results, copied(engine.state()), engine.memory(), drawn, engine.loss_scale


@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "tp=2 dp=2 zero=3 micro=2",
        "tp=2 sp=true dp=2 zero=3 reshard=step precision=bf16",
        "tp=2x1 dp=2 zero=2 micro=2 precision=bf16 reduce=bf16",
        "tp=2x2 precision=fp16 micro=2",
        "tp=2 dp=2 zero=1 reduce=fp16",
        "tp=2 dp=2 zero=1 micro=2 offload=cpu accumulate=unsharded",
    ],
)
def test_a_training_after_a_probe_has_the_bits_of_one_without(pool: Pool, plan: str) -> None:
    ranks = num_ranks(plan)
    pairs = zip(
        pool.run(_trained, ranks, plan, True),
        pool.run(_trained, ranks, plan, False),
        strict=True,
    )
    for (results, state, memory, drawn, scale), (expected, other, held, plain, at) in pairs:
        assert results == expected
        assert differing(state, other) == []
        assert memory == held
        assert torch.equal(drawn, plain), "the user's generator was moved"
        assert scale == at


# --- what it is for


class RollingAttention(LlamaAttention):
    """Each head's values go where the next head's belong. Every shape is what it is without."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
        q, k, v = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(self.moved(mixed).transpose(1, 2).flatten(2)), None

    def moved(self, mixed: Tensor) -> Tensor:
        return mixed.roll(1, dims=1)


class StillAttention(RollingAttention):
    """The same, and heads stay where they are: code of one's own that a plan fits."""

    def moved(self, mixed: Tensor) -> Tensor:
        return mixed


class SoftmaxMLP(LlamaMLP):
    """Features of the feed-forward depend on one another."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x).softmax(-1) * self.up_proj(x))


def with_classes(attention: type[nn.Module] | None, mlp: type[nn.Module] | None) -> nn.Module:
    """A llama of which one block is of other classes."""
    model: Any = programs.rough_llama()
    layer = model.model.layers[1]
    layer.self_attn.__class__ = attention or layer.self_attn.__class__
    layer.mlp.__class__ = mlp or layer.mlp.__class__
    return model


# A user's table is trusted. The family's is not for such code: see test_code_that_the_plan_fits_passes.
TABLE = {
    **{f"model.layers.*.{name}_proj": "colwise" for name in ("self_attn.[qkv]", "mlp.gate", "mlp.up")},
    **{f"model.layers.*.{name}_proj": "rowwise" for name in ("self_attn.o", "mlp.down")},
}


def _message(classes: Any, plan: str) -> str:
    with pytest.raises(ModelError, match="computes a different function than the full model") as caught:
        plait.parallelize(with_classes(*classes), plan, probe=True, seed=3, tensor_plan=TABLE)
    return str(caught.value)


@pytest.mark.parametrize(
    "plan",
    ["tp=2", "tp=2 precision=bf16", "tp=2x2 precision=fp64", "tp=2 sp=true", "dp=2 tp=2 zero=3 micro=2"],
)
@pytest.mark.parametrize(
    "classes", [(RollingAttention, None), (None, SoftmaxMLP)], ids=["attention that rolls", "softmax mlp"]
)
def test_code_that_the_plan_does_not_fit_is_caught_on_every_rank(pool: Pool, classes: Any, plan: str) -> None:
    messages = pool.run(_message, num_ranks(plan), classes, plan)
    assert len(set(messages)) == 1
    names = [name for name, _ in programs.rough_llama().named_parameters()]
    assert any(f"the gradient of {name} differs by" in messages[0] for name in names), messages[0]
    assert f"{plait.Plan.parse(plan)}: " in messages[0]
    assert "tp=1" in messages[0]


def _passes_with(classes: Any, plan: str, words: dict[str, str] | None) -> Any:
    model = with_classes(*classes)
    engine = plait.parallelize(model, plan, probe=True, seed=3, tensor_plan=words)
    return engine.step(programs.batches(1)[0]).skipped


@pytest.mark.parametrize(
    ("classes", "plan", "words"),
    [
        ((StillAttention, None), "tp=2", None),
        ((RollingAttention, None), "tp=2x1", None),  # every rank has all heads
        ((RollingAttention, None), "tp=2", None),  # a plan is derived, which gathers
        ((None, SoftmaxMLP), "tp=2", None),
        ((None, SoftmaxMLP), "dp=2 zero=3", None),
        (
            (None, SoftmaxMLP),
            "tp=2",
            {f"model.layers.1.mlp.{name}_proj": "replicate" for name in ("gate", "up", "down")},
        ),
    ],
)
def test_code_that_the_plan_fits_passes(pool: Pool, classes: Any, plan: str, words: Any) -> None:
    """So that what is caught is the mixing, not the class; and the error's suggestion works."""
    assert not any(pool.run(_passes_with, num_ranks(plan), classes, plan, words))


# --- modules that are no language models


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Mixing(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


def _squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch["labels"]).square().sum(), outputs.numel()


def _plain(kind: type[nn.Module], probe: Any) -> str:
    """The error, or nothing."""
    words = {"up": "colwise", "down": "rowwise"}
    torch.manual_seed(2)
    try:
        plait.parallelize(kind(), "tp=2", loss=_squares, tensor_plan=words, probe=probe)
    except ModelError as error:
        return str(error)
    return ""


def test_a_module_that_is_no_language_model_is_probed_with_a_batch(pool: Pool) -> None:
    batch = {"x": torch.randn(4, 12), "labels": torch.randn(4, 12)}
    for message in pool.run(_plain, 2, Plain, True):
        assert "this model's are unknown" in message
        assert "Plain" in message
        assert "probe=batch, a dict" in message
    assert pool.run(_plain, 2, Plain, batch) == ["", ""]
    for message in pool.run(_plain, 2, Mixing, batch):
        assert "a different function" in message
