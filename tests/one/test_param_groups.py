"""Groups of parameters by patterns of their names: which parameter is in which, and errors."""

from typing import Any

import pytest
import torch

from plait.errors import ConfigError
from plait.models import causal_lm_on_meta
from plait.train.optimizer import check_optimizer_args, param_groups
from plait.train.sections import OptimizerConfig


@pytest.fixture(scope="module")
def model() -> Any:
    return causal_lm_on_meta(
        {
            "model_type": "gpt2",
            "vocab_size": 40,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 2,
            "tie_word_embeddings": False,
        }
    )


def groups_of(model: Any, *groups: dict[str, Any]) -> list[tuple[set[str], dict[str, float]]]:
    """Names and options of each group."""
    config = OptimizerConfig.model_validate({"lr": 0.5, "weight_decay": 0.1, "groups": groups})
    check_optimizer_args(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        (
            {names[p] for p in group["params"]},
            {key: value for key, value in group.items() if key != "params"},
        )
        for group in param_groups(config, model) or []
    ]


@pytest.mark.quick
def test_the_first_match_wins_and_the_rest_keeps_the_default_rule(model: Any) -> None:
    decaying, others, biases, first, attention = groups_of(
        model,
        {"match": "*.attn.*.bias", "weight_decay": 0.3},
        {"match": "transformer.h.0.*", "lr": 0.25},
        {"match": "*.c_attn.weight", "lr": 0.0, "weight_decay": 0.2},
    )
    assert (biases[1], first[1]) == ({"weight_decay": 0.3}, {"lr": 0.25})
    assert attention[1] == {"lr": 0.0, "weight_decay": 0.2}
    in_block = {"attn.c_attn.bias", "attn.c_proj.bias"}
    assert biases[0] == {f"transformer.h.{layer}.{name}" for layer in (0, 1) for name in in_block}
    assert attention[0] == {"transformer.h.1.attn.c_attn.weight"}
    assert {"transformer.h.0.ln_1.weight", "transformer.h.0.attn.c_attn.weight"} < first[0]
    assert (decaying[1], others[1]) == ({}, {"weight_decay": 0.0})
    assert "lm_head.weight" in decaying[0]
    assert {"transformer.h.1.ln_1.weight", "transformer.h.1.mlp.c_fc.bias"} < others[0]
    every = [decaying, others, biases, first, attention]
    assert sum(len(names) for names, _ in every) == len(dict(model.named_parameters()))


def test_a_group_may_have_an_optimizer_of_its_own(model: Any) -> None:
    muon = {"match": "*.c_fc.weight", "name": "Muon", "lr": 0.02, "args": {"momentum": 0.9}}
    config = OptimizerConfig.model_validate({"lr": 0.5, "weight_decay": 0.1, "groups": [muon]})
    check_optimizer_args(config)
    *_, group = param_groups(config, model) or []
    assert len(group.pop("params")) == 2
    assert group == {"optimizer": torch.optim.Muon, "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    wrong = OptimizerConfig.model_validate({"lr": 0.5, "groups": [{**muon, "args": {"betas": 3}}]})
    with pytest.raises(ConfigError, match=r"Muon has no argument 'betas'\n.*optimizer.groups.0.args.betas"):
        check_optimizer_args(wrong)


def test_without_groups_the_engine_has_its_own_rule(model: Any) -> None:
    assert groups_of(model) == []


def test_a_pattern_without_a_match_is_an_error_with_the_nearest_one(model: Any) -> None:
    for pattern, near in (
        ("*.c_atn.weight", "*.c_attn.weight"),
        ("transformer.h.*.ln1.weight", "transformer.h.*.ln_1.weight"),
        ("lm_head", "lm_head.weight"),
    ):
        with pytest.raises(ConfigError, match="matches no trainable parameter") as caught:
            groups_of(model, {"match": pattern, "lr": 0.1})
        assert caught.value.hint == near
        assert repr(pattern) in str(caught.value.given)


def test_a_pattern_after_a_wider_one_is_an_error(model: Any) -> None:
    with pytest.raises(ConfigError, match="earlier groups contain all") as caught:
        groups_of(model, {"match": "*.weight", "lr": 0.1}, {"match": "*.c_fc.weight", "lr": 0.2})
    assert "'*.c_fc.weight', after '*.weight'" in str(caught.value.given)


def test_frozen_parameters_are_in_no_group() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[0].requires_grad_(False)
    found = groups_of(net, {"match": "*.bias", "weight_decay": 0.5})
    assert [names for names, _ in found] == [{"1.weight"}, set(), {"1.bias"}]
    with pytest.raises(ConfigError, match="matches no trainable parameter"):
        groups_of(net, {"match": "0.*", "lr": 0.1})
