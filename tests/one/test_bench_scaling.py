"""Scaling of a family of plans: what is compared, and what is not believed."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from plait.bench import plans
from plait.bench.plans import MeasuredStep, run_steps
from plait.bench.request import MODELS
from plait.cli import bench_scaling
from plait.cli.bench_scaling import Point, ScalingRequest, measure_scaling, scaling_json, scaling_tables
from plait.plan import Plan

REQUEST = ScalingRequest("dp={n}", (1, 3), ("weak",), model="tiny", length=16, rounds=1)


def test_every_plan_of_a_family_runs_with_the_threads_of_the_most_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, int]] = []

    def run(_: object, plan: Plan, *, threads: int, **__: object) -> list[MeasuredStep]:
        given.append((plan.num_ranks, threads))
        return [MeasuredStep(1.0, 1.0, 0.0)]

    monkeypatch.setattr(bench_scaling, "run_steps", run)
    monkeypatch.setattr(bench_scaling, "num_cpus", lambda: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    points = measure_scaling(REQUEST, lambda _: None)
    assert given == [(1, 4), (3, 4)]
    assert scaling_json(REQUEST, points)["threads"] == 4
    assert "measured, 4 threads per rank" in printed(points)
    monkeypatch.setattr(bench_scaling, "num_cpus", lambda: 2)
    assert REQUEST.threads == 1, "at least one"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(bench_scaling, "num_cpus", lambda: 12)
    assert REQUEST.threads == 3, "OMP_NUM_THREADS"


def test_a_plan_with_one_batch_in_both_kinds_of_scaling_runs_once_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, int]] = []

    def run(_: object, plan: Plan, *, batch: int, **__: object) -> list[MeasuredStep]:
        given.append((plan.num_ranks, batch))
        return [MeasuredStep(float(batch), 1.0, 0.0)]

    monkeypatch.setattr(bench_scaling, "run_steps", run)
    request = ScalingRequest("dp={n}", (1, 3), model="tiny", length=16, rounds=1)
    points = measure_scaling(request, lambda _: None)
    assert given == [(1, 2), (3, 6), (1, 6)]
    assert [(point.kind, point.ranks, point.batch, point.step_s) for point in points] == [
        ("weak", 1, 2, 2.0),
        ("weak", 3, 6, 6.0),
        ("strong", 1, 6, 6.0),
        ("strong", 3, 6, 6.0),
    ]


def test_a_rank_computes_with_the_threads_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), list[int]()

    class Seen(Exception):
        pass

    def build(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise Seen

    def launch(function: Callable[..., Any], _: int, *arguments: object) -> Any:
        return function(*arguments)

    monkeypatch.setattr(plans, "launch", launch)
    monkeypatch.setattr(plans, "parallelize", build)
    try:
        for threads in (before + 1, None):
            with pytest.raises(Seen):
                run_steps(MODELS["tiny"], Plan.parse("dp=1"), sequence=16, batch=1, threads=threads)
            torch.set_num_threads(before)
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1, before]


def test_an_efficiency_far_above_one_is_called_an_error_of_measurement() -> None:
    points = [Point("weak", f"dp={n}", n, 2 * n, seconds, None) for n, seconds in ((1, 0.30), (3, 0.02))]
    assert "1500% (!)" in printed(points)
    assert "(!): above 110%, an error of measurement" in printed(points)
    assert [row["is_error"] for row in scaling_json(REQUEST, points)["points"]] == [False, True]
    points[1] = Point("weak", "dp=3", 3, 6, 0.28, None)
    assert "107%" in printed(points)
    assert "(!)" not in printed(points)


def printed(points: list[Point]) -> str:
    console = Console(file=io.StringIO(), width=80)
    for table in scaling_tables(REQUEST, points):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())
