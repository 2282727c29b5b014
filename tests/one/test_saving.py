"""When a run saves, which checkpoints stay, and what becomes of a save that fails: real Savers, one rank."""

import io
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from plait import checkpoint
from plait.comm import World
from plait.errors import CheckpointError, RunError
from plait.parallel.zero.state_io import StateShard
from plait.train.checkpointing import Checkpointing
from plait.train.metrics import Metrics, read_metrics
from plait.train.run_dir import RunDir
from plait.train.sections import RunConfig

KEPT = [StateShard.from_tensor("weights/a", torch.arange(100_000.0))]


class Run:
    """A run's saves and what it shows of them."""

    def __init__(self, path: Path, **how: Any) -> None:
        self.dir = RunDir(path)
        self.shown = io.StringIO()
        self.metrics = Metrics(self.dir, Console(file=self.shown, width=200), 0, 100, 10)
        config = RunConfig(dir=path, steps=100, batch=1, **how)
        world = World.alone(torch.device("cpu"))
        self.saving = Checkpointing(config, self.dir.checkpoints, world, self.metrics)

    def save(self, step: int, score: float | None = None, *, last: bool = False) -> None:
        self.saving.save(step, KEPT, {}, score=score, last=last)

    @property
    def saved(self) -> list[int | None]:
        return [checkpoint.step_of(path) for path in checkpoint.steps(self.dir.checkpoints)]

    @property
    def warnings(self) -> list[str]:
        return [line["warning"] for line in read_metrics(self.dir.metrics) if "warning" in line]


Make = Any  # (**how) -> Run


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = []

    def make(**how: Any) -> Run:
        made.append(Run(tmp_path, **how))
        return made[-1]

    yield make
    for run in made:
        with run.metrics:
            pass


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can have more than 64 KiB: less than the weights, more than all else."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_until_ended(run: Run) -> None:
    limit_s = time.monotonic() + 20.0
    while not run.saving.has_ended:
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def test_the_newest_stay_and_those_of_round_steps_and_the_best(make: Make) -> None:
    run = make(keep_last=2, keep_every=40, keep_best=True)
    scores = {10: 3.0, 20: 1.5, 30: math.nan, 40: 2.0, 50: 1.6, 60: None, 70: -math.inf, 80: 1.9, 90: 2.5}
    for step, score in scores.items():
        run.save(step, score)
    assert run.saved == [20, 40, 80, 90], "no number, or one that is not finite, is not the best"
    assert checkpoint.best(run.dir.checkpoints) == (20, 1.5)
    run.save(100, 1.4, last=True)
    assert run.saved == [40, 80, 90, 100]


def test_each_save_reports_how_long_the_steps_waited_for_it(make: Make) -> None:
    run = make()
    run.save(10)
    assert "saved step 10 in 0." in run.shown.getvalue()
    [line] = [line for line in read_metrics(run.dir.metrics) if "save_pause_s" in line]
    assert line["step"] == 10
    assert 0.0 < line["save_pause_s"] < 10.0


def test_a_save_during_steps_is_reported_when_it_has_ended(make: Make) -> None:
    run = make(save_in_background=True)
    run.save(10)
    assert run.shown.getvalue() == ""
    wait_until_ended(run)
    run.saving.wait()
    assert "saved step 10 in the background, training paused for 0." in run.shown.getvalue()
    assert not run.saving.has_ended, "it was reported"
    run.save(20, last=True)
    assert run.saved == [10, 20], "the last one is waited for"
    assert "saved step 20" in run.shown.getvalue()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_is_a_warning_and_the_next_one_tries_again(make: Make, background: bool) -> None:
    run = make(save_in_background=background)
    run.save(10)
    run.saving.wait()
    for _ in range(2):  # the count begins again
        with full_disk():
            for step in (20, 30):
                run.save(step)
                if background:
                    wait_until_ended(run)
                    run.saving.wait()
        assert "step 20 is not saved: not enough disk for a checkpoint" in run.warnings[-2]
        assert "(failure 2 in a row, 3 end the run)" in run.warnings[-1]
        assert 30 not in run.saved
        run.save(40)
        run.saving.wait()
    assert run.saved == [10, 40]
    assert len(run.warnings) == 4
    assert "warning: step 20" in run.shown.getvalue()
    assert [path.name for path in run.dir.checkpoints.iterdir() if "tmp" in path.name] == []


def test_so_many_failures_in_a_row_end_the_run(make: Make) -> None:
    run = make(max_failed_saves=2)
    with full_disk():
        run.save(10)
        with pytest.raises(CheckpointError, match="not enough disk"):
            run.save(20)
    impatient = make(max_failed_saves=1)
    with full_disk(), pytest.raises(CheckpointError, match="not enough disk"):
        impatient.save(30)


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_is_an_error_when_it_fails_and_is_tried_whatever_came_before(
    make: Make, background: bool
) -> None:
    run = make(save_in_background=background, max_failed_saves=1 + background)
    if background:
        with full_disk():
            run.save(10)
            wait_until_ended(run)
    with full_disk(), pytest.raises(CheckpointError, match="not enough disk"):
        run.save(20, last=True)
    run.save(20, last=True)
    assert run.saved == [20]


def test_timed_saves_follow_rank_0s_clock(make: Make) -> None:
    never, often = make(), make(checkpoint_minutes=0.2 / 60)
    assert not often.saving.is_due
    time.sleep(0.25)
    assert often.saving.is_due
    assert not never.saving.is_due
    often.save(10)
    assert not often.saving.is_due


def test_an_exception_waits_for_the_save_in_progress(make: Make) -> None:
    run = make(save_in_background=True)
    run.save(10)
    with pytest.raises(RunError, match="diverged"), run.saving:
        raise RunError("diverged")
    assert run.saved == [10]
