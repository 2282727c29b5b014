"""`plait train` under other plans than plain data parallelism: resumed under them and across them, without
a full disk while offloading, and fp16 whose loss scale has to fall."""

import math
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.train.metrics import read_metrics
from support.cli_runs import (
    STEPS,
    finish,
    last_state,
    last_step,
    limited_to,
    start,
    wait_for_step,
    write_recipe,
)

CUT = "dp=2 zero=3 micro=2"


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe without dropout, whose masks differ between data ranks."""
    path = write_recipe(tmp_path_factory.mktemp("plans"))
    path.write_text(path.read_text().replace("attention_dropout = 0.1", "attention_dropout = 0.0"))
    return path


@pytest.fixture(scope="module")
def cut(recipe: Path) -> tuple[Path, str]:
    """A run at stage 3 that was not stopped, and what it showed."""
    out, _ = finish(start("train", recipe, "--plan", CUT))
    return recipe.parent / "run", out


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def column(run: Path, key: str) -> list[float | None]:
    return [line[key] for line in read_metrics(run / "metrics.jsonl") if key in line]


def test_memory_of_a_sharded_run_is_estimated(cut: tuple[Path, str]) -> None:
    assert f"{CUT} on 2 ranks" in cut[1]
    assert "activations" in cut[1]
    assert "unknown" not in cut[1]


def test_a_plan_that_fills_its_ranks_goes_on_on_fewer_with_every_sample_once(
    cut: tuple[Path, str], recipe: Path
) -> None:
    run = recipe.parent / "filled"
    words = ("--plan", "dp=auto micro=2 zero=3", "--set", f"run.dir={run}")
    process = start("train", recipe, *words, "--ranks", "2")
    wait_for_step(process, 7)
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    assert 7 <= last_step(run) < STEPS
    out, _ = finish(start("train", run, "--resume", "--ranks", "1"))
    assert "dp=1" in out
    for mine, other in zip(column(run, "loss"), column(cut[0], "loss"), strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    whole = last_state(cut[0])
    for name, tensor in last_state(run).items():
        assert torch.allclose(tensor, whole[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.sweep
def test_a_run_at_stage_3_that_was_stopped_ends_with_the_bits_of_never_stopping(
    cut: tuple[Path, str], recipe: Path
) -> None:
    run = recipe.parent / "stopped"
    process = start("train", recipe, "--plan", CUT, *sets(f"run.dir={run}"))
    wait_for_step(process, 3)
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    assert 3 <= last_step(run) < STEPS
    out, _ = finish(start("train", run, "--resume"))
    assert f"{CUT} on 2 ranks" in out
    assert_same_bits(last_state(run), last_state(cut[0]))
    for key in ("loss", "validation_loss", "grad_norm"):
        assert column(run, key) == column(cut[0], key), key


@pytest.fixture(scope="module")
def continued(cut: tuple[Path, str], recipe: Path) -> Path:
    """The run at stage 3, two steps longer."""
    run = recipe.parent / "continued"
    shutil.copytree(cut[0], run)
    finish(start("train", run, "--resume", *sets(f"run.steps={STEPS + 2}")))
    return run


@pytest.mark.sweep  # in `ranks` all plans resume from all, and the test above changes the plan of a run
@pytest.mark.parametrize("plan", ["dp=2 micro=2", "dp=1 zero=1 micro=2"])
def test_a_checkpoint_of_stage_3_goes_on_under_another_plan(
    cut: tuple[Path, str], continued: Path, recipe: Path, plan: str
) -> None:
    run = recipe.parent / f"then-{plan.replace(' ', '-')}"
    shutil.copytree(cut[0], run)
    out, _ = finish(start("train", run, "--resume", "--plan", plan, *sets(f"run.steps={STEPS + 2}")))
    assert f"resumed after step {STEPS}" in out
    assert f"{plan} on {plan[3]} rank" in out
    assert column(run, "loss")[-2:] == pytest.approx(column(continued, "loss")[-2:], rel=1e-6)
    assert column(run, "tokens")[-1] == (STEPS + 2) * 16 * 63
    ours, theirs = last_state(run), last_state(continued)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor.double(), theirs[name].double(), rtol=1e-4, atol=1e-6), name


LIMITED_RANK = """
import os, resource
from plait.cli.main import main

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
main()
"""


@pytest.mark.parametrize("where", ["every rank", pytest.param("one rank", marks=pytest.mark.sweep)])
def test_a_disk_too_small_to_offload_to_is_found_before_the_first_step(
    cut: tuple[Path, str], recipe: Path, tmp_path: Path, where: str
) -> None:
    """A limit on the size of files replaces a full disk: the request for the whole file fails at once."""
    run, fast, script = recipe.parent / f"full on {where}", tmp_path / "fast", tmp_path / "limited.py"
    shutil.copytree(cut[0], run)
    fast.mkdir()
    script.write_text(LIMITED_RANK)
    words = ["--plan", "dp=2 offload=disk", *sets(f"run.offload_dir={fast}", f"run.steps={STEPS + 2}")]
    if where == "every rank":
        limited = limited_to(64 << 10, tmp_path)
        out, err = finish(start("train", run, "--resume", *words, script=limited), 2)
    else:
        entry = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        process = start("train", run, "--resume", *words, entry=entry)
        out, err = process.communicate(timeout=60)
        assert process.returncode != 0
    assert err.count("ConfigError: the folder for offloading has no space") == 1, err
    assert "Error: " not in err.replace("ConfigError: ", "", 1).partition("elastic")[0], "one error"
    assert f"{fast}: " in err
    assert "File too large" in err
    assert "tok/s" not in out
    assert list(fast.iterdir()) == []
    assert_same_bits(last_state(run), last_state(cut[0]))
    assert column(run, "loss") == column(cut[0], "loss")


@pytest.mark.sweep
def test_a_run_that_offloads_to_disk_resumes_and_leaves_no_files(recipe: Path, tmp_path: Path) -> None:
    run, plan = recipe.parent / "offloaded", "dp=2 zero=2 micro=2 precision=bf16 offload=disk"
    how = sets(f"run.dir={run}", f"run.offload_dir={tmp_path}")
    finish(start("train", recipe, "--plan", plan, *how, *sets("run.steps=4", "schedule.name=constant")))
    out, _ = finish(start("train", run, "--resume", *sets("run.steps=8")))
    assert "disk" in out
    losses = column(run, "loss")
    assert len(losses) == 8
    assert losses[7] < losses[0]
    assert list(tmp_path.iterdir()) == []


FALLING = 2.0**34  # some back-offs from where this model's gradients fit into fp16
FP16 = ["--plan", "dp=2 zero=1 precision=fp16", *sets(f"loss_scale.initial={FALLING}", "run.max_skipped=2")]


@pytest.mark.sweep
def test_a_loss_scale_may_fall_for_longer_than_skipped_steps_may_last(recipe: Path) -> None:
    run = recipe.parent / "falling"
    out, _ = finish(start("train", recipe, *FP16, *sets(f"run.dir={run}", "run.checkpoint_every=2")))
    skipped, scales = column(run, "skipped"), column(run, "loss_scale")
    falls = skipped.index(False)
    assert falls > 2, "more than run.max_skipped"
    assert scales[: falls + 1] == [FALLING / 2**step for step in range(falls + 1)]
    assert column(run, "skipped_steps")[-1] == sum(map(bool, skipped))
    assert skipped[-4:] == [False] * 4
    assert "the gradient is not finite (loss scale 1.71799e+10)" in out
    losses = [loss for loss in column(run, "loss") if loss is not None]
    assert losses[-1] < losses[0]
    # The count goes on with the run, as does the scale.
    finish(start("train", run, "--resume", *sets(f"run.steps={STEPS + 1}")))
    assert column(run, "skipped_steps")[-1] == sum(map(bool, skipped))
    assert column(run, "loss_scale")[-1] == scales[-1]


@pytest.mark.parametrize(
    ("cause", "scale"),
    [
        (f"loss_scale.minimum={FALLING}", f"{FALLING:g}"),
        pytest.param("optimizer.lr=1e30", "", marks=pytest.mark.sweep),  # test_train.py has it in fp32
    ],
    ids=["a scale that cannot fall", "a loss that is not finite"],
)
def test_fp16_that_no_smaller_scale_could_save_ends_the_run(recipe: Path, cause: str, scale: str) -> None:
    run = recipe.parent / cause.partition("=")[0]
    words = sets(f"run.dir={run}", "schedule.warmup=0", "optimizer.weight_decay=0", cause)
    if not scale:
        words += sets("loss_scale.initial=1024")
    _, err = finish(start("train", recipe, *FP16, *words), 2)
    assert err.count("RunError") == 1
    assert "not finite in 2 steps in a row" in err
    assert f"and a loss scale of {scale}" in err
    assert "precision=bf16" in err
    assert column(run, "skipped_steps")[-1] == 2, "no more are waited for"
    losses = column(run, "loss")[-2:]
    if scale:
        assert all(loss is not None and math.isfinite(loss) for loss in losses)
    else:
        assert losses == [None, None]
