"""Verdicts: what is found the same, what is printed, and what survives JSON."""

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from plait.cli.verify import _with_dtype
from plait.engine.reference import Tolerances
from plait.fileio import finite_json
from plait.plan import Plan
from plait.verify import Mismatch, Outcome, Verdict
from plait.verify.result import compare, verdict_matrix
from plait.verify.trajectory import TrainedStep, Trajectory


def verdict(plan: str, outcome: Outcome, apart: float = 1e-15) -> Verdict:
    steps = (TrainedStep(4.0, 1.0),)
    worst = (Mismatch("w", apart, 0.0, 1e-9),)
    return Verdict("llama", plan, "float64", 4, outcome, 1e-9, steps, steps, worst, 1)


def shown(verdicts: list[Verdict]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(verdict_matrix(verdicts))
    return console.export_text()


def test_no_plan_hides_another_in_the_matrix() -> None:
    text = shown(
        [
            verdict("dp=4", Outcome.SAME),
            verdict("dp=4 zero=1", Outcome.DIFFERS, 0.5),
            verdict("dp=4 zero=1 shard=2", Outcome.SAME),
            verdict("dp=4 zero=3 prefetch=0", Outcome.DIED),
        ]
    )
    assert "differs 5e-01" in text
    assert len([line for line in text.splitlines() if "dp=4" in line]) == 3
    assert "2 same, 1 differs, 1 died" in text


def test_numbers_that_are_not_finite_are_infinitely_far_off_and_json_is_valid() -> None:
    bad = replace(verdict("dp=2", Outcome.DIFFERS, math.inf), steps=(TrainedStep(math.nan, 1.0),))
    json.dumps(finite_json(bad.to_values()), allow_nan=False)
    read = Verdict.from_values(json.loads(json.dumps(bad.to_values())))
    assert read.worst_parameters[0].gradient_error == math.inf
    assert read.max_error == math.inf


def course(
    gradient: float, weight: float = 1.0, loss: float = 4.0, buffer: float = 2.0, evaluation: float = 3.0
) -> Trajectory:
    steps, gradients = [TrainedStep(loss, 1.0)], [{"w": torch.tensor([gradient])}]
    return Trajectory(
        steps, gradients, {"w": torch.tensor([weight])}, {"b": torch.tensor([buffer])}, evaluation
    )


def test_any_of_loss_gradient_weight_buffer_and_evaluation_makes_courses_differ() -> None:
    limits = Tolerances(1e-9)
    assert compare(course(1.0), course(1.0), limits)[0]
    others = [course(1.01), course(1.0, 1.01), course(1.0, loss=4.1), course(math.nan)]
    for other in (*others, course(1.0, buffer=2.1), course(1.0, evaluation=3.1)):
        assert not compare(other, course(1.0), limits)[0]
    assert compare(course(1.01), course(1.0), Tolerances(1e-9, noise={"w": 0.01}))[0]


def test_a_precision_that_is_replaced_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _with_dtype("float64", Plan.parse("dp=2 precision=bf16")).precision == "fp64"
    assert "precision=bf16 is replaced by fp64" in capsys.readouterr().err
    _with_dtype("float64", Plan.parse("dp=2"))
    assert not capsys.readouterr().err
