"""Quantized folders are read under any plan, each rank its part, as they are dequantized by one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.checkpoint.compress import Compression
from plait.models import causal_lm_on_meta
from plait.models.adapters import attach
from plait.plan import Plan
from plait.train.export import export_folder
from support.compressed_models import MODELS, saved
from support.pool import Pool


def _begun(folder: Path, plan: str) -> dict[str, Tensor]:
    return plait.parallelize(causal_lm_on_meta(folder), plan, weights=folder).full_parameters()


@pytest.mark.parametrize(
    ("name", "weights", "plan"),
    [
        pytest.param("llama", "int4", "dp=2 zero=3", marks=pytest.mark.quick),
        ("llama", "int8", "tp=2"),
        ("qwen2", "int4", "tp=2"),
        ("qwen2", "fp8", "tp=2x1"),
        ("llama", "int4", "pp=2 micro=2"),
        ("mixtral", "int4", "dp=2 ep=2"),
        ("mixtral", "int8", "tp=2"),
        ("qwen3_moe", "int8", "dp=2 zero=3"),
    ],
)
def test_each_plan_has_the_weights_that_one_process_dequantizes(
    pool: Pool, tmp_path: Path, name: str, weights: Any, plan: str
) -> None:
    saved(tmp_path / "in", MODELS[name])
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression(weights))
    export_folder(tmp_path / "out", tmp_path / "back")
    model: Any = type(causal_lm_on_meta(MODELS[name])).from_pretrained(tmp_path / "back")
    expected = dict(model.named_parameters())
    found, *_ = pool.run(_begun, Plan.parse(plan).num_ranks, tmp_path / "out", plan)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def _adapted(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits over a frozen base with an adapter that adds nothing yet, and the adapter after a step."""
    model = attach(causal_lm_on_meta(folder), {"r": 2, "target_modules": "all-linear", "use_dora": True})
    engine = plait.parallelize(model, "dp=2 zero=3", weights=folder, optimizer_args={"lr": 1e-3})
    ids = torch.arange(32).view(2, 16)
    logits = engine.outputs({"input_ids": ids}, pick=lambda outputs: outputs.logits)
    engine.step({"input_ids": ids, "labels": ids})
    return logits, engine.full_parameters()


def test_an_adapter_trains_on_the_dequantized_base(pool: Pool, tmp_path: Path) -> None:
    saved(tmp_path / "in", MODELS["llama"])
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression("int4"))
    export_folder(tmp_path / "out", tmp_path / "back")
    ours, plain = (pool.run(_adapted, 2, tmp_path / name)[0] for name in ("out", "back"))
    assert torch.equal(ours[0], plain[0])
    assert ours[1].keys() == plain[1].keys()
    assert all(torch.equal(tensor, plain[1][key]) for key, tensor in ours[1].items())
