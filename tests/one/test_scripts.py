"""Texts, warnings and errors of plans and engines, as a script meets them."""

import re
from typing import Any

import pytest

import plait
from plait.errors import PlanError
from plait.plan import MemoryUse
from support import programs


def engine_of(plan: str = "dp=1", **options: Any) -> plait.Engine:
    return plait.parallelize(programs.llama(), plan, optimizer_args=programs.ADAMW, **options)


def test_memory_is_printed_with_units_and_a_total() -> None:
    use = MemoryUse(2**30, 2**20, 0, 3 * 2**29, 0, None, host=5)
    assert str(use) == (
        "parameters 1.0 GiB, gradients 1.0 MiB, optimizer 1.5 GiB, activations unknown; "
        "total 2.5 GiB; host 5 B"
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
