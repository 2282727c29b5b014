"""Experts with a capacity: the numbers of one process that drops the same choices, written by hand."""

from dataclasses import replace
from typing import Any

import pytest

import plait
from plait.verify.model_spec import parse_source
from plait.verify.result import Outcome, Verdict
from support import limited_experts, programs, verify_models
from support.limited_experts import Groups
from support.pool import Pool

STEPS = 2
PLANS = (
    ("mixtral", "dp=2 ep=2 capacity=1", Groups(1, 2)),
    ("mixtral", "dp=2 ep=2 capacity=0.5 zero=3 micro=2 recompute=full", Groups(0.5, 4)),
    ("gpt_oss", "dp=4 ep=2 capacity=0.9 zero=1", Groups(0.9, 4)),
    ("deepseek_v3", "dp=2 ep=2 tp=2 capacity=0.8 zero=1", Groups(0.8, 2, 2)),
    ("mixtral", "dp=2 ep=2 tp=4 capacity=0.8", Groups(0.8, 2)),  # columns have parts of each expert
    ("mixtral", "dp=2 ep=2 tp=2 sp=true capacity=0.8 zero=2 recompute=full", Groups(0.8, 2, 2)),
    ("gpt_oss", "dp=1 cp=2 ep=2 capacity=0.75 zero=3", Groups(0.75, 1, 1, ((0, 3), (1, 2)))),
    ("mixtral", "dp=2 cp=2 ep=4 capacity=0.9 micro=2", Groups(0.9, 4, 1, ((0, 3), (1, 2)))),
    ("mixtral", "dp=2 ep=2 pp=2 micro=2 capacity=0.8 schedule=zb-h1 recompute=full", Groups(0.8, 4)),
    ("mixtral", "dp=4 ep=4 capacity=4", Groups(4, 4)),  # drops nothing
)


@pytest.mark.parametrize(("family", "words", "groups"), PLANS)
def test_steps_are_those_of_one_process_that_drops_the_same_choices(
    pool: Pool, family: str, words: str, groups: Groups
) -> None:
    ranks = plait.Plan.parse(words).num_ranks
    (ours, dropped), *others = pool.run(limited_experts.trained, ranks, family, words, STEPS)
    for other, other_dropped in others:
        assert (other.losses, other.norms, other_dropped) == (ours.losses, ours.norms, dropped)
    expected, expected_dropped = limited_experts.reference(family, groups, ours.first_weights, STEPS)
    assert dropped == expected_dropped
    assert all(dropped) == (groups.capacity < 2)
    programs.assert_same(ours, expected)


@pytest.mark.parametrize(
    ("words", "entries"),
    [
        ("dp=2 ep=2 tp=2 capacity=0.7 zero=1 micro=2", {}),
        ("dp=2 cp=2 ep=2 capacity=0.7 cp_method=ring", {}),
        ("dp=4 ep=2 capacity=0.7 zero=3", {"output_router_logits": True}),
        ("dp=4 ep=2 capacity=0.7 micro=2 router_balance=step", {"output_router_logits": True}),
    ],
)
def test_verify_drops_the_same_choices_in_one_process(
    pool: Pool, words: str, entries: dict[str, Any]
) -> None:
    source = parse_source("mixtral", layers=2, length=12)
    source = replace(source, config={**source.config, **entries})
    verdict, *_ = pool.run(verify_models.verify_on_ranks, 4, source, words, timeout_s=180)
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is Outcome.SAME, verdict.message
    mutated, *_ = pool.run(verify_models.verify_on_ranks, 4, source, words, "dropless", timeout_s=180)
    assert isinstance(mutated, Verdict)
    assert mutated.outcome is Outcome.DIFFERS


@pytest.mark.parametrize("words", ["recompute=full", "zero=3"])
def test_ranks_with_other_shapes_send_messages_of_one_size(pool: Pool, words: str) -> None:
    """Also where a shape is new to one rank alone. A large capacity drops nothing."""
    plan = f"dp=2 ep=2 micro=2 {words} precision=fp64"
    dropless = pool.run(limited_experts.uneven_steps, 2, plan)
    limited = pool.run(limited_experts.uneven_steps, 2, f"{plan} capacity=4")
    for (results, messages), (expected, _) in zip(limited, dropless, strict=True):
        assert results == pytest.approx(expected, rel=1e-9)
        shapes, tokens = "shapes of micro-batches", "tokens of a layer"
        new = [4, 2, 2, 0]  # layers x micro-batches whose shapes the ranks have not had together
        assert messages == [[shapes, *[tokens] * number] for number in new]


def test_ranks_in_different_layers_and_layers_without_some_tokens_are_errors(pool: Pool) -> None:
    for errors in pool.run(limited_experts.mixed_layers, 2):
        assert len(errors) == 1
        assert "the ranks of ep were not in the same layers" in errors[0]
    for error in pool.run(limited_experts.fewer_tokens, 2):
        assert "number of tokens follows from the shapes" in error
