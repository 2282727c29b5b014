"""Errors of `plait verify` before it starts a rank."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.main import app


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama", "--plan", "pp=5 stages=4,4"], "PlanError: stages does not give"),
        (["--model", "lama", "--plan", "dp=2"], "ModelError: unknown model"),
        (
            ["--model", "support.verify_models:no_model", "--plan", "dp=2"],
            "ModelError: the function did not return a model",
        ),
        (
            ["--model", "support.verify_models:nested_batch", "--plan", "pp=2"],
            "ModelError: a batch is not a dict of tensors",
        ),
        (["--model", "llama"], "ConfigError: verify needs one plan, a file of plans, or all plans"),
        (["--model", "llama", "--plan", "dp=2", "--ranks", "4"], "PlanError: the plan's degrees do not"),
        (["--model", "gpt_oss", "--plan", "tp=2 sp=true"], "Error: "),
        (
            ["--model", "llama", "--plan", "dp=2 reduce=int8"],
            "ConfigError: this plan cannot be verified in float64",
        ),
        (
            ["--model", "llama", "--dtype", "bf16", "--plan", "dp=2 local_steps=2 exchange=int8"],
            "PlanError: this exchange of local steps has no reference",
        ),
        (
            ["--model", "llama", "--plan", "dp=2 local_steps=2 exchange_parts=2"],
            "PlanError: this exchange of local steps has no reference",
        ),
        (["--model", "llama", "--plan", "dp=2 servers=1"], "PlanError: plait verify does not know"),
        (
            ["--model", "llama", "--plan", "dp=2 servers=1 sync=async"],
            "PlanError: the results of these parameter servers depend on which worker is faster",
        ),
        (["--model", ":build", "--plan", "dp=2"], "ModelError: cannot import the function"),
        (
            ["--model", "llama", "--plan", "dp=2", "--tolerance", "0"],
            "ConfigError: not a relative difference",
        ),
    ],
)
def test_models_that_cannot_be_verified_are_one_error_before_a_rank_starts(
    words: list[str], message: str
) -> None:
    found = CliRunner().invoke(app, ["verify", *words])
    assert found.exit_code == 2
    assert message in found.stderr
    assert not found.stdout


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    plans = tmp_path / "plans.txt"
    plans.write_text("dp=2\n\ndp=2 zreo=1\n")
    found = CliRunner().invoke(app, ["verify", "--model", "llama", "--plans", str(plans)])
    assert found.exit_code == 2
    assert f"{plans}:3: zreo=1" in found.stderr
