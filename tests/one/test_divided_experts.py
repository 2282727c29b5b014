"""Experts that ep divides, and those that it refuses, before a rank starts."""

from typing import Any

import pytest
import torch

from plait.engine.spec import Arguments, validate
from plait.errors import PlaitError
from plait.estimate.explain import explain
from plait.models import token_batch
from plait.plan import Plan
from plait.verify.model_spec import parse_source
from support import hf_models

PLAN = "dp=2 ep=2"


@pytest.mark.parametrize(
    ("model", "plan", "facts"),
    [
        ("llama", PLAN, ("the model has no experts that ep divides", "LlamaForCausalLM: no experts")),
        (
            "longcat_flash",
            PLAN,
            ("the model has no experts that ep divides", "LongcatFlashForCausalLM: model.layers.0.mlp."),
        ),
        ("mixtral", "dp=3 ep=3", ("the experts do not divide over ep", "4 experts", ": a plan without ep")),
        ("mixtral", "dp=8 ep=8", ("the experts do not divide over ep", "4 experts", "ep=2 or ep=4")),
        ("dbrx", f"{PLAN} capacity=1", ("capacity does not work with these experts", "DbrxExperts")),
        ("llama4_text", f"{PLAN} capacity=1", ("capacity does not work with these", "Llama4TextExperts")),
        (
            "mixtral",
            f"{PLAN} capacity=1 compile=true recompute=selective",
            ("dropped choices of experts are not counted", "no compile or no capacity"),
        ),
    ],
)
def test_experts_that_do_not_divide_are_refused_by_name(
    model: str, plan: str, facts: tuple[str, ...]
) -> None:
    built = parse_source(model, layers=2).spec().build(torch.float32)
    with pytest.raises(PlaitError) as caught:
        validate(Arguments(built, Plan.parse(plan)))
    assert all(fact in str(caught.value) for fact in (*facts, "\n  try     : ")), caught.value


def test_experts_with_a_forward_of_other_arguments_are_refused() -> None:
    model = hf_models.model_of("mixtral")
    experts = model.get_submodule("model.layers.1.mlp.experts")
    experts.norm = torch.nn.LayerNorm(4, device="meta")
    with pytest.raises(PlaitError, match="parameters or buffers of other modules"):
        validate(Arguments(model, Plan.parse(PLAN)))


def test_experts_of_several_stages_are_refused() -> None:
    model: Any = hf_models.model_of("mixtral")
    model.model.layers[-1].mlp = model.model.layers[0].mlp
    validate(Arguments(model, Plan.parse(PLAN)))
    with pytest.raises(PlaitError, match="experts that blocks of several stages share"):
        validate(Arguments(model, Plan.parse(f"{PLAN} pp=2 micro=2")))


def test_memory_under_a_capacity_is_the_same_for_all_routing() -> None:
    model: Any = hf_models.model_of("mixtral", exact=False)
    model.set_experts_implementation("grouped_mm")
    batch = token_batch(2, 8)
    uneven, even, more = (
        explain(Arguments(model, Plan.parse(f"{PLAN}{words}")), batch).rank_classes[0]
        for words in ("", " capacity=1", " capacity=2")
    )
    assert uneven.uneven_bytes > even.uneven_bytes == more.uneven_bytes == 0
    assert even.memory.activations < more.memory.activations


@pytest.mark.parametrize(
    ("words", "without", "part"), [("dp=4 ep=4", "dp=4", 1), (f"{PLAN} tp=2", "dp=2 tp=2", 2)]
)
def test_experts_of_a_rank_are_its_part_of_dim_0_and_all_else_is_as_without_ep(
    words: str, without: str, part: int
) -> None:
    """Each element of an expert is on the ranks with this expert only, in memory as in the table."""
    model: Any = hf_models.model_of("mixtral", exact=False)
    model.set_experts_implementation("grouped_mm")  # which runs on meta
    alone, divided = (
        explain(Arguments(model, Plan.parse(plan)), token_batch(2, 8)) for plan in (without, words)
    )
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    before, after = alone.rank_classes[0], divided.rank_classes[0]
    assert before.parameters - after.parameters == experts // part - experts // 4
    assert alone.num_parameters == divided.num_parameters
    ranges = {
        shard.boxes.ranges[0]
        for layouts in divided.shard_map.layouts
        for unit in layouts[0].units
        for shard in unit.params
        if ".experts." in shard.name
    }
    assert ranges == {((expert, expert + 1),) for expert in range(4)}
