"""Properties read from models: units, initial weights, bytes kept for backward, loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    PreTrainedModel,
)

from plait.api import parallelize
from plait.comm import connect
from plait.engine.loss import choose_loss
from plait.engine.spec import Arguments, validate
from plait.errors import ModelError, PlanError
from plait.models import (
    FlopFacts,
    activation_bytes,
    active_parameters,
    blocks_of,
    causal_lm_on_meta,
    copy_to_meta,
    forward_inputs,
    pretrained_causal_lm,
    running_on_meta,
    unit_facts,
    watch_activations,
)
from plait.planner import ModelShape

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
}


def small(kind: str) -> PreTrainedModel:
    common = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return causal_lm_on_meta({"model_type": kind, **common, **SMALL[kind]})


@pytest.mark.parametrize("kind", SMALL)
def test_every_parameter_is_in_one_unit_and_each_block_is_one(kind: str) -> None:
    model = small(kind)
    units = unit_facts(model, blocks_of(model))
    names = [tensor.name for unit in units for tensor in unit.tensors]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert len(blocks_of(model)) == 2
    assert units[0].name == "embedding"
    assert [unit.name for unit in units[1:3]] == [name for name, _ in blocks_of(model)]


def test_norms_and_biases_do_not_decay_and_matrices_do() -> None:
    model = small("gpt2")
    tensors = {t.name: t.group == 0 for unit in unit_facts(model, blocks_of(model)) for t in unit.tensors}
    assert tensors["transformer.wte.weight"]
    assert tensors["transformer.h.0.attn.c_attn.weight"]
    assert not tensors["transformer.h.0.attn.c_attn.bias"]
    assert not tensors["transformer.h.0.ln_1.weight"]


def test_plain_modules_have_units_too() -> None:
    assert [unit.name for unit in unit_facts(nn.Linear(3, 4), [])] == ["head"]
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert [unit.name for unit in unit_facts(layers, blocks_of(layers))] == ["0", "2"]


@pytest.mark.parametrize("kind", SMALL)
def test_a_meta_model_is_materialized_with_transformers_initial_weights(kind: str) -> None:
    """Same zeros, same ones, same spread per tensor as the model's own initialisation off meta."""
    model = small(kind)
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(model.config)
    ours = parallelize(model, "dp=1", seed=1).full_parameters()
    for name, theirs in reference.named_parameters():
        spread = theirs.std(correction=0).item()
        assert ours[name].std(correction=0).item() == pytest.approx(spread, rel=0.25, abs=1e-12), name
        assert ours[name].mean().item() == pytest.approx(
            theirs.mean().item(), abs=8 * spread / theirs.numel() ** 0.5 + 1e-12
        ), name
    for name, theirs in reference.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], theirs), name


def test_a_modules_initial_weights_depend_on_seed_and_name_alone() -> None:
    two = parallelize(small("llama"), "dp=1", seed=1).full_parameters()
    again = parallelize(small("llama"), "dp=1", seed=1).full_parameters()
    other = parallelize(small("llama"), "dp=1", seed=2).full_parameters()
    deeper_model = causal_lm_on_meta({**small("llama").config.to_dict(), "num_hidden_layers": 3})
    deeper = parallelize(deeper_model, "dp=1", seed=1).full_parameters()
    for name, tensor in two.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name])
    key = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(two[key], other[key])
    assert not torch.equal(two[key], two["model.layers.0.mlp.up_proj.weight"])


class _Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gate = nn.Parameter(torch.ones(2))


def test_a_parameter_that_nothing_initialises_is_named_not_trained_as_garbage() -> None:
    with torch.device("meta"):
        model = _Forgetful()
    with pytest.raises(ModelError, match="without an initial value") as caught:
        parallelize(model, "dp=1", loss=lambda *_: (torch.zeros(()), 1))
    assert caught.value.given == "gate"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SMALL)
def test_bytes_kept_for_backward_are_estimated_on_meta(kind: str, dtype: torch.dtype) -> None:
    config = small(kind).config
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    loss = choose_loss(model, None)
    batch = {key: torch.zeros(3, 16, dtype=torch.long) for key in ("input_ids", "labels")}
    with watch_activations(model) as watch:
        loss(model(**forward_inputs(model, batch)), batch)
    on_meta = {key: value.to("meta") for key, value in batch.items()}
    # some models build small helpers from lists, which meta places elsewhere
    copied = copy_to_meta(model)
    found = activation_bytes(
        copied, lambda: loss(copied(**forward_inputs(copied, on_meta)), on_meta), torch.device("cpu")
    )
    assert found == pytest.approx(watch.total, rel=0.02)


def test_equal_operators_on_meta_give_new_tensors_and_hidden_views_stay_views() -> None:
    x = torch.empty(4, 6, device="meta")
    with running_on_meta(torch.device("cpu")):
        first, second, other = x @ x.mT, x @ x.mT, x @ x[:3].mT
        views = [torch.ops.aten._unsafe_view(x, [24]) for _ in range(2)]
    assert (first.shape, second.shape, other.shape) == ((4, 4), (4, 4), (4, 3))
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)


