"""metrics.jsonl, TensorBoard, the picture: what a run tells about itself."""

import io
import json
import math
import re
import runpy
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import matplotlib
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plait.engine.totals import EvalResult
from plait.errors import CheckpointError, DataError, RunError
from plait.plan import MemoryUse
from plait.train.metrics import (
    Metrics,
    PeakFlops,
    StepMetrics,
    data_sheet_peak,
    expert_facts,
    matmul_peak,
    mean_loss,
    read_metrics,
    truncate_metrics,
)
from plait.train.run_dir import RunDir
from plait.train.run_report import draw_experts, draw_losses, memory_table
from plait.train.saved_recipe import SavedRecipe
from support.cli_runs import ROOT


def facts(
    step: int, *, loss: float | None = None, skipped: int = 0, loss_scale: float | None = None
) -> StepMetrics:
    """`skipped`: how many steps were, up to this one and it too."""
    return StepMetrics(
        step=step,
        loss=10.0 - step if loss is None else loss,
        lr=1e-3,
        grad_norm=0.5,
        skipped=skipped > 0,
        skipped_steps=skipped,
        batch=4,
        tokens=step * 100,
        tokens_per_s=5000.0,
        mfu=0.25,
        mfu_full_attention=0.3,
        mfu_of_matmul=0.35,
        seconds=0.02,
        loss_scale=loss_scale,
    )


def record(run: RunDir, first: int, last: int) -> str:
    """Steps first+1 .. last of 12, an evaluation after each third. What was shown."""
    shown = io.StringIO()
    with Metrics(run, Console(file=shown, width=200), first, 12, 2) as metrics:
        for step in range(first + 1, last + 1):
            metrics.step(facts(step))
            if step % 3 == 0:
                metrics.validation(step, 11.0 - step)
    return shown.getvalue()


def test_every_step_is_in_the_file_and_every_second_on_the_screen(tmp_path: Path) -> None:
    shown = record(RunDir(tmp_path), 0, 12)
    steps = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[3] == {name: value for name, value in vars(facts(4)).items() if value is not None}
    assert "loss_scale" not in steps[3], "there is none"
    lines = [line for line in shown.splitlines() if "tok/s" in line]
    assert len(lines) == 6
    assert "step 4/12" in lines[1]
    assert "loss 6.5000" in lines[1], "the mean since the last line"
    assert "5,000 tok/s mfu 25.0%" in lines[1]


def test_the_time_left_is_a_mean_over_more_steps_than_a_line(tmp_path: Path) -> None:
    shown = io.StringIO()
    with Metrics(RunDir(tmp_path), Console(file=shown, width=200), 0, 1000, 10) as metrics:
        for step in range(1, 101):
            metrics.step(replace(facts(step), seconds=11.0 if step > 90 else 1.0))
    assert shown.getvalue().splitlines()[-1].endswith("00:30:00 left"), "900 steps of 2 s, not of 11"


def test_a_line_has_the_losses_of_routers_and_the_choices_dropped_since_the_last(tmp_path: Path) -> None:
    shown = io.StringIO()
    with Metrics(RunDir(tmp_path), Console(file=shown, width=200), 0, 2, 2) as metrics:
        for step in (1, 2):
            metrics.step(replace(facts(step), aux_loss=2.0, router_z_loss=0.5, dropped_choices=600 * step))
    assert "aux 2.000 router z 0.500 dropped 1,800 lr" in shown.getvalue()


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record(run, 0, 8)
    with run.metrics.open("a") as file:
        file.write('{"step": 9, "lo')  # a process killed while it wrote
    record(run, 6, 12)
    found = list(read_metrics(run.metrics))
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in found if "validation_loss" in line] == [3, 6, 9, 12]
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]
    assert [event.value for event in board.Scalars("validation/loss")] == [8.0, 5.0, 2.0, -1.0]


