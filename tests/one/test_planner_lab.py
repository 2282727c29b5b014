"""Walls, bills, published figures and scores of published runs: their tables, JSON and errors."""

import json
import os
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from planner_lab.commands import bill, figures, score, walls
from planner_lab.programs import recompute, software

APP = typer.Typer()
for command in (walls, bill, figures, score):
    APP.command()(command)


def run(*words: str, columns: int = 160) -> tuple[int, str]:
    result = CliRunner().invoke(APP, words, env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def test_the_walls_are_printed_and_written(tmp_path: Path) -> None:
    path = tmp_path / "walls.json"
    code, out = run("walls", "--json", str(path))
    assert code == 0
    for word in ("314.3 ZFLOP", "700 GB", "80 GB", "89.6 TB", "1,250 MiB", "31.4", "16.6", "65,536"):
        assert word in out
    assert {"name": "  of an H100", "arithmetic": "data sheet", "value": 80e9, "unit": "B"} in json.loads(
        path.read_text()
    )


def test_a_bill_names_its_cluster_network_and_assumptions() -> None:
    code, out = run("bill", "--params", "70B", "--tokens", "15T", "--cluster", "dgx-h100:256", "--mfu", "0.4")
    assert code == 0
    assert "dgx-h100:256: 2,048 h100-sxm-80gb (256 hosts x 8): 6,300 ZFLOP" in out
    assert "96 switches in 2 levels, 4,096 cables" in out
    assert "device-hours 4,421,872" in out
    assert "Assumed: 2.5 $/h and 700 W" in out
    code, out = run("bill")
    assert code == 0
    assert "LLaMA-65B" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--params", "70B"), "a bill needs parameters and tokens"),
        (("--params", "many", "--tokens", "1T"), "--params is not a number"),
        (("--params", "7B", "--tokens", "1T", "--mfu", "1.5"), "--mfu is out of range"),
        (("--params", "1B", "--tokens", "1T", "--lost", "1"), "--lost is out of range"),
        (
            ("--params", "7B", "--tokens", "1T", "--cluster", "dgx-h100:13gpus"),
            "13 devices do not fill hosts of 8",
        ),
    ],
)
def test_a_bills_mistakes_are_named(words: tuple[str, ...], message: str) -> None:
    code, out = run("bill", *words)
    assert code == 2
    assert message in out


@pytest.mark.parametrize("command", ["walls", "figures", "bill"])
def test_no_name_or_number_of_a_table_is_cut_at_80_columns(command: str) -> None:
    code, text = run(command, columns=80)
    assert code == 0, text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    known = {"walls": ["h100-nvl", "dgx-a100"], "bill": ["405B", "19,394"], "figures": ["zero=3"]}
    for word in known[command]:
        assert re.search(rf"[│┃ ]{re.escape(word)}[│┃ ]", text), word


HEAD = "layers,hidden,heads,seq_len,gpu,n_gpus,global_batch,step_time_s,pp,virtual_stages\n"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1e400,512,8,1024,A100,8,8,1,1,", "layers=1e400 is out of range"),
        ("4,8,16,1024,A100,8,8,1,1,", "a size of the model is out of range"),
        ("4,512,8,1024,A100,8,8,nan,1,", "step_time_s=nan is out of range"),
        ("4,512,8,1024,A100,[/b]\x1b[31m,8,1,1,", r"'[/b]\x1b[31m'"),
        ("3,512,8,1024,A100,8,8,1,4,", "3 blocks cannot fill 4 stages"),
    ],
)
def test_a_run_with_unusable_values_is_refused_and_others_are_scored(
    tmp_path: Path, row: str, reason: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD}6,512,8,1024,A100,8,8,1.0,4,\n{row}\n")  # its stages are not equal
    code, text = run("score", str(path))
    assert code == 0, text
    assert "refused 1 rows" in text
    assert reason in text


def test_runs_with_cp_ep_float8_and_wide_data_groups_are_scored_apart(tmp_path: Path) -> None:
    head = "model_name,layers,hidden,heads,ffn_hidden,seq_len,gpu,n_gpus,global_batch,step_time_s,precision"
    head += ",cp,ep,zero_stage"
    rows = [
        "dense,4,1024,8,4096,4096,H100,8,8,1,bf16,1,1,0",
        "dense,4,1024,8,4096,4096,H100,8,8,1,bf16,2,1,1",
        "dense,4,1024,8,4096,4096,H100,256,256,1,fp8,1,1,1",
        "mixtral-8x7b,4,,,,4096,H100,8,8,1,bf16,1,8,1",
    ]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([head, *rows]))
    code, text = run("score", str(path), "--json", str(tmp_path / "score.json"))
    assert code == 0, text
    kinds = json.loads((tmp_path / "score.json").read_text())["kinds"]
    assert {name: each["rows"] for name, each in kinds.items()} == {
        "cp > 1": 1,
        "ep > 1": 1,
        "fp8": 1,
        "256 data ranks and more": 1,
    }
    for name in kinds:
        assert name in text


def test_a_report_may_say_what_its_rows_leave_open(tmp_path: Path) -> None:
    """By GPU and model; a row's own column counts first."""
    source = "NVIDIA-NeMo/Megatron-Bridge@067f987 docs/performance-summary(-archive).md release 26.06"
    kimi, qwen = ({"gpu": "GB300", "model_name": name} for name in ("Kimi_K2", "Qwen3_30B_a3B"))
    assert recompute(kimi, source) == "none"
    assert recompute(kimi | {"recompute": "full"}, source) == "full"
    assert recompute({"gpu": "GB300", "model_name": "Llama-3.1-405B"}, source) == ""
    graphs = [software(row, source, "fp8", 1).graphs for row in (kimi, qwen)]
    assert graphs == [False, True]


def test_a_pipe_is_no_file_of_runs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs.csv")
    code, text = run("score", str(tmp_path / "runs.csv"))
    assert code == 2
    assert "not a regular file" in text
