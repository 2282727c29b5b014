"""`plait train` over stages: whole, traced, stopped, under another plan, exported; ranks that fail or die."""

import os
import re
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from plait.cli.main import app
from plait.plan.schedule import Kind, Timeline
from plait.plan.schedule.trace import read_trace
from plait.plan.schedule.validate import dependencies
from plait.train.metrics import read_metrics
from support.cli_runs import (
    LIMIT_S,
    STEPS,
    finish,
    last_step,
    ranks_of,
    start,
    start_torchrun,
    wait_for_step,
    write_recipe,
)

PLAN = "pp=2 micro=4"


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe without dropout, whose masks depend on the plan."""
    path = write_recipe(tmp_path_factory.mktemp("stages"))
    path.write_text(path.read_text().replace("attention_dropout = 0.1", "attention_dropout = 0.0"))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Path:
    """A run on one rank."""
    run = recipe.parent / "alone"
    finish(start("train", recipe, "--plan", "dp=1", *sets(f"run.dir={run}", "sample.tokens=0")))
    return run


@pytest.fixture(scope="module")
def staged(recipe: Path) -> tuple[Path, str]:
    """A run over two stages with a trace, and what it showed."""
    out, _ = finish(start("train", recipe, "--plan", PLAN, "--trace", recipe.parent / "trace.json"))
    return recipe.parent / "run", out


def exported(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def values(run: Path, key: str) -> list[float]:
    return [line[key] for line in read_metrics(run / "metrics.jsonl") if key in line]


def assert_same_run(run: Path, other: Path) -> None:
    for key in ("loss", "validation_loss"):
        assert values(run, key) == pytest.approx(values(other, key), rel=1e-5)
    ours, theirs = exported(run), exported(other)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert float((ours[name] - weight).abs().max()) <= 1e-5 * float(weight.abs().max()), name


def test_a_run_over_stages_ends_as_one_ranks_run(staged: tuple[Path, str], alone: Path) -> None:
    run, out = staged
    assert len(values(run, "loss")) == STEPS
    assert_same_run(run, alone)
    for words in ("pp=2 micro=4 on 2 ranks", "memory of rank 0", "The ship"):
        assert words in out
    assert re.search(r"memory, at most \(rank [01]\)", out)


@pytest.mark.sweep
def test_a_run_goes_on_in_other_stages_and_in_none(staged: tuple[Path, str], alone: Path) -> None:
    run = staged[0].parent / "moved"
    process = start("train", staged[0].parent / "recipe.toml", "--plan", PLAN, *sets(f"run.dir={run}"))
    wait_for_step(process, 6)
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    stopped_at = last_step(run)
    assert 6 <= stopped_at < STEPS
    shutil.copytree(run, run.with_name("alone again"))
    for there, plan in (
        (run, "pp=2 micro=2 schedule=zb-h1 stages=1,1"),
        (run.with_name("alone again"), "dp=2"),
    ):
        out, _ = finish(start("train", there, "--resume", "--plan", plan))
        assert f"resumed after step {stopped_at}" in out
        assert_same_run(there, alone)


def test_the_last_checkpoint_of_stages_writes_text(staged: tuple[Path, str]) -> None:
    out, _ = finish(start("generate", staged[0], "--prompt", "The ship", "--tokens", "6", "--seed", "3"))
    assert out.startswith("The ship")


# --- traces


def check_in_time(timeline: Timeline) -> None:
    """No rank does two things at once, and nothing begins before what it needs has ended; or, if that is an
    unsplit backward of another stage, which sends its gradient before it ends, before it has begun."""
    spans = {span.action: span for rank in timeline.ranks for span in rank}
    for rank in timeline.ranks:
        assert all(span.end > span.start for span in rank)
        assert all(one.end <= other.start for one, other in pairwise(rank))
    for action, span in spans.items():
        for before in dependencies(action, timeline.schedule.num_stages):
            is_split = (before.stage, before.micro) in timeline.schedule.split
            sends_early = before.kind is Kind.B and before.stage != action.stage and not is_split
            ready_s = spans[before].start if sends_early else spans[before].end
            assert ready_s <= span.start, f"{action} began before {before}"


def test_a_runs_trace_is_in_order_and_is_drawn(staged: tuple[Path, str], tmp_path: Path) -> None:
    path = staged[0].parent / "trace.json"
    assert f"trace of 3 steps: plait schedule --trace {path}" in staged[1]
    steps = read_trace(path)
    assert list(steps) == [2, 3, 4]  # counted from 0
    for timeline in steps.values():
        assert timeline.schedule.num_ranks == 2
        assert sum(span.action.kind is Kind.F for rank in timeline.ranks for span in rank) == 2 * 4
        check_in_time(timeline)
    words = ["schedule", "--trace", str(path), "--png", str(tmp_path / "a.png")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert re.search(r"measured, step [234]", result.output)
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.sweep
def test_a_short_run_is_traced_as_far_as_it_goes_and_a_stage_alone_too(recipe: Path, tmp_path: Path) -> None:
    for number, (plan, steps, traced) in enumerate(
        [("pp=2 micro=2 schedule=zb-h1", 4, [2, 3]), ("dp=2", 1, [0])]
    ):
        path = tmp_path / f"{number}.json"
        how = sets(f"run.dir={tmp_path}/{number}", f"run.steps={steps}", "run.evaluate_every=0")
        more = sets("schedule.warmup=0", "sample.tokens=0")
        finish(start("train", recipe, "--plan", plan, "--trace", path, *how, *more))
        found = read_trace(path)
        assert list(found) == traced
        for timeline in found.values():
            check_in_time(timeline)


# --- ranks that fail


FAILS = """
from plait.cli.main import main
from plait.engine.stage import StageRunner

