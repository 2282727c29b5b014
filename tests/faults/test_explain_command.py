"""`plait explain` as a user types it: before a run, after one, its errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from plait.cli.main import app
from plait.comm import World
from plait.errors import RunError
from plait.train.prepare import prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.cli_runs import finish, start, write_recipe


def typed(*words: str | Path, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["explain", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def rows(out: str, *headings: str) -> list[list[str]]:
    """The cells that follow these, of all lines that begin with them."""
    start = " +│ ".join(map(re.escape, headings))
    lines = [line for line in out.splitlines() if re.match(rf"│ {start} +│", line)]
    return [[cell.strip() for cell in line.strip("│").split("│")][len(headings) :] for line in lines]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def test_the_tables_show_the_plans_costs(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = (
        "--plan",
        "pp=2 dp=2 tp=2 zero=1 micro=2 stages=1,1",
        "--json",
        file,
        "--set",
        "model.config.vocab_size=320",
    )
    out = typed(recipe, *words, "--set", "run.transport=gloo").output
    assert rows(out, "grid") == [["8 ranks: pp 2 x shard 2 x col 2"]]
    assert rows(out, "bubble")[0][0].startswith("33.3%")
    assert rows(out, "layers", "all-reduce", "col")[0][0] == "10"
    assert rows(out, "pipeline", "send", "pp (activations)")[0][0] == "2"
    found: Any = json.loads(file.read_text())
    assert [row["ranks"] for row in found["alike"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["alike"][0]["memory"]["activations"] > 0
    (gather,) = [row for row in found["alike"][0]["traffic"] if row["of"] == "parameters"]
    assert gather["axes"] == ["shard"]
    assert gather["leaves"] == gather["bytes"] // 2  # of two ranks


def test_ranks_on_a_named_device_are_explained_without_one(recipe: Path, tmp_path: Path) -> None:
    file, config = tmp_path / "plan.json", tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **sizes}))
    for words in ((recipe,), ("--model", config, "--sequence", "32")):
        out = typed(*words, "--plan", "dp=2 zero=3", "--device", "h100", "--json", file).output
        assert rows(out, "transport") == [["nccl, on h100-sxm-80gb"]]
        assert rows(out, "parameters", "all-gather"), "GPUs share no memory"
        assert re.search(r"^fits: each of ranks 0-1 needs 1\.\d GiB of the 79\.1 GiB", out, re.MULTILINE)
        found: Any = json.loads(file.read_text())
        assert found["device"]["fits"]
        assert found["alike"][0]["memory"]["runtime"] > 2**30 > found["alike"][0]["memory"]["allocator"] > 0
    out = typed(
        "--model", config, "--plan", "dp=2", "--device", "l40s", "--sequence", "2", "--batch", "8000000"
    ).output
    assert re.search(r"^does not fit: each of ranks 0-1 needs .* of the 44\.4 GiB", out, re.MULTILINE)
    out = typed(recipe, "--plan", "dp=2 zero=3", "--device", "epyc").output
    assert rows(out, "transport") == [["host, on epyc-9654"]]


def test_mistakes_are_errors(recipe: Path, tmp_path: Path) -> None:
    for words, fact in (
        ((), "explain needs one recipe, one model or one run"),
        ((tmp_path / "none.toml",), "the recipe does not exist"),
        ((tmp_path,), "a directory is not a recipe"),
        ((recipe, "--plan", "pp=5"), "2 blocks cannot fill 5 stages"),
        ((recipe, "--plan", "dp=3"), "does not divide"),
        ((recipe, "--plan", "tp=3x"), "tp is not a valid grid"),
        ((recipe, "--rank", "2"), "the plan does not have this rank"),
        ((recipe, "--set", "model.config.hiden_size=3"), "has no key"),
        ((recipe, "--json", tmp_path / "no" / "x.json"), "the folder of --json does not exist"),
        (("--run", tmp_path / "none"), "the run does not exist"),
        (("--run", tmp_path), "not a run directory"),
        (("--run", tmp_path, "--plan", "dp=2"), "a run is explained as it was"),
        (("--run", tmp_path, "--device", "h100"), "a run is explained as it was"),
        ((recipe, "--device", "h101"), "unknown device"),
        ((recipe, "--device", "v100", "--plan", "precision=bf16"), "does not compute in this precision"),
        (("--model", recipe, "--plan", "dp=2"), f"plait explain {recipe} --plan"),
    ):
        assert fact in typed(*words, code=2).stderr


def test_a_run_whose_measurements_cannot_be_written_has_its_export(recipe: Path) -> None:
    sets = ("run.steps=4", "run.evaluate_every=0", "sample.tokens=0")
    run = prepare(recipe, sets=sets, plan="dp=1").dir.path
    (run / "measured.json").mkdir()
    with pytest.raises(RunError, match="cannot write the measurements"):
        train(RunDir(run).read_recipe(), World.alone(torch.device("cpu")))
    assert (RunDir(run).export / "config.json").is_file()


def test_a_run_is_compared_with_its_estimate_also_when_resumed(recipe: Path, tmp_path: Path) -> None:
    quick = [
        f"--set={word}" for word in ("run.evaluate_every=0", "run.checkpoint_every=2", "sample.tokens=0")
    ]
    run, trace = tmp_path / "run", tmp_path / "trace.json"
    plan = ("--plan", "pp=2 micro=4")
    finish(start("train", recipe, *plan, *quick, "--set=run.steps=4", "--trace", trace))
    out = typed("--run", run).output
    assert "measured" in rows(out, "bubble")[0][0]
    assert rows(out, "send", "pp (activations)")[0][:2] == ["4", "4"]
    assert {cells[-1] for cells in rows(out, "all-reduce", "all ranks")} == {"none"}
    table = rows(out, "activations")
    assert len(table) == 2  # ranks
    assert all(estimated == measured for estimated, measured in table)

    finish(start("train", run, "--resume", "--plan", "dp=2 zero=3 micro=2", "--set=run.steps=6"))
    measured = json.loads((run / "measured.json").read_text())
    assert (measured["plan"], measured["step"]) == ("dp=2 zero=3 micro=2", 6)
    out = typed("--run", run).output
    off = [cells[-1] for verb in ("all-reduce", "reduce-scatter", "barrier") for cells in rows(out, verb)]
    assert off == ["none"] * len(off)
    assert len(off) >= 4
    (run / "measured.json").write_text("{}")
    assert "cannot read" in typed("--run", run, code=2).stderr
    (run / "measured.json").unlink()
    assert "has no measurements yet" in typed("--run", run, code=2).stderr
