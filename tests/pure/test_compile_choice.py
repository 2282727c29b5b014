"""compile=auto: what measured times, the length of a run and the plan say."""

import math

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.compile_choice import MIN_RUN_S, CompileChoice, CompileTimes, without_auto

TIMES = CompileTimes(eager_s=1.0, compiled_s=0.9, compile_s=20.0)


@pytest.mark.parametrize("text", ["dp=1 compile=auto", "dp=1 compile=true", "dp=1"])
def test_the_key_reads_back(text: str) -> None:
    assert str(Plan.parse(text)) == text


@pytest.mark.parametrize("value", ["maybe", 1, None])
def test_another_value_is_an_error(value: object) -> None:
    with pytest.raises(PlanError, match="unknown value for compile") as caught:
        Plan(compile=value)  # type: ignore[arg-type]
    assert caught.value.expected == "true or false, or auto"


def test_a_compilation_is_done_if_it_takes_less_than_it_gains() -> None:
    def is_on(steps: float, *, is_compiled: bool = False) -> bool:
        return CompileChoice.of_times(TIMES, steps, "", is_compiled=is_compiled).is_on

    assert (is_on(199), is_on(201)) == (False, True)
    assert is_on(1, is_compiled=True), "what it took is spent"
    assert is_on(math.inf)


def test_a_gain_that_may_be_noise_is_none() -> None:
    slower, equal = CompileTimes(1.0, 1.1, 20.0), CompileTimes(1.0, 0.99, 20.0)
    for times in (slower, equal):
        choice = CompileChoice.of_times(times, math.inf, "", is_compiled=True)
        assert not choice.is_on
        assert "instead of 1 s" in str(choice)


def test_a_short_run_measures_nothing() -> None:
    assert CompileChoice.of_short_run(1.0, MIN_RUN_S + 1, "") is None
    choice = CompileChoice.of_short_run(1.0, MIN_RUN_S - 1, "")
    assert choice is not None
    assert str(choice) == f"off: {MIN_RUN_S - 1:.0f} steps of 1 s are too few to repay it"


def test_a_choice_is_kept_for_the_same_model_plan_and_shape() -> None:
    choice = CompileChoice(is_on=True, reason="faster", key="one")
    assert CompileChoice.kept(choice.facts(), "one") == choice
    assert CompileChoice.kept(choice.facts(), "another") is None
    assert CompileChoice.kept(None, "one") is None


@pytest.mark.parametrize(
    ("words", "splits", "has_experts", "reason"),
    [
        ("deterministic=true", False, False, "deterministic"),
        ("servers=1", False, False, "parameter servers"),
        ("pp=2 micro=2 schedule=zb-h1", True, False, "schedule=zb-h1 splits backwards"),
        ("cp=2 recompute=selective", False, False, "attention over ranks"),
        ("recompute=selective", False, True, "experts"),
    ],
)
def test_a_plan_that_compiles_nothing_says_why(
    words: str, splits: bool, has_experts: bool, reason: str
) -> None:
    plan = Plan.parse(f"{words} compile=auto")
    resolved, choice = without_auto(plan, splits=splits, has_experts=has_experts)
    assert choice is not None
    assert reason in str(choice)
    assert resolved == Plan.parse(words)


@pytest.mark.parametrize("words", ["recompute=selective", "cp=2", "zero=3 dp=2", "deterministic=false"])
def test_other_plans_are_measured(words: str) -> None:
    plan = Plan.parse(f"{words} compile=auto")
    assert without_auto(plan, splits=False, has_experts=words != "recompute=selective") == (plan, None)
    plan = Plan.parse(words)
    assert without_auto(plan, splits=True, has_experts=True) == (plan, None)
