"""Every benchmark runs, as `--smallest`; `make bench` runs them all, for the better part of an hour."""

import ast
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.cli_runs import ROOT, warm_python
from support.compilers import compiles
from support.pool import Pool
from support.small_device import small_device

BENCHMARKS = ROOT / "benchmarks"
HELPERS = {
    "common",
    "context_peers",
    "ddp_peers",
    "llama",
    "markdown_table",
    "peers",
    "pipeline_peers",
    "processes",
    "run_all",
    "server_peers",
    "tensor_peers",
    "trl_peer",
    "two_hosts",
}
RANKS = {
    "broadcast": 3,
    "checkpoint": 2,
    "collectives": 2,
    "compiled": 2,
    "context_parallel": 2,
    "data_parallel": 2,
    "expert_parallel": 2,
    "pipeline": 2,
    "tensor_grids": 2,
    "tensor_parallel": 2,
}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PLAIT_RENDEZVOUS_FILE", "PLAIT_LAUNCHER_PID")
FOLDERS = {"checkpoint": "--folder", "read_windows": "--dir"}
COMPILED = "data_parallel --compiled --stages 0 --only DDP"
NAMES = sorted(p.stem for p in BENCHMARKS.glob("*.py") if p.stem not in HELPERS)
RUNS = ["data_parallel --ddp", COMPILED, *NAMES]


def run(name: str, words: list[str], python: Path, variables: dict[str, str]) -> None:
    """Be a rank of a benchmark, or its only process. `python`: what it starts, with these variables."""
    program = BENCHMARKS / f"{name}.py"
    sys.path.insert(0, str(BENCHMARKS))
    with (
        small_device(),
        compiles(in_cpp="--compiled" not in words),
        mock.patch.object(sys, "argv", [str(program), *words]),
        mock.patch.object(sys, "executable", str(python)),
        mock.patch.dict(os.environ, variables),
        warnings.catch_warnings(),
    ):
        for variable in () if name in RANKS else RANK_VARIABLES:
            os.environ.pop(variable, None)
        warnings.simplefilter("ignore")  # of other libraries
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code  # noqa: PT017 - the only way to see it


@pytest.mark.parametrize("benchmark", RUNS)
def test_a_benchmark_runs_and_writes_its_rows(pool: Pool, benchmark: str, tmp_path: Path) -> None:
    name, *words = benchmark.split()
    folder = [FOLDERS[name], str(tmp_path)] if name in FOLDERS else []
    found = tmp_path / "rows.json"
    words = [*words, "--smallest", "--json", str(found), *folder]
    pool.run(run, RANKS.get(name, 1), name, words, *warm_python())
    if name != "offload":  # it measures a GPU's memory
        assert json.loads(found.read_text())["rows"]


PROGRAMS = {
    "works": """
import json, sys
rows = [{"case": "a | b", "median_ms": 1.23456, "best_peer": None}]
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump({"title": "a title", "machine": {"cores": 2}, "rows": rows}, file)
""",
    "skips": "print('left out, there is no GPU here')",
    "fails": "raise RuntimeError('no such thing')",
    "hangs": "import time; print('begun', flush=True); time.sleep(60)",
    "last": "print('ran')",
}


def collected(here: str) -> object:
    """The exit code of run_all."""
    sys.path.insert(0, str(BENCHMARKS))
    import run_all  # noqa: PLC0415 - a program of the benchmarks' folder

    words = ["run_all.py", "--out", f"{here}/out", "--limit-s", "2"]
    with (
        mock.patch.multiple(run_all, HERE=Path(here), BENCHMARKS=tuple(PROGRAMS)),
        mock.patch.object(sys, "argv", words),
        pytest.raises(SystemExit) as end,
    ):
        run_all.main()
    return end.value.code


def test_a_benchmark_that_fails_or_hangs_is_reported_and_the_others_go_on(pool: Pool, tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert pool.run(collected, 1, str(tmp_path)) == ["failed: fails, hangs"]
    sections = (tmp_path / "out" / "tables.md").read_text().split("## ")[1:]
    works, skips, fails, hangs, last = sections
    assert works.startswith("works.py\n\na title; cores 2, 20")
    assert works.endswith(
        "| case | median ms | best peer |\n| --- | --- | --- |\n| a \\| b | 1.235 | - |\n\n"
    )
    assert skips == "skips.py\n\nleft out, there is no GPU here\n\n"
    assert "**Failed**: exit code 1" in fails
    assert "RuntimeError: no such thing" in fails
    assert "**Failed**: not done after 2 s" in hangs
    assert "begun" in hangs
    assert last == "last.py\n\nran\n"


def private_names(tree: ast.Module) -> list[str]:
    """Names with a leading underscore that a program imports, or takes from an object other than
    torch. `os._exit` is public."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found += [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner: Any = node.value
            is_exempt = isinstance(owner, ast.Name) and owner.id in ("self", "torch")
            if not is_exempt and ast.unparse(node) != "os._exit":
                found.append(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_uses_public_names_only(path: Path) -> None:
    assert private_names(ast.parse(path.read_text())) == []


def test_private_names_are_found() -> None:
    tree = ast.parse(
        "from plait.comm import _x\nengine._runner.train(self._a, torch._foreach_copy_, x.__name__)"
    )
    assert private_names(tree) == ["_x", "engine._runner"]