def test_tokens_per_expert_are_counted_on_meta() -> None:
    with running_on_meta(torch.device("cpu")):
        counts = torch.bincount(torch.empty(7, dtype=torch.long, device="meta"), minlength=4)
    assert (counts.shape, counts.dtype) == ((4,), torch.long)


def test_flops_of_a_model_whose_layers_differ_go_by_its_hidden_size() -> None:
    config = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = causal_lm_on_meta({"model_type": "gemma4_unified_text", **config, "num_attention_heads": 4})
    with pytest.raises(RuntimeError, match="may vary across layers"):
        _ = model.config.head_dim
    assert FlopFacts.from_model(model).attention_width == 32


def test_flops_of_a_llama_token_follow_the_formula() -> None:
    model = small("llama")
    attention, ffn, head = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 61 * 32
    norms = 5 * 32
    matmul = 2 * (attention + ffn) + head + norms
    assert FlopFacts.from_model(model).per_token(16) == 6 * matmul + 6 * 2 * 32 * 16
    assert FlopFacts.from_model(model).per_token(16, causal=False) == 6 * matmul + 12 * 2 * 32 * 16


def test_a_tied_head_counts_as_the_product_that_it_is() -> None:
    tied = causal_lm_on_meta({**small("llama").config.to_dict(), "tie_word_embeddings": True})
    assert FlopFacts.from_model(tied) == FlopFacts.from_model(small("llama"))


def test_a_model_may_have_several_heads() -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 64, "pad_token_id": 64, "bos_token_id": 64}
    config = MusicgenDecoderConfig(**sizes, **ids, num_codebooks=2, max_position_embeddings=64)
    model = MusicgenForCausalLM(config)
    tables = sum(table.weight.numel() for table in model.model.decoder.embed_tokens)
    assert (
        FlopFacts.from_model(model).matmul_parameters == sum(p.numel() for p in model.parameters()) - tables
    )


def test_a_configuration_is_read_from_a_directory_and_weights_are_loaded(tmp_path: Path) -> None:
    config = small("llama").config
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config)
    reference.save_pretrained(tmp_path)
    on_meta = causal_lm_on_meta(tmp_path)
    assert all(p.is_meta for p in on_meta.parameters())
    assert on_meta.config.hidden_size == 32
    loaded = parallelize(pretrained_causal_lm(str(tmp_path)), "dp=1").full_parameters()
    assert all(torch.equal(loaded[name], p) for name, p in reference.named_parameters())


def test_a_model_without_a_loss_of_its_own_needs_one() -> None:
    """In `step`, which computes it; a loop of one's own has its own."""
    engine = parallelize(nn.Linear(2, 2), "dp=1")
    with pytest.raises(ModelError, match="has no default loss"):
        engine.step({"input": torch.ones(1, 2)})
    engine.backward(engine.model(torch.ones(1, 2)).sum())
    assert not engine.update().skipped


@pytest.mark.parametrize("words", ["recompute=full", "compile=true"])
def test_options_for_blocks_are_refused_before_ranks_start_where_there_are_no_blocks(words: str) -> None:
    with pytest.raises(PlanError, match="the model has none"):
        validate(Arguments(nn.Linear(2, 2), words))


def test_this_process_is_a_world_of_one() -> None:
    assert connect().size == 1


class _Positions(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(6).to(dtype))
        self.inner = nn.Linear(6, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long])
def test_a_buffer_that_nothing_fills_is_named_not_used_as_garbage(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = _Positions(dtype)
    with pytest.raises(ModelError, match="without an initial value") as caught:
        parallelize(model, "dp=1", loss=lambda *_: (torch.zeros(()), 1))
    assert caught.value.given == "places"


class _LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids[input_ids > 3].nonzero())


def test_a_model_that_cannot_run_without_values_is_trained_all_the_same() -> None:
    engine = parallelize(_LooksAtValues(), "dp=1", loss=lambda out, _: (out.sum(), 1))
    predicted = engine.estimated_memory((2, 8))
    assert predicted.activations is None
    assert predicted.total > 0
    engine.step({"input_ids": torch.arange(16).view(2, 8)})
    assert engine.memory().activations


def test_a_model_without_trainable_parameters_is_evaluated_and_not_trained() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    engine = parallelize(frozen, "dp=1 precision=bf16", loss=lambda out, _: (out.sum(), 1))
    batch = {"input": torch.ones(3, 2)}
    assert engine.evaluate(batch).loss_sum != 0
    held = engine.memory()
    assert (held.gradients, held.master, held.optimizer) == (0, 0, 0)
    for train in (engine.step, lambda batch: engine.backward(engine.loss(batch)[0])):
        with pytest.raises(ModelError):
            train(batch)
    with pytest.raises(ModelError, match="no trainable parameters"):
        engine.step(batch)


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe"],
)
def test_models_and_configurations_of_mixtures_give_equal_parameters_and_flops(
    family: str,
) -> None:
    """All parameters exactly; of those that a token uses, the products: without norms and biases."""
    config = {"model_type": family, **AutoConfig.for_model(family).to_dict()}
    model, shape = causal_lm_on_meta(config), ModelShape.from_config(config)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert shape.active_params == pytest.approx(active_parameters(model), rel=1e-9)
    flops = FlopFacts.from_model(model).per_token(4096)
    assert flops == pytest.approx(shape.training_flops_per_token(4096), rel=0.002)
