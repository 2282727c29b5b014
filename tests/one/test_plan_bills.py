"""`plait plan walls` and `plait plan bill`: their tables, JSON and errors."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from plait.cli.plan_bills import bill, walls

APP = typer.Typer()
APP.command()(walls)
APP.command()(bill)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(APP, words, env={"COLUMNS": "160"})
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
        (
            ("--params", "7B", "--tokens", "1T", "--cluster", "dgx-h100:7gpus"),
            "7 devices do not fill hosts of 8",
        ),
    ],
)
def test_a_bills_mistakes_are_named(words: tuple[str, ...], message: str) -> None:
    code, out = run("bill", *words)
    assert code == 2
    assert message in out
