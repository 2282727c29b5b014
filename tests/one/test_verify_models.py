"""Models for verification: made small, without dropout, in float64; an error for what is no model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.models import blocks_of, build_tp_plan
from plait.verify import Case, ModelSource, ModelSpec, check, parse_source

BIG = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "gelu",
    "sliding_window": 512,
    "attention_dropout": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def test_a_configuration_is_made_small_and_stays_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    for path in (tmp_path, tmp_path / "config.json"):
        model: Any = parse_source(str(path), layers=3).spec().build(torch.float32)
        assert type(model).__name__ == "MistralForCausalLM"
        assert len(model.model.layers) == 3
        assert sum(p.numel() for p in model.parameters()) < 100_000
        assert (model.config.hidden_act, model.config.sliding_window) == ("gelu", 512)
        assert model.config.rope_parameters["rope_theta"] == 5e5
    assert parse_source(str(tmp_path), layers=3).left_out == ()
    (tmp_path / "config.json").write_text(json.dumps({**BIG, "layer_types": ["full_attention"] * 32}))
    assert parse_source(str(tmp_path), layers=3).left_out == ("layer_types",)
    full: Any = parse_source(str(tmp_path), layers=3, full=True).spec().build(torch.float32)
    assert len(full.model.layers) == 32
    assert full.lm_head.weight.is_meta


@pytest.mark.filterwarnings("ignore")  # families' own
@pytest.mark.parametrize(
    "kind",
    ["gpt2", "gemma2", "mixtral", "deepseek_v3", "bloom", "falcon", "opt", "mamba", "bamba", "longcat_flash"],
)
def test_every_kind_is_made_small_by_its_name(kind: str) -> None:
    model: Any = parse_source(kind, layers=4).spec().build(torch.float32)
    assert model.config.model_type == kind
    assert model.config.num_hidden_layers == 4
    assert sum(p.numel() for p in model.parameters()) < 3_000_000


@pytest.mark.filterwarnings("ignore")  # families' own
@pytest.mark.parametrize(
    ("kind", "entries"),
    [("git", {"pixel_values": (3, 16, 16)}), ("mllama", {"cross_attention_states": (5, 32)}), ("fuyu", {})],
)
def test_a_batch_has_what_a_kind_needs_besides_tokens(kind: str, entries: dict[str, Any]) -> None:
    case = Case(parse_source(kind, layers=2), "pp=2", "float64", 1, 4, 16, 0)
    spec = case.source.spec()
    model = spec.build(torch.float64)
    example = case.example(spec, model)
    assert (example is None) == (not entries)
    shapes = {key: tuple(value.shape[1:]) for key, value in (example or {}).items()}
    assert shapes == ({"input_ids": (16,), "labels": (16,), **entries} if entries else {})
    check(case)  # all blocks are called


@pytest.mark.filterwarnings("ignore")  # families' own
def test_tables_that_a_forward_creates_are_in_float64() -> None:
    model: Any = parse_source("xglm", layers=2).spec().build_reference(torch.float64)
    ids = torch.arange(8)[None]
    assert model(input_ids=ids, use_cache=False).logits.isfinite().all()
    assert torch.get_default_dtype() == torch.float32


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])
        self.hidden_dropout = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x).float(), self.hidden_dropout)
        return x


def test_verified_models_have_no_dropout_and_compute_in_float64() -> None:
    model = ModelSpec(_Drops).build(torch.float64).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(model(x), model(x))
    assert model(x).dtype == torch.float64
    assert type(model).__name__ == "_Drops"
    assert ModelSpec(_Drops).build(torch.float32)(x.float()).dtype == torch.float32


def test_blocks_that_are_linear_layers_are_sharded() -> None:
    spec = ModelSpec(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    model = spec.build(torch.float64)
    batch = {"input": torch.zeros(2, 4, dtype=torch.float64)}
    plan = build_tp_plan(model, 1, 2, sequence=False, blocks=blocks_of(model), batch=batch)
    assert [layer.module for layer in plan.layers] == ["0", "2"]


def test_models_on_meta_get_values_for_one_process() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return _Drops().requires_grad_(False)

    model = ModelSpec(on_meta).build_reference(torch.float32)
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())


def test_weights_tied_on_meta_are_tied_with_values() -> None:
    def tied() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    model = ModelSpec(tied).build_reference(torch.float64)
    assert model[1].weight is model[0].weight
    assert not model[0].weight.is_meta


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama", "try     : llama"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("support.verify_models:no_such", "has no attribute 'no_such'"),
        ("support.verify_models:failing", "ValueError: of its own"),
        ("support.verify_models:no_model", "a int"),
    ],
)
def test_a_source_that_is_no_model_is_an_error(name: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_source(name, layers=2).spec().build(torch.float32)
    assert words in str(caught.value)


def test_a_source_survives_json() -> None:
    source = parse_source("llama", layers=2)
    from_json = ModelSource(**json.loads(json.dumps({"config": source.config, "build": "", "folder": ""})))
    assert str(from_json.spec().build(torch.float32)) == str(source.spec().build(torch.float32))