forward, calls = StageRunner.outputs, []

def outputs(self, *given):
    calls.append(1)
    if self.module_part.number == 1 and len(calls) == 7:
        raise ZeroDivisionError("the stage's own")
    return forward(self, *given)

StageRunner.outputs = outputs
main()
"""
MOST_S = 15.0  # on a busy machine; the limit of a step is run.timeout_s, which is 600


@pytest.mark.parametrize("transport", ["host", pytest.param("gloo", marks=pytest.mark.sweep)])
def test_a_stage_that_raises_ends_all_ranks_with_its_traceback_first(
    recipe: Path, tmp_path: Path, transport: str
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    how = sets(f"run.dir={tmp_path}/run", f"run.transport={transport}", "run.evaluate_every=0")
    process = start_torchrun(script, "train", recipe, "--plan", PLAN, *how)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "ZeroDivisionError: the stage's own" in err
    first = err.index("Traceback (most recent call last)")
    assert err[first:].index("ZeroDivisionError") < (err[first:] + "CommError").index("CommError")


@pytest.mark.parametrize("transport", [pytest.param("host", marks=pytest.mark.sweep), "gloo"])
def test_a_rank_killed_in_a_step_ends_the_run_within_seconds(
    recipe: Path, tmp_path: Path, transport: str
) -> None:
    how = sets(f"run.dir={tmp_path}/run", f"run.transport={transport}", "run.steps=100000")
    process = start("train", recipe, "--plan", PLAN, *how, *sets("run.checkpoint_every=0"))
    wait_for_step(process, 3)
    first, _ = ranks_of(process.pid)
    os.kill(first, signal.SIGKILL)
    began_s = time.monotonic()
    _, err = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began_s < MOST_S
    assert process.returncode not in (0, None)
    assert re.search(r"rank (\d )?is gone|SIGKILL", err), err


# --- what is found before a rank starts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--plan", "pp=5 micro=4"], ["PlanError", "2 blocks cannot fill 5 stages", "2 stages"]),
        (["--plan", "pp=2 chunks=3 micro=4"], ["PlanError", "2 blocks cannot fill 6 stages"]),
        (["--plan", "pp=4 micro=4 stages=1,0,1,0"], ["PlanError", "not a list of block counts", "may be 0"]),
        (["--plan", "pp=2 micro=4 stages=1,2"], ["PlanError", "do not add up", "stages=1,1"]),
        (
            ["--plan", "pp=2 micro=4 stages=2"],
            ["PlanError", "one block count per stage", "expected: 2 block counts"],
        ),
        (["--plan", "pp=2 micro=3"], ["PlanError", "does not divide", "run.batch"]),
        (["--plan", "pp=2 micro=4 schedule=1f2b"], ["PlanError", "schedule", "1f1b"]),
        (["--plan", "pp=2 micro=4 schedule=inference"], ["PlanError", "schedule"]),
        (["--plan", "pp=2 micro=2 schedule=zbv chunks=3"], ["ScheduleError", "2 stages per rank"]),
        (
            ["--plan", "pp=2 micro=4 schedule=zb-h1 compile=true"],
            ["PlanError", "cannot be split", "compile=false"],
        ),
        (["--plan", "pp=2 micro=4 schedule=file:{here}/none.csv"], ["ScheduleError", "cannot be read"]),
        (
            ["--plan", "pp=2 micro=4 schedule=file:{here}/three.csv"],
            ["a different number of ranks", "3 ranks", "2 ranks"],
        ),
        (
            ["--plan", "pp=2 micro=2 schedule=file:{here}/four.csv"],
            ["a different number of micro-batches", "4", "2"],
        ),
        (["--plan", "pp=2 micro=2 schedule=file:{here}/stuck.csv"], ["ScheduleError", "rank 1:", ">B1.0<"]),
        (
            ["--trace", "{here}/none/a.json"],
            ["ConfigError", "the folder of run.trace does not exist", "mkdir -p {here}/none"],
        ),
        (["--trace", "{here}"], ["ConfigError", "run.trace is a folder"]),
    ],
    ids=lambda value: value[-1] if value[0].startswith("--") else None,
)
def test_a_mistake_is_an_error_before_a_rank_starts(
    recipe: Path, tmp_path: Path, words: list[str], says: list[str]
) -> None:
    for name, schedule in (("three", "1f1b --pp 3 --micro 2"), ("four", "1f1b --pp 2 --micro 4")):
        command = ["schedule", *schedule.split(), "--csv", str(tmp_path / f"{name}.csv")]
        assert CliRunner().invoke(app, command).exit_code == 0
    (tmp_path / "stuck.csv").write_text("F0.0,F0.1,B0.0,B0.1\nB1.0,F1.0,F1.1,B1.1\n")
    words = [word.format(here=tmp_path) for word in words]
    result = CliRunner().invoke(app, ["train", str(recipe), *sets(f"run.dir={tmp_path}/run"), *words])
    assert result.exit_code == 2, result.output
    assert len(re.findall(r"^\w+Error: ", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert all(word.format(here=tmp_path) in result.stderr for word in says), result.stderr
    assert not (tmp_path / "run").exists()
