"""`plait verify` as it is typed: its exit codes, what it names, and what it does when ranks die."""

import json
from pathlib import Path

import pytest

from support import verify_models
from support.cli_runs import finish, start

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _where_verified_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)


def test_a_right_plan_ends_with_code_0_and_a_full_json_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--model", "llama", "--plan", "pp=2 dp=2 zero=1 micro=2", "--json", report]
    out, _ = finish(start("verify", *words))
    assert "matches one process: llama" in out
    assert "reduce-scatter over shard" in out
    (found,) = json.loads(report.read_text())
    assert found["outcome"] == "same"
    assert found["max_error"] < 1e-12
    assert len(found["steps"]) == len(found["reference_steps"]) == 3


def test_packed_rows_are_verified_in_one_process_or_refused_by_the_module() -> None:
    out, _ = finish(start("verify", "--model", "llama", "--packed", "--steps", "2"))
    assert "matches one process with each document alone: llama" in " ".join(out.split())
    assert "0.0e+00 of a changed token reaches other documents" in " ".join(out.split())
    _, error = finish(start("verify", "--model", "mamba", "--packed"), code=2)
    assert "MambaMixer (backbone.layers.0.mixer): convolution" in " ".join(error.split())


@pytest.mark.parametrize(
    ("build", "plan", "name", "suspect"),
    [
        pytest.param(
            *("muted_between_columns", "dp=2 tp=2 sp=true", verify_models.MUTED_LAYER, "tp or sp"),
            marks=pytest.mark.sweep,  # the rank pool has it too, and the next
        ),
        pytest.param(
            *("muted_between_replicas", "dp=2 tp=2 zero=2", verify_models.MUTED_LAYER, "dp or zero"),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "muted_between_stages", "pp=2 micro=2", "model.embed_tokens.weight", "pp", marks=pytest.mark.quick
        ),
    ],
)
def test_without_a_collective_it_ends_with_code_1_and_names_layer_and_axis(
    build: str, plan: str, name: str, suspect: str
) -> None:
    out, _ = finish(start("verify", "--model", f"support.verify_models:{build}", "--plan", plan), code=1)
    farthest = next(line for line in out.splitlines() if "model." in line)
    assert name in farthest
    assert "all ranks" in farthest
    assert "does NOT match one process" in out.splitlines()[0], "above the tables"
    assert f"without {suspect} it matches" in " ".join(out.split())


def test_a_sweep_prints_a_matrix_and_continues_after_ranks_that_died(tmp_path: Path) -> None:
    plans, report = tmp_path / "plans.txt", tmp_path / "report.json"
    plans.write_text("dp=2  # a comment\n\npp=2 dp=2\ndp=2 zero=3\n")
    words = ["--model", "support.verify_models:dying_in_pipelines", "--plans", plans, "--json", report]
    out, _ = finish(start("verify", *words), code=1)
    assert [found["outcome"] for found in json.loads(report.read_text())] == ["same", "died", "same"]
    assert "2 same, 1 died" in out
