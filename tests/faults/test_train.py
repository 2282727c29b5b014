"""`plait train` as users run it: whole, under torchrun, stopped, killed, resumed; the same bits each time."""

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait import checkpoint
from plait.api import parallelize
from plait.comm import World, connect
from plait.plan import Plan
from plait.train.metrics import read_metrics
from plait.train.model import model_on_meta
from plait.train.optimizer import optimizer_class
from plait.train.run_dir import RunDir
from support.cli_runs import (
    LIMIT_S,
    LOOPBACK,
    STEPS,
    family,
    finish,
    last_state,
    last_step,
    limited_to,
    listening,
    start,
    start_torchrun,
    wait_for,
    wait_for_step,
    write_recipe,
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(recipe: Path) -> tuple[Path, str]:
    """A run from the first step to the last without a stop, and what it showed."""
    out, _ = finish(start("train", recipe))
    return recipe.parent / "run", out


@pytest.fixture
def world() -> Iterator[World]:
    alone = connect()
    yield alone
    alone.close()


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def losses(run: Path) -> list[dict[str, Any]]:
    """The records of steps and evaluations, and not of saves."""
    records = list(read_metrics(run / "metrics.jsonl"))
    return [record for record in records if "loss" in record or "validation_loss" in record]


@pytest.mark.quick
def test_a_run_learns_and_leaves_all_that_it_names(whole: tuple[Path, str]) -> None:
    run, out = whole
    for path in (f"checkpoints/step-{STEPS:08d}", "export", "tensorboard", "metrics.jsonl", "loss.png"):
        assert str(run / path) in out
        assert (run / path).exists()
    assert (run / "sample.txt").read_text().startswith("The ship")
    assert [path.name for path in checkpoint.steps(run / "checkpoints")] == ["step-00000018", "step-00000024"]
    records = list(read_metrics(run / "metrics.jsonl"))
    steps = [record for record in records if "loss" in record]
    validations = [record for record in records if "validation_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["step"] for record in validations] == [0, 8, 16, 24]
    assert validations[0]["validation_loss"] == pytest.approx(math.log(300), rel=0.02)
    assert validations[-1]["validation_loss"] < validations[0]["validation_loss"] - 0.1
    assert steps[3]["lr"] == pytest.approx(0.75e-3)
    assert steps[-1]["tokens"] == STEPS * 16 * 63
    for words in ("LlamaForCausalLM", "dp=2 micro=2 on 2 ranks", "memory per rank", "The ship"):
        assert words in out


@pytest.mark.quick
def test_the_export_is_the_trained_model(whole: tuple[Path, str], world: World, tmp_path: Path) -> None:
    run = RunDir(whole[0])
    ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(0))
    how = run.read_recipe()
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = parallelize(
            model_on_meta(how.model),
            Plan(precision=precision),
            optimizer=optimizer_class(how.optimizer),
            optimizer_args=how.optimizer.torch_args(),
            world=world,
        )
        engine.load_state(last_state(run.path))
        engine.model.eval()
        if precision == "fp32":
            out = run.export  # in the run's own precision
        else:
            out = tmp_path / "bf16"
            finish(start("export", run.path, out, "--dtype", "bf16"))
        exported = AutoModelForCausalLM.from_pretrained(out)
        assert exported.dtype == dtype
        with torch.no_grad():
            ours, theirs = engine.model(input_ids=ids).logits, exported.eval()(input_ids=ids).logits
        assert torch.equal(ours, theirs), (ours - theirs).abs().max()
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    text = "The ship 7 sails 3 miles."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert exported.config.eos_token_id == tokenizer.eos_token_id


def test_torchrun_and_our_launcher_end_with_the_same_bits(whole: tuple[Path, str], recipe: Path) -> None:
    run = recipe.parent / "under-torchrun"
    finish(start_torchrun("-m", "plait", "train", recipe, "--set", f"run.dir={run}"))
    assert_same_bits(last_state(run), last_state(whole[0]))
    ours, theirs = (losses(path) for path in (run, whole[0]))
    assert [line.get("loss") for line in ours] == [line.get("loss") for line in theirs]


def test_saved_stopped_killed_damaged_and_resumed_ends_with_the_bits_of_never_stopping(
    whole: tuple[Path, str], recipe: Path
) -> None:
    """SIGUSR1, which only saves, and Ctrl-C, then SIGTERM, then SIGKILL of all, then a flipped bit that only
    rank 1 reads: each time `--resume` goes on."""
    run = recipe.parent / "stopped"

    words = ("--set", f"run.dir={run}", "--set", "run.checkpoint_every=0")
    process = start("train", recipe, *words)
    wait_for_step(process, 2)
    addresses = {address for pid in family(process.pid) for address in listening(pid)}
    assert addresses <= {LOOPBACK}, "a run on one host listens to no other"
    os.kill(process.pid, signal.SIGUSR1)
    asked_for = int(wait_for(process, r"saved step (\d+) in \d+\.\d\d s")[1])
    wait_for_step(process, asked_for + 1)
    os.kill(process.pid, signal.SIGINT)
    out, _ = finish(process, 130)
    after_ctrl_c = last_step(run)
    assert 2 <= asked_for < after_ctrl_c < STEPS
    assert f"step-{asked_for:08d}" in [path.name for path in checkpoint.steps(run / "checkpoints")]
    assert f"plait train {run} --resume" in out

    process = start("train", run, "--resume")
    wait_for_step(process, after_ctrl_c + 2)
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    after_sigterm = last_step(run)
    assert after_ctrl_c + 2 <= after_sigterm < STEPS

    process = start("train", recipe, "--resume", *words)
    wait_for_step(process, after_sigterm + 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    time.sleep(0.5)  # its ranks end with it
    after_sigkill = last_step(run)
    assert after_sigterm <= after_sigkill < STEPS

    before, newest = checkpoint.steps(run / "checkpoints")
    damaged = newest / "rank-00001.0.safetensors"
    flip_a_bit(damaged)
    out, _ = finish(start("train", run, "--resume"))
    assert f"warning: the checkpoint is damaged: {damaged}" in out
    assert f"resumed after step {checkpoint.step_of(before)}" in out
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    warnings = [line for line in read_metrics(run / "metrics.jsonl") if "warning" in line]
    assert [line["step"] for line in warnings] == [checkpoint.step_of(before)]
    resumed = [line["step"] for line in read_metrics(run / "metrics.jsonl") if "resumed" in line]
    assert resumed[-1] == checkpoint.step_of(before)
    assert_same_bits(last_state(run), last_state(whole[0]))
    ours, theirs = (losses(path) for path in (run, whole[0]))
    for key in ("step", "loss", "validation_loss", "lr", "grad_norm", "tokens"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs], key


def test_torchrun_starts_a_run_again_that_has_lost_a_rank_and_it_ends_with_the_same_bits(
    whole: tuple[Path, str], recipe: Path
) -> None:
    """Twice: before there is a checkpoint, and after. With dp=auto, and saves during the steps."""
    run = recipe.parent / "healed"
    values = (f"run.dir={run}", "run.save_in_background=true", "run.keep_every=12")
    words = [word for value in values for word in ("--set", value)]
    train = ("-m", "plait", "train", recipe, "--plan", "dp=auto micro=2", *words)
    process = start_torchrun("--max-restarts", "2", *train)
    wait_for_step(process, 2)
    kill_a_rank_of(process.pid)
    while last_step(run) < 6:  # the save ends during a later step
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    kill_a_rank_of(process.pid)
    assert int(wait_for(process, r"resumed after step (\d+)")[1]) in (6, 12, 18)
    finish(process)
    assert RunDir(run).read_recipe().plan == "dp=auto micro=2"
    assert [path.name for path in checkpoint.steps(run / "checkpoints")] == [
        "step-00000012",
        "step-00000018",
        "step-00000024",
    ]
    assert_same_bits(last_state(run), last_state(whole[0]))
    ours, theirs = (losses(path) for path in (run, whole[0]))
    for key in ("step", "loss", "validation_loss", "tokens"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs], key


def kill_a_rank_of(torchrun: int) -> None:
    """The last that it has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


SLOW_AND_STOPPED_LATE = """
import os, signal, time
import plait.train.trainer
from plait.checkpoint import saver
from plait.cli.main import main

write, export = saver.write_rank_files, plait.train.trainer.export

def slow_write(partial, rank, *args):
    if rank == 1:
        time.sleep(8)
        (partial.parents[1] / "export.tmp-0a1b2c3d").mkdir()  # as of a process killed in its export
    return write(partial, rank, *args)

def stopped(run, out):
    os.kill(os.getpid(), signal.SIGTERM)
    export(run, out)

saver.write_rank_files, plait.train.trainer.export = slow_write, stopped
main()
"""


@pytest.mark.sweep
def test_a_save_longer_than_a_steps_time_limit_and_a_late_signal_end_as_if_neither_had_been(
    recipe: Path, tmp_path: Path
) -> None:
    run, script = recipe.parent / "slow", tmp_path / "slow.py"
    script.write_text(SLOW_AND_STOPPED_LATE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    values = [
        f"run.dir={run}",
        "run.steps=1",
        "schedule.warmup=0",
        "run.timeout_s=6",
        "run.evaluate_every=0",
    ]
    words = [word for value in values for word in ("--set", value)]
    out, _ = finish(start("train", recipe, *words, entry=torchrun))
    assert last_step(run) == 1
    assert str(run / "export") in out
    AutoModelForCausalLM.from_pretrained(run / "export")
    assert [path.name for path in run.iterdir() if "tmp" in path.name] == []


FAILING_STEP = """
from plait.engine.engine import Engine

def fails(self, batch):
    raise IndexError("of the model's code")

Engine.step = fails
from plait.__main__ import main
main()
"""


def test_a_run_that_fails_in_its_first_step_can_be_started_again_by_the_same_command(
    recipe: Path, tmp_path: Path
) -> None:
    words = ["train", recipe, "--set", f"run.dir={tmp_path / 'run'}", "--set", "run.steps=4"]
    script = tmp_path / "failing.py"
    script.write_text(FAILING_STEP)
    process = start(*words, script=str(script))
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "IndexError: of the model's code" in err
    assert not (tmp_path / "run").exists()
    finish(start(*words))


def test_a_gradient_that_is_not_finite_is_skipped_counted_shown_and_at_last_ends_the_run(
    recipe: Path,
) -> None:
    run = recipe.parent / "diverged"
    sets = [f"run.dir={run}", "optimizer.lr=1e30", "optimizer.weight_decay=0", "run.max_skipped=3"]
    words = [word for value in [*sets, "schedule.warmup=0"] for word in ("--set", value)]
    out, err = finish(start("train", recipe, *words), 2)
    assert err.count("RunError") == 1, "one error for the job"
    assert "not finite in 3 steps in a row" in err
    assert "skipped, the gradient is not finite" in out
    skipped = [line["skipped"] for line in read_metrics(run / "metrics.jsonl") if "skipped" in line]
    assert skipped[-3:] == [True] * 3
    assert not skipped[0]


def test_a_run_whose_output_is_read_no_more_ends_like_any_other(recipe: Path) -> None:
    run = recipe.parent / "unread"
    process = start("train", recipe, "--set", f"run.dir={run}", "--set", "run.steps=6")
    wait_for_step(process, 1)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait(LIMIT_S) == 0
    assert errors.count("warning: standard output cannot be written: Broken pipe") == 1
    assert last_step(run) == 6
    assert [line["step"] for line in losses(run) if "loss" in line] == [*range(1, 7)]
    assert (run / "export" / "model.safetensors").exists()


def test_a_full_disk_ends_the_run_and_its_last_good_checkpoint_stays(
    whole: tuple[Path, str], recipe: Path, tmp_path: Path
) -> None:
    run = recipe.parent / "full"
    shutil.copytree(whole[0], run)
    # Bytes: less than the weights, more than all else.
    script = limited_to(64 << 10, tmp_path)
    began_s = time.monotonic()
    process = start("train", run, "--resume", "--set", f"run.steps={STEPS + 2}", script=script)
    _, err = finish(process, 2)
    assert time.monotonic() - began_s < LIMIT_S
    assert err.count("CheckpointError") == 1
    assert "not enough disk" in err
    assert [path.name for path in (run / "checkpoints").iterdir() if "tmp" in path.name] == []
    assert_same_bits(last_state(run), last_state(whole[0]))


def test_a_run_that_starts_from_an_export_begins_where_that_ended(
    whole: tuple[Path, str], recipe: Path
) -> None:
    run, base = recipe.parent / "tuned", recipe.parent / "base"
    shutil.copytree(whole[0] / "export", base)
    (base / "generation_config.json").write_text('{"eos_token_id": [0], "max_new_tokens": 7}')
    text = recipe.read_text().replace(f'"{recipe.parent}/data"', f'"{recipe.parent}/tuned-data"')
    model = text[text.index("[model.config]") : text.index("[data]")]
    text = text.replace(model, f'[model]\npath = "{base}"\npretrained = true\n')
    tune = recipe.parent / "tune.toml"
    tune.write_text(text.replace("vocab_size = 300", f'path = "{base}"'))
    finish(start("train", tune, "--set", f"run.dir={run}", "--set", "run.steps=4", "--plan", "dp=1"))
    ended, began = (
        [
            line["validation_loss"]
            for line in read_metrics(path / "metrics.jsonl")
            if "validation_loss" in line
        ]
        for path in (whole[0], run)
    )
    assert began[0] == pytest.approx(ended[-1], rel=1e-6)
    assert began[-1] < ended[-1]
    assert AutoModelForCausalLM.from_pretrained(run / "export").config.vocab_size == 300

    # the run has everything but its tokens, wherever it is, and even if what it began with is gone
    shutil.rmtree(base)
    moved = run.rename(recipe.parent / "moved")
    data = (recipe.parent / "tuned-data").rename(recipe.parent / "moved-data")
    finish(start("train", moved, "--resume", "--set", f"data.dir={data}", "--set", "run.steps=5"))
    assert last_step(moved) == 5
    assert json.loads((moved / "export" / "generation_config.json").read_text())["max_new_tokens"] == 7
    shutil.rmtree(data)
    out, _ = finish(start("generate", moved, "--prompt", "The ship", "--tokens", "1"))
    assert out.startswith("The ship")
    finish(start("export", moved, recipe.parent / "again"))
    assert AutoModelForCausalLM.from_pretrained(recipe.parent / "again").config.vocab_size == 300


def test_generate_writes_the_same_text_for_the_same_seed(whole: tuple[Path, str]) -> None:
    words = ["generate", whole[0], "--prompt", "The ship", "--tokens", "8", "--seed", "3"]
    processes = [start(*words) for _ in range(2)]
    one, other = (finish(process)[0] for process in processes)
    assert one == other
    assert one.startswith("The ship")


def test_metrics_are_json(whole: tuple[Path, str]) -> None:
    for line in (whole[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
