"""The scripts of `examples/`: as close to each other as their README says, in lines and in losses."""

import contextlib
import difflib
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from plait.plan import Plan
from support.cli_runs import ROOT, finish, start_torchrun
from support.pool import Pool

EXAMPLES = ROOT / "examples"
STEPS = ["--steps", "20"]
MOST_LINES = 6
CLOSE = 1e-5  # relative, of float32 losses after up to 20 steps; 1e-6 was seen

PLANS = [
    ("llama", "dp=1"),
    ("llama", "dp=2 tp=2 zero=1"),
    ("llama", "pp=2 tp=2 micro=2"),
    ("llama", "dp=2 zero=3 tp=2x1 micro=2"),
    ("llama", "pp=2 dp=2 zero=1 micro=4 schedule=zb-h1"),
    ("plain", "dp=1"),
    ("plain", "pp=2 dp=2 zero=2 micro=4"),
    ("plain", "dp=4 zero=3"),
    ("plain", "pp=4 micro=8 stages=1,2,2,1"),
]
Losses = dict[int, float]  # by step


def commands() -> list[list[str]]:
    """The README's commands, split into words."""
    text = (EXAMPLES / "README.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^(?:python|torchrun) .*$", text, re.M)]


LLAMA, PLAIN = (words[1:] for words in commands() if words[0] == "torchrun")


def test_the_readme_has_a_command_for_every_script() -> None:
    named = [Path(word).name for words in commands() for word in words if word.endswith(".py")]
    assert sorted(named) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", ["llama", "plain"])
def test_a_script_and_its_parallel_version_differ_in_six_lines(name: str) -> None:
    one, parallel = ((EXAMPLES / f"{name}_{how}.py").read_text() for how in ("one_device", "parallel"))
    lines = difflib.ndiff(one.splitlines(), parallel.splitlines())
    added = [line for line in lines if line.startswith("+ ")]
    assert 0 < len(added) <= MOST_LINES, added


@pytest.fixture(scope="module")
def one_device(pool: Pool) -> dict[str, Losses]:
    """The losses that the one-device scripts print."""
    return {
        name: losses(pool.run(printed, 1, f"{name}_one_device.py", STEPS)[0]) for name in ("llama", "plain")
    }


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(*case, marks=() if "pp=2 dp=2" in case[1] or case[1] == "dp=1" else pytest.mark.sweep)
        for case in PLANS
    ],
)
def test_under_any_plan_a_parallel_script_prints_the_one_devices_losses_once(
    name: str, plan: str, pool: Pool, one_device: dict[str, Losses]
) -> None:
    words = [*STEPS, "--plan", plan]
    first, *others = pool.run(printed, Plan.parse(plan).num_ranks, f"{name}_parallel.py", words)
    check(losses(first), one_device[name])
    assert not any(others)


@pytest.mark.parametrize(
    ("name", "command"), [("plain", PLAIN), pytest.param("llama", LLAMA, marks=pytest.mark.sweep)]
)
def test_the_readmes_commands_do_the_same(
    name: str, command: list[str], one_device: dict[str, Losses]
) -> None:
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in command]
    out, _ = finish(start_torchrun(*words, *STEPS))
    check(losses(out), one_device[name])


def printed(script: str, words: list[str]) -> str:
    """By a script on this rank, which has torch imported already."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        mock.patch.object(sys, "argv", [script, *words]),
    ):
        runpy.run_path(str(EXAMPLES / script))
    return out.getvalue()


def losses(text: str) -> Losses:
    """A step that is printed twice was printed by more ranks than one."""
    found = re.findall(r"^step +(\d+)  loss (\S+)$", text, re.M)
    assert len(found) == len(dict(found)), text
    return {int(step): float(loss) for step, loss in found}


def check(found: Losses, expected: Losses) -> None:
    assert found.keys() == expected.keys() == {5, 10, 15, 20}
    assert expected[20] < 0.7 * expected[5], "it learns"
    assert found == pytest.approx(expected, rel=CLOSE)
