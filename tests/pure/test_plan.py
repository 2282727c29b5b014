"""A plan is plain data: its text parses back, and what cannot be is refused with a letter."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.plan import PRECISIONS, RECOMPUTES

plans = st.builds(
    Plan,
    dp=st.integers(1, 4096),
    micro=st.integers(1, 512),
    precision=st.sampled_from(PRECISIONS),
    recompute=st.sampled_from(RECOMPUTES),
)


@given(plans)
def test_the_text_of_a_plan_parses_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@given(plans, st.randoms())
def test_the_order_of_words_does_not_matter(plan: Plan, random: Any) -> None:
    names = Plan.keys()
    words = [f"{key}={getattr(plan, key)}" for key in names]
    random.shuffle(words)
    assert Plan.parse("  ".join(words)) == plan


def test_every_key_takes_effect_on_the_value() -> None:
    plan = Plan.parse("dp=8 micro=4 precision=bf16 recompute=full")
    assert (plan.dp, plan.micro, plan.precision, plan.recompute) == (8, 4, "bf16", "full")
    assert str(Plan()) == "dp=1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2 precison=bf16", ["no key 'precison'", "precision"]),
        ("dp", ["key=value", "'dp'"]),
        ("dp=2 dp=4", ["dp is given twice"]),
        ("dp=zero", ["dp is not a degree", "dp=zero", "whole number"]),
        ("dp=0", ["dp=0", "1 or more"]),
        ("dp=-1", ["dp=-1"]),
        ("micro=2.5", ["micro=2.5"]),
        ("dp=²", ["dp is not a degree"]),
        ("precision=bf61", ["precision=bf61", "fp64 or fp32 or bf16"]),
        ("recompute=ful", ["recompute=ful", "none or full"]),
        ("tp=2", ["no key 'tp'", "one of dp, micro"]),
    ],
)
def test_what_cannot_be_is_refused_with_a_letter(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    for word in words:
        assert word in str(caught.value)


def test_ranks_that_do_not_fit_are_refused_with_a_plan_that_would() -> None:
    Plan(dp=4).check_ranks(4)
    with pytest.raises(PlanError, match="2 ranks of this run") as caught:
        Plan(dp=4, precision="bf16").check_ranks(2)
    assert "dp=2 precision=bf16" in str(caught.value)
    assert "--nproc-per-node 4" in str(caught.value)


def test_commas_between_words_are_taken_for_spaces() -> None:
    assert Plan.parse("dp=2, micro=4,precision=bf16") == Plan(2, 4, "bf16")


def test_a_batch_that_does_not_divide_is_refused_with_one_that_would() -> None:
    assert Plan(dp=2, micro=3).check_batch(12) == 2
    for batch in (0, 5, 13):
        with pytest.raises(PlanError, match="does not divide") as caught:
            Plan(dp=2, micro=3).check_batch(batch)
        assert Plan(dp=2, micro=3).check_batch(int(str(caught.value.hint).removeprefix("batch="))) >= 1