def test_a_validation_loss_is_reported_with_its_perplexity(tmp_path: Path) -> None:
    run, shown = RunDir(tmp_path), io.StringIO()
    with Metrics(run, Console(file=shown, width=200), 0, 12, 2) as metrics:
        metrics.validation(3, 5.0)
        metrics.validation(6, 1000.0)  # beyond the largest float
    assert "step 3/12  validation loss 5.0000  perplexity 148.41\n" in shown.getvalue()
    assert "perplexity inf\n" in shown.getvalue()
    found = [line["validation_perplexity"] for line in read_metrics(run.metrics)]
    assert found == [pytest.approx(148.4131591), None]
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    [first, _] = board.Scalars("validation/perplexity")
    assert (first.step, first.value) == (3, pytest.approx(148.4131591))


def test_a_run_that_starts_again_in_its_directory_logs_everything_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for _ in range(2):
        with Metrics(run, Console(file=io.StringIO()), 0, 12, 2) as metrics:
            metrics.validation(0, 5.0)
            metrics.warn(0, "slow")
            metrics.step(facts(1))
    assert [(line["step"], line.get("warning")) for line in read_metrics(run.metrics)] == [
        (0, None),
        (0, "slow"),
        (1, None),
    ]


def test_garbage_that_a_power_cut_left_costs_its_own_lines_only(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record(run, 0, 4)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    rubbish = (b"\x00" * 40 + b"\n", b"\xff\xfe\n", b'{"step": 9\n', b"[1]\n", b'{"loss": 1}\n', b"7\n")
    run.metrics.write_bytes(b"".join([*lines[:2], *rubbish, *lines[2:], b'{"step": 5}']))
    assert [line["step"] for line in read_metrics(run.metrics)] == [1, 2, 3, 3, 4]
    record(run, 4, 6)
    for line in run.metrics.read_text().splitlines():
        json.loads(line)


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.flush()


def record_on_a_full_disk(run: RunDir, steps: int, error: Exception | None = None) -> None:
    with Metrics(run, Console(file=io.StringIO()), 0, 12, 1) as metrics:
        metrics._file.close()
        metrics._file = FullDisk()
        for step in range(steps):
            metrics.step(facts(step + 1))
        if error is not None:
            raise error


@pytest.mark.parametrize("steps", [0, 1], ids=["found at the end", "found at a step"])
def test_a_full_disk_is_an_error(tmp_path: Path, steps: int) -> None:
    with pytest.raises(RunError, match="cannot write") as caught:
        record_on_a_full_disk(RunDir(tmp_path), steps)
    assert "No space left" in caught.value.message()


def test_a_directory_that_is_removed_is_one_error_and_no_traceback_of_a_thread(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    hook = threading.excepthook

    def write_and_lose() -> None:
        limit_s = time.monotonic() + 20
        with Metrics(run, Console(file=io.StringIO()), 0, 10**9, 1) as metrics:
            metrics.step(facts(1))
            metrics._boards[0]._writer.flush()  # its thread does nothing now
            shutil.rmtree(run.path)
            while time.monotonic() < limit_s:
                metrics.validation(1, 2.0)
                time.sleep(0.01)

    with pytest.raises(RunError, match="cannot write the run's metrics"):
        write_and_lose()
    assert threading.excepthook is hook


def test_a_full_disk_does_not_hide_the_error_that_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no room"):
        record_on_a_full_disk(RunDir(tmp_path), 0, CheckpointError("no room for a checkpoint"))


def test_a_number_that_is_not_finite_is_null_and_the_skip_is_logged(tmp_path: Path) -> None:
    shown = io.StringIO()
    with Metrics(RunDir(tmp_path), Console(file=shown, width=200), 0, 12, 2) as metrics:
        metrics.step(facts(1, loss=math.nan, skipped=1))
        metrics.step(facts(2))
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] is None
    assert first["skipped"] is True
    assert "step 1: skipped, the gradient is not finite" in shown.getvalue()
    assert "loss 8.0000" in shown.getvalue(), "the mean is of what is finite"


def test_a_loss_scale_and_skipped_steps_are_in_the_file_and_on_the_board(tmp_path: Path) -> None:
    run, shown = RunDir(tmp_path), io.StringIO()
    with Metrics(run, Console(file=shown, width=200), 0, 12, 2) as metrics:
        for step in range(1, 5):
            metrics.step(facts(step, skipped=step, loss_scale=2.0**-step))
    assert [line["loss_scale"] for line in read_metrics(run.metrics)] == [0.5, 0.25, 0.125, 0.0625]
    assert [line["skipped_steps"] for line in read_metrics(run.metrics)] == [1, 2, 3, 4]
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    assert [event.value for event in board.Scalars("train/loss_scale")] == [0.25, 0.0625]
    assert [event.value for event in board.Scalars("train/skipped_steps")] == [2, 4]
    assert "step 2: skipped, the gradient is not finite (loss scale 0.25)" in shown.getvalue()


def test_a_step_that_is_skipped_as_it_trains_nothing_says_so(tmp_path: Path) -> None:
    shown = io.StringIO()
    with Metrics(RunDir(tmp_path), Console(file=shown, width=200), 0, 1, 1) as metrics:
        metrics.step(replace(facts(1, loss=math.nan, skipped=1), tokens_per_s=0.0))
    assert "step 1: skipped, no token has a target" in shown.getvalue()


def test_a_line_of_steps_is_shown_at_the_next_one_if_a_late_worker_jumped_over_its_own(
    tmp_path: Path,
) -> None:
    shown = io.StringIO()
    with Metrics(RunDir(tmp_path), Console(file=shown, width=200), 0, 12, 4) as metrics:
        for step in (1, 3, 5, 7, 9, 10, 12):
            metrics.step(facts(step))
    assert re.findall(r"step (\d+)/12", shown.getvalue()) == ["5", "9", "12"]


def test_other_ranks_write_and_show_nothing(tmp_path: Path) -> None:
    with Metrics(RunDir(tmp_path), None, 0, 12, 2) as metrics:
        metrics.step(facts(1))
        metrics.validation(1, 1.0)
        metrics.log("not shown")
    assert list(tmp_path.iterdir()) == []


def test_cutting_back_a_file_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    truncate_metrics(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


MIB = 2**20


def test_the_memory_table_leaves_out_zeros_and_sums_the_device() -> None:
    predicted = MemoryUse(2 * MIB, 4 * MIB, 0, 0, 0, None, disk=8 * MIB)
    measured = MemoryUse(2 * MIB, 4 * MIB, 0, 0, MIB, 3 * MIB, disk=8 * MIB)
    shown = io.StringIO()
    Console(file=shown, width=80).print(memory_table(predicted, measured))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.getvalue().splitlines()]
    assert [row for row in cells if row] == [
        ["parameters", "2.0 MiB", "2.0 MiB"],
        ["gradients", "4.0 MiB", "4.0 MiB"],
        ["buffers", "0 B", "1.0 MiB"],
        ["activations", "unknown", "3.0 MiB"],
        ["total", "at least 6.0 MiB, without activations", "10.0 MiB"],
        ["disk", "8.0 MiB", "8.0 MiB"],
    ]


def test_the_picture_shows_both_losses(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record(run, 0, 12)
    draw_losses(run.metrics, run.picture)
    assert run.picture.read_bytes().startswith(b"\x89PNG")
    with_validation = run.picture.stat().st_size
    kept = [line for line in run.metrics.read_text().splitlines(True) if "validation" not in line]
    run.metrics.write_text("".join(kept))
    draw_losses(run.metrics, run.picture)
    assert run.picture.stat().st_size < with_validation


@pytest.mark.parametrize("number", [4, 40])
def test_the_picture_of_experts_shows_their_loads(tmp_path: Path, number: int) -> None:
    run, loads = RunDir(tmp_path), [0, 5, *range(1, number - 1)]
    record(run, 0, 12)
    assert not draw_experts(run.metrics, run.experts)
    with Metrics(run, Console(file=io.StringIO()), 12, 16, 1) as metrics:
        for step in (13, 14):
            metrics.experts(step, {"first": loads, "second": loads[::-1]})
        metrics.step(
            replace(
                facts(15),
                aux_loss=1.5,
                dropped_choices=2,
                **expert_facts({"first": [3, 0, 1], "second": [1, 2, 3]}),
            )
        )
    with run.metrics.open("a") as file:
        file.write('{"step": 16, "expert_loads": {"first": "many"}}\n')
    *_, experts, step = read_metrics(run.metrics)
    assert experts["expert_loads"] == {"first": loads, "second": loads[::-1]}
    assert (step["aux_loss"], step["expert_imbalance"], step["idle_experts"]) == (1.5, 9 / 4, 1)
    assert step["dropped_choices"] == 2
    assert draw_experts(run.metrics, run.experts)
    assert run.experts.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", [[], ["--validation"]])
def test_the_losses_of_several_runs_are_drawn_with_their_plans(tmp_path: Path, kind: list[str]) -> None:
    plans = ["dp=2", "dp=2 local_steps=8"]
    for index, plan in enumerate(plans):
        run = RunDir(tmp_path / str(index))
        run.path.mkdir()
        record(run, 0, 9)
        SavedRecipe({"plan": plan}, {}).write(run.recipe)
    program, picture = ROOT / "tools" / "plot_losses.py", tmp_path / "losses.svg"
    words = [program, *kind, picture, *(tmp_path / str(index) for index in range(len(plans)))]
    with (
        mock.patch.object(sys, "argv", [*map(str, words)]),
        matplotlib.rc_context({"svg.fonttype": "none"}),  # labels as text
    ):
        runpy.run_path(str(program), run_name="__main__")
    drawn = picture.read_text()
    assert all(f">{label}<" in drawn for label in [*plans, "validation loss" if kind else "training loss"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_measured_peak_is_a_speed_that_a_processor_can_have(dtype: torch.dtype) -> None:
    began_s = time.monotonic()
    assert 1e8 < matmul_peak(torch.device("cpu"), dtype) < 1e14
    assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("NVIDIA H200", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn, None),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA GeForce RTX 3060", torch.bfloat16, None),
        ("", torch.bfloat16, None),
    ],
)
def test_the_data_sheet_is_found_by_the_devices_name(
    name: str, dtype: torch.dtype, teraflops: float | None
) -> None:
    found = data_sheet_peak(name, dtype)
    assert (found and found / 1e12) == (teraflops and pytest.approx(teraflops))


def test_float32_products_in_tf32_have_a_peak_of_their_own() -> None:
    assert data_sheet_peak("NVIDIA H200", torch.float32, uses_tf32=True) == pytest.approx(494.7e12)
    assert data_sheet_peak("NVIDIA H200", torch.float32) == pytest.approx(66.9e12)


def test_mfu_is_relative_to_the_data_sheet_and_without_one_to_the_measured_product() -> None:
    known, unknown = PeakFlops(700e12, 989e12), PeakFlops(700e12, None)
    assert (known.for_mfu, unknown.for_mfu) == (989e12, 700e12)
    assert str(known) == (
        "989,000.0 GFLOP/s per rank (data sheet), 700,000.0 GFLOP/s per rank (measured matrix product)"
    )
    assert "data sheet" not in str(unknown)


def test_validation_batches_without_a_target_are_an_error() -> None:
    none, some = EvalResult(loss_sum=0.0, num_tokens=0), EvalResult(loss_sum=3.0, num_tokens=2)
    assert mean_loss([none, some]) == 1.5
    with pytest.raises(DataError, match="the validation batches have no trained token"):
        mean_loss([none, none])
