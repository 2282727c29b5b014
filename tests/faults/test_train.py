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

import pytest
import torch
from runs import LIMIT_S, PLAIT, STEPS, finish, last_state, last_step, start, wait_for_step, write_recipe
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait import checkpoint
from plait.assembly import parallelize
from plait.comm import World, connect
from plait.plan import Plan
from plait.train.metrics import read_metrics
from plait.train.model import model_on_meta
from plait.train.run import RunDir


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


def test_a_run_learns_and_leaves_all_that_it_names(whole: tuple[Path, str]) -> None:
    run, out = whole
    for path in (f"checkpoints/step-{STEPS:08d}", "export", "tensorboard", "metrics.jsonl", "loss.png"):
        assert str(run / path) in out
        assert (run / path).exists()
    assert [path.name for path in checkpoint.steps(run / "checkpoints")] == ["step-00000018", "step-00000024"]
    records = read_metrics(run / "metrics.jsonl")
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


def test_the_export_is_the_trained_model(whole: tuple[Path, str], world: World, tmp_path: Path) -> None:
    run = RunDir(whole[0])
    ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(0))
    how = run.read_recipe()
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = parallelize(
            model_on_meta(how.model),
            Plan(precision=precision),
            optimizer=how.optimizer.torch_class(),
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "plait"]
    finish(start("train", recipe, "--set", f"run.dir={run}", entry=torchrun))
    assert_same_bits(last_state(run), last_state(whole[0]))
    ours, theirs = (read_metrics(path / "metrics.jsonl") for path in (run, whole[0]))
    assert [line.get("loss") for line in ours] == [line.get("loss") for line in theirs]


def test_stopped_and_killed_and_resumed_ends_with_the_bits_of_never_stopping(
    whole: tuple[Path, str], recipe: Path
) -> None:
    """Ctrl-C, then SIGTERM, then SIGKILL of all: each time `--resume` goes on."""
    run = recipe.parent / "stopped"

    process = start("train", recipe, "--set", f"run.dir={run}")
    wait_for_step(process, 2)
    os.kill(process.pid, signal.SIGINT)
    out, _ = finish(process, 130)
    after_ctrl_c = last_step(run)
    assert 2 <= after_ctrl_c < STEPS
    assert f"plait train {run} --resume" in out

    process = start("train", run, "--resume")
    wait_for_step(process, after_ctrl_c + 2)
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    after_sigterm = last_step(run)
    assert after_ctrl_c + 2 <= after_sigterm < STEPS

    process = start("train", recipe, "--resume", "--set", f"run.dir={run}")
    wait_for_step(process, after_sigterm + 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    time.sleep(0.5)  # its ranks end with it
    after_sigkill = last_step(run)
    assert after_sigterm <= after_sigkill < STEPS

    out, _ = finish(start("train", run, "--resume"))
    assert f"resumed after step {after_sigkill}" in out
    assert_same_bits(last_state(run), last_state(whole[0]))
    ours, theirs = (read_metrics(path / "metrics.jsonl") for path in (run, whole[0]))
    for key in ("step", "loss", "validation_loss", "lr", "grad_norm", "tokens"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs], key


SLOW_AND_TOLD_TO_STOP_LATE = """
import os, signal, time
import plait.train.finish
from plait import checkpoint
from plait.cli.main import main
from plait.train.run import RunDir

save, export = checkpoint.save, plait.train.finish.export

def slow_save(directory, *args, **kwargs):
    time.sleep(8)
    (directory.parent / "export.tmp-0a1b2c3d").mkdir()  # as of a process killed in its export
    return save(directory, *args, **kwargs)

def told_to_stop(run, out):
    os.kill(os.getpid(), signal.SIGTERM)
    export(run, out)

checkpoint.save, plait.train.finish.export = slow_save, told_to_stop
main()
"""


@pytest.mark.sweep
def test_a_save_longer_than_a_steps_time_limit_and_a_late_signal_end_as_if_neither_had_been(
    recipe: Path, tmp_path: Path
) -> None:
    run, script = recipe.parent / "slow", tmp_path / "slow.py"
    script.write_text(SLOW_AND_TOLD_TO_STOP_LATE)
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


def test_a_gradient_that_is_not_finite_is_skipped_counted_shown_and_at_last_ends_the_run(
    recipe: Path,
) -> None:
    run = recipe.parent / "diverged"
    sets = [f"run.dir={run}", "optimizer.lr=1e30", "optimizer.weight_decay=0", "run.max_skipped=3"]
    words = [word for value in [*sets, "schedule.warmup=0"] for word in ("--set", value)]
    out, err = finish(start("train", recipe, *words), 2)
    assert err.count("RunError") == 1, "one letter for the job"
    assert "not finite in 3 steps in a row" in err
    assert "the step is skipped" in out
    skipped = [line["skipped"] for line in read_metrics(run / "metrics.jsonl") if "skipped" in line]
    assert skipped[-3:] == [True] * 3
    assert not skipped[0]


def test_a_full_disk_ends_the_run_and_its_last_good_checkpoint_stays(
    whole: tuple[Path, str], recipe: Path
) -> None:
    run = recipe.parent / "full"
    shutil.copytree(whole[0], run)
    # KiB: less than the weights, more than all else
    limit = ("bash", "-c", 'ulimit -f 64; exec "$@"', "bash")
    began_s = time.monotonic()
    process = start("train", run, "--resume", "--set", f"run.steps={STEPS + 2}", entry=[*limit, *PLAIT])
    _, err = finish(process, 2)
    assert time.monotonic() - began_s < LIMIT_S
    assert err.count("CheckpointError") == 1
    assert "not enough disk" in err
    assert [path.name for path in (run / "checkpoints").iterdir() if "tmp" in path.name] == []
    assert_same_bits(last_state(run), last_state(whole[0]))


def test_a_run_that_starts_from_an_export_begins_where_that_ended(
    whole: tuple[Path, str], recipe: Path
) -> None:
    run, export = recipe.parent / "tuned", whole[0] / "export"
    text = recipe.read_text()
    model = text[text.index("[model.config]") : text.index("[data]")]
    words = f'[model]\npath = "{export}"\npretrained = true\n'
    tune = recipe.parent / "tune.toml"
    tune.write_text(text.replace(model, words))
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


def test_generate_writes_the_same_text_for_the_same_seed(whole: tuple[Path, str]) -> None:
    words = ["generate", whole[0], "--prompt", "The ship", "--tokens", "8", "--seed", "3"]
    processes = [start(*words) for _ in range(2)]
    one, other = (finish(process)[0] for process in processes)
    assert one == other
    assert one.startswith("The ship")


def test_metrics_are_json(whole: tuple[Path, str]) -> None:
    for line in (whole[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
