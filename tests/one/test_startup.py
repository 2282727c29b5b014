"""Commands and imports load only the libraries that they need, so that they answer at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "matplotlib", "plotly", "tensorboard", "tokenizers", "numpy")

_PROGRAM = """
import json, sys
sys.argv = ["plait", *json.loads(sys.argv[1])]
code = 0
try:
    from plait.__main__ import main
    main()
except SystemExit as end:
    code = end.code or 0
print()
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def loaded_by_command(*words: str) -> tuple[int, set[str], str]:
    """The exit code, the top-level modules that are loaded at the end, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    *_, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    return code, set(modules), done.stdout + done.stderr


def loaded_by_program(text: str) -> set[str]:
    text += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


COMMANDS = (
    "train", "generate", "export", "schedule", "explain", "verify", "data build",
    "bench collectives", "bench ddp", "checkpoint verify", "checkpoint show", "checkpoint diff",
    "checkpoint convert",
)  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS, "data", "bench", "checkpoint"])
def test_help_loads_no_heavy_library(command: str) -> None:
    code, modules, text = loaded_by_command(*command.split(), "--help")
    assert code == 0
    assert "Usage" in text
    assert not modules.intersection(HEAVY)


def test_the_version_loads_no_heavy_library() -> None:
    code, modules, _ = loaded_by_command("--version")
    assert code == 0
    assert not modules.intersection(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_refused_without_a_heavy_library(command: str) -> None:
    code, modules, text = loaded_by_command(*command.split(), "--no-such-option")
    assert code == 2
    assert "No such option" in text
    assert not modules.intersection(HEAVY)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "recipes/tiny.toml", "--set", "run.stepz=5"), "run.steps"),
        (("train", "recipes/tiny.toml", "--set", "steps=5"), "run.steps"),
        (("train", "recipes/tiny.toml", "--plan", "dp=2 gathered=step"), "reshard"),
        (("train", "recipes/none.toml"), "the recipe does not exist"),
        (("explain", "recipes/tiny.toml", "--plan", "zero=7"), "zero=7"),
        (("explain",), "plait explain RECIPE"),
        (("verify", "--model", "llama", "--plan", "dq=2"), "dq"),
        (("verify", "--model", "llama"), "--all-plans"),
        (("data", "build", "recipes/tiny.toml", "--set", "data.seqence=5"), "data.sequence"),
        (("bench", "collectives", "--collective", "all-gathr"), "all-gather"),
        (("bench", "ddp", "--caps", "1X"), "--caps"),
        (("schedule", "zb-h2", "--pp", "2", "--micro", "4"), "zb-h1"),
        (("schedule", "1f1b", "--pp", "2", "--micro", "4", "--png", "a.gif"), ".png"),
    ],
)
def test_an_invalid_value_is_refused_without_a_heavy_library(words: tuple[str, ...], message: str) -> None:
    code, modules, text = loaded_by_command(*words)
    assert code == 2
    assert message in text
    assert not modules.intersection(HEAVY)


def test_a_schedule_is_shown_without_torch() -> None:
    code, modules, text = loaded_by_command("schedule", "1f1b", "--pp", "2", "--micro", "4")
    assert code == 0
    assert "bubble" in text
    assert not modules.intersection(HEAVY)


def test_plait_and_its_plan_load_no_heavy_library() -> None:
    modules = loaded_by_program("import plait\nplait.Plan.parse('dp=2')\nplait.PlaitError")
    assert "plait" in modules
    assert not modules.intersection(HEAVY)
