"""`make gpu`, on machines without a GPU: its dry run, and what it makes of cases that fail."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import warm
from support.cli_runs import ROOT, environment

HERE = ROOT / "benchmarks" / "gpu"
LIMIT_S = 600.0


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(HERE), str(HERE.parent)])


def test_a_dry_run_runs_every_stage(tmp_path: Path) -> None:
    process = warm.Popen(
        ["--dry-run"],
        script=HERE / "run.py",
        env={**environment(), "PLAIT_GPU_RESULTS": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    printed, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, printed + (tmp_path / "dry-run.log").read_text()
    results = json.loads((tmp_path / "dry-run.json").read_text())["results"]
    assert {result["status"] for stage in results.values() for result in stage.values()} == {"ok"}
    profile = json.loads((tmp_path / "dry-run.profile.json").read_text())
    assert profile["peak_flops"]["bf16"] > 0
    assert {line["verb"] for line in profile["lines"]} >= {"all-gather", "reduce-scatter"}
    tables = (tmp_path / "dry-run.md").read_text()
    assert all(f"## {stage}\n" in tables for stage in results)


CASES = """
import os, pathlib, time

class OutOfMemoryError(RuntimeError): ...

def works(**words): return {"rows": [{"words": " ".join(words)}]}
def wrong(): return {"rows": [], "problem": "losses differ"}
def begins(): return {"rows": [{"contender": "torch"}], "unfinished": "no time for FSDP2"}
def raises(): raise RuntimeError("no such thing")
def large(): raise OutOfMemoryError("tried to allocate 200 GiB")
def dies(): os.abort()
def hangs(): time.sleep(60)
def counts(path): path = pathlib.Path(path); path.write_text(path.read_text() + "x"); return {}
"""


def session(out: Path, folder: Path) -> Any:
    import run  # noqa: PLC0415 - a program of the benchmarks' folder

    facts = {"gpus": ["NVIDIA H200", "NVIDIA H200"], "modules": {"torch": "2.11.0", "pydantic": None}}
    options = argparse.Namespace(dry_run=False, out=out)
    return run.Session(options, facts, [str(folder)])


@pytest.mark.usefixtures("programs")
def test_a_case_that_fails_is_a_result_and_the_others_go_on(tmp_path: Path) -> None:
    from stages import Case  # noqa: PLC0415 - of the benchmarks' folder

    (tmp_path / "some.py").write_text(CASES)
    names = ("wrong", "begins", "raises", "large", "dies", "hangs", "works")
    cases = [Case(name, f"some.{name}", limit_s=2.0 if name == "hangs" else 60.0, needs=()) for name in names]
    cases += [Case("needs", "some.works", needs=("torch", "pydantic"))]
    session(tmp_path / "out", tmp_path).run_stage("checks", cases, 500.0, resume=False)
    found = json.loads((tmp_path / "out" / "nvidia-h200-x2.json").read_text())["results"]["checks"]
    assert {name: result["status"] for name, result in found.items()} == {
        "wrong": "failed", "begins": "not finished", "raises": "failed", "large": "out of memory",
        "dies": "failed", "hangs": "too slow", "works": "ok", "needs": "left out",
    }  # fmt: skip
    assert found["dies"]["error"] == "exit code -6"
    assert found["raises"]["error"] == "RuntimeError: no such thing"
    assert "in raises" in found["raises"]["traceback"]
    assert found["needs"]["error"] == "not installed: pydantic"
    assert "large: **out of memory**" in (tmp_path / "out" / "nvidia-h200-x2.md").read_text()


@pytest.mark.usefixtures("programs")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that other libraries need
def test_contenders_that_were_built_in_time_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import training  # noqa: PLC0415 - a program of the benchmarks' folder

    monkeypatch.setattr(training, "left_s", lambda: 0.0)
    found = training.train("cpu", "toy", 16, 4, ["plait dp=1", "torch"], budget_s=0.0)
    assert [row["contender"] for row in found["rows"]] == ["plait dp=1"]
    assert found["rows"][0]["median_ms"] > 0
    assert found["unfinished"] == "no time for torch"


@pytest.mark.usefixtures("programs")
def test_a_stage_that_is_resumed_runs_only_what_has_no_result(tmp_path: Path) -> None:
    from stages import Case  # noqa: PLC0415

    (tmp_path / "some.py").write_text(CASES)
    counter = tmp_path / "counter"
    counter.write_text("")
    cases = [Case(f"case {n}", "some.counts", {"path": str(counter)}, needs=()) for n in range(2)]
    for limit_s, resume, done in ((0.0, False, 0), (500.0, True, 2), (500.0, True, 2), (500.0, False, 4)):
        session(tmp_path, tmp_path).run_stage("checks", cases, limit_s, resume=resume)
        assert len(counter.read_text()) == done


@pytest.mark.usefixtures("programs")
def test_the_idle_time_of_a_trace_is_that_between_its_kernels() -> None:
    from traces import kernel_summary  # noqa: PLC0415 - of the benchmarks' folder

    # "b" and "copy" overlap; 30 us pass before "c".
    work = [("a", 0.0, 10.0), ("c", 80.0, 20.0), ("b", 10.0, 30.0), ("copy", 20.0, 30.0)]
    row, lines = kernel_summary(work)
    assert row["span_ms"] == pytest.approx(0.100)
    assert row["busy_ms"] == pytest.approx(0.070)
    assert (row["kernels"], row["gaps"], row["in_gaps_ms"]) == (4, 1, pytest.approx(0.030))
    assert lines[-1].split()[:2] == ["30.0", "0.08"]
    assert "copy | c" in lines[-1]
