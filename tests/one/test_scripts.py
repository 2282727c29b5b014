"""Texts, warnings and errors of plans and engines, as a script meets them."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError, PlanError
from plait.plan import MemoryUse, format_bytes
from support import programs


def engine_of(plan: str = "dp=1", **options: Any) -> plait.Engine:
    return plait.parallelize(programs.llama(), plan, optimizer_args=programs.ADAMW, **options)


def test_memory_is_printed_with_units_and_a_total() -> None:
    use = MemoryUse(2**30, 2**20, 0, 3 * 2**29, 0, None, host=5)
    assert str(use) == (
        "parameters 1.0 GiB, gradients 1.0 MiB, optimizer 1.5 GiB, activations unknown; "
        "total at least 2.5 GiB, without activations; host 5 B"
    )
    engine = engine_of("micro=2 precision=bf16")
    assert re.search(r"master .* KiB.*; total .* KiB$", str(engine.estimated_memory((4, 16))))


def test_an_engine_prints_what_it_is() -> None:
    engine = engine_of("micro=3 precision=bf16")
    engine.step(programs.batches(1)[0])
    text = repr(engine)
    assert "LlamaForCausalLM" in text
    assert f"{engine.num_parameters:,} trainable parameters" in text
    assert '"dp=1 micro=3 precision=bf16"' in text
    assert "0 of 1, on cpu" in text
    assert str(engine.memory()) in text
    assert "steps : 1" in text


def test_a_plan_given_as_the_argument_of_plan_says_how_a_text_is_read() -> None:
    with pytest.raises(PlanError, match=re.escape('Plan.parse("dp=2 zero=1")')):
        plait.Plan("dp=2 zero=1")  # type: ignore[arg-type]


def test_a_narrow_model_that_a_plan_computes_in_float32_is_reported_with_its_memory() -> None:
    model = programs.llama(on_meta=False).bfloat16()
    half = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.warns(UserWarning, match="weights are bfloat16.*computes in float32") as caught:
        engine = plait.parallelize(model, "dp=1", optimizer_args=programs.ADAMW)
    assert f"{format_bytes(half)} become {format_bytes(2 * half)}" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert engine.memory().parameters == pytest.approx(2 * half, rel=0.05)  # padding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plait.parallelize(programs.llama(on_meta=False).bfloat16(), "precision=bf16")


def test_the_older_engine_of_a_module_says_that_a_newer_one_has_it() -> None:
    def loss(outputs: Tensor, _: object) -> tuple[Tensor, int]:
        return outputs.sum(), outputs.numel()

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    older = plait.parallelize(net, "dp=1", loss=loss)
    batch = {"input": torch.ones(2, 4)}
    older.step(batch)
    newer = plait.parallelize(net, "dp=1", loss=loss)
    with pytest.raises(ModelError, match="the model was given to another engine"):
        older.step(batch)
    assert not newer.step(batch).skipped
