"""The auxiliary loss of routers as a model's own code computes it."""

import warnings
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    JetMoeConfig,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
)

import plait
from plait.engine.spec import Arguments, validate
from plait.errors import ConfigError, ModelError, PlanError
from plait.models.routers import router_loss
from support import hf_models

IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_capacity_of_a_batchs_tokens_is_warned_of_if_a_plan_divides_the_batch(micro: int) -> None:
    layers = {f"{part}_{key}": 1 for part in ("encoder", "decoder") for key in ("layers", "sparse_step")}
    config = NllbMoeConfig(vocab_size=64, d_model=16, num_experts=2, **layers)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plait.parallelize(NllbMoeForConditionalGeneration(config), f"micro={micro}")
    of_experts = [str(each.message) for each in found if "the capacity of its experts" in str(each.message)]
    assert len(of_experts) == micro - 1


def _mixtral(**more: Any) -> Any:
    return hf_models.model_of("mixtral", on_meta=False, exact=False, output_router_logits=True, **more)


def test_sizes_and_coefficient_are_those_of_the_models_forward() -> None:
    found = router_loss(_mixtral(router_aux_loss_coef=0.3))
    assert found is not None
    assert (found.number, found.chosen, found.coefficient, found.masks) == (4, 2, 0.3, True)
    assert [*found.routers] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert router_loss(hf_models.model_of("mixtral")) is None


def test_a_step_has_the_loss_that_the_model_returns() -> None:
    """In float32, of an unmodified model, in training and in evaluation; and its state is its own."""
    model = _mixtral(router_aux_loss_coef=0.3)
    batch = {"input_ids": IDS, "labels": IDS}
    with torch.no_grad():
        expected = model(**batch)
    engine = plait.parallelize(model, "dp=1", router_bias_update=None)
    evaluated = engine.evaluate(batch)
    assert evaluated.loss_sum / evaluated.num_tokens == pytest.approx(float(expected.loss), rel=1e-6)
    result = engine.step(batch)
    assert result.loss == pytest.approx(float(expected.loss), rel=1e-6)
    assert result.aux_loss == pytest.approx(float(expected.aux_loss), rel=1e-6)
    assert {name: sum(load) for name, load in result.expert_loads.items()} == dict.fromkeys(
        ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"), IDS.numel() * 2
    )


def test_forwards_that_count_draw_the_same_numbers_and_leave_no_trace() -> None:
    """Not in buffers, nor in loads."""
    model, seen = _mixtral(attention_dropout=0.5), list[torch.Tensor]()
    model.model.layers[1].mlp.gate.register_forward_hook(
        lambda _, __, output: seen.append(output[0].detach())
    )
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)
    engine = plait.parallelize(model, "dp=1 micro=2 router_balance=step", router_z_loss=0.1)
    batch = {"input_ids": IDS, "labels": IDS}
    for step in (1, 2):
        seen.clear()
        result = engine.step(batch)
        first, second = (torch.stack(seen[start : start + 2]) for start in (0, 2))
        assert torch.equal(first, second)
        assert not torch.equal(first[0], first[1])
        assert float(model.calls) == 2 * step
        assert {sum(load) for load in result.expert_loads.values()} == {IDS.numel() * 2}
        expected = torch.stack(seen[2:]).logsumexp(-1).square().mean()
        assert result.router_z_loss is not None
        assert result.router_z_loss > float(expected)  # of two layers
    with pytest.raises(PlanError, match="no counts of the step's"):
        engine.loss(batch)


def test_losses_of_routers_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(PlanError, match="router_balance has no effect"):
        plait.parallelize(hf_models.model_of("mixtral"), "dp=1 micro=2 router_balance=step")
    with pytest.raises(ConfigError, match="no routers whose z loss"):
        plait.parallelize(hf_models.model_of("llama"), "dp=1", router_z_loss=0.001)
    with pytest.raises(ConfigError, match=r"not a valid coefficient(?s:.)*: router_z_loss=0.001"):
        plait.parallelize(hf_models.model_of("mixtral"), "dp=1", router_z_loss=-1.0)
    with pytest.raises(PlanError, match="losses of routers are not computed"):
        plait.parallelize(_mixtral(), "dp=1 compile=true recompute=selective")
    with pytest.raises(PlanError, match="router_z_loss"):
        validate(Arguments(hf_models.model_of("mixtral"), "dp=2 servers=1", router_z_loss=0.001))


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text"])
def test_another_formula_is_refused_by_the_models_name(family: str) -> None:
    model: Any = hf_models.model_of(family)
    model.config.output_router_logits = True
    with pytest.raises(ModelError, match="auxiliary router loss is not known") as caught:
        plait.parallelize(model, "dp=1")
    assert type(model).__name__ in str(caught.value)


def test_logits_of_other_tokens_are_refused() -> None:
    model = _mixtral()
    engine = plait.parallelize(model, "dp=1")
    gate = model.model.layers[0].mlp.gate
    own = gate.forward
    gate.forward = MethodType(lambda _, x: tuple(part[1:] for part in own(x)), gate)
    with pytest.raises(ModelError):
        engine.step({"input_ids": IDS, "labels": IDS})


def test_a_loss_of_ones_own_reads_the_models_auxiliary_loss() -> None:
    engine = plait.parallelize(_mixtral(), "dp=1", loss=lambda outputs, _: (outputs.aux_loss, 1))
    result = engine.step({"input_ids": IDS})
    assert result.loss > 1
    assert result.aux_loss is None


def test_biases_that_cannot_be_updated_are_refused() -> None:
    with pytest.raises(ConfigError, match="have no biases to update"):
        plait.parallelize(hf_models.model_of("mixtral"), "dp=1", router_bias_update=0.001)
    with pytest.raises(PlanError, match="biases of routers are not updated"):
        validate(Arguments(hf_models.model_of("deepseek_v3"), "dp=2 local_steps=4", router_bias_update=0.001))
    with pytest.raises(ConfigError, match=r"not a valid rate(?s:.)*: router_bias_update=0.001"):
        plait.parallelize(hf_models.model_of("deepseek_v3"), "dp=1", router_bias_update=0.0)


def test_a_z_loss_has_each_router_once() -> None:
    """jetmoe's attention records the logits of its own router a second time."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8}
    sizes |= {"intermediate_size": 32, "num_local_experts": 4, "vocab_size": 64}
    torch.manual_seed(0)
    model, seen = AutoModelForCausalLM.from_config(JetMoeConfig(**sizes)), list[torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(lambda _, __, output: seen.append(output[4].detach()))
    result = plait.parallelize(model, "dp=1", router_z_loss=0.1).step({"input_ids": IDS, "labels": IDS})
    assert len(seen) == 4
    expected = sum(float(logits.logsumexp(-1).square().mean()) for logits in seen)
    assert result.router_z_loss == pytest.approx(expected, rel=1e-6)


def test_a_z_loss_of_probabilities_is_refused() -> None:
    """gemma4 records these as its logits."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 16, "intermediate_size": 32, "vocab_size": 64, "hidden_size_per_layer_input": 0}
    sizes |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    sizes |= {"layer_types": ["full_attention"] * 2}
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**sizes))
    with pytest.raises(ConfigError, match="no routers whose z loss"):
        plait.parallelize(model, "dp=1", router_z_loss=0.1)
