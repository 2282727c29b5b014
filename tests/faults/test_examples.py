"""The scripts of `examples/`, by the commands of their README: as close to each other as it says."""

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
from runs import ROOT, finish, start

EXAMPLES = ROOT / "examples"
STEPS = ["--steps", "20"]
MOST_LINES = 6
CLOSE = 1e-5  # relative, of float32 losses after up to 20 steps; 1e-6 was seen
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def commands() -> dict[str, tuple[str, list[str]]]:
    """By the parallel script: the one-device script, and the words after `torchrun`."""
    text = (EXAMPLES / "README.md").read_text()
    lines = [shlex.split(line) for line in re.findall(r"^(?:python|torchrun) .*$", text, re.M)]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {Path(many[4]).stem: (Path(one[1]).stem, many[1:]) for one, many in pairs}


COMMANDS = commands()
OTHER_PLANS = [  # on 4 ranks
    ("llama_parallel", "pp=2 tp=2 micro=2"),
    ("llama_parallel", "dp=2 zero=3 tp=2x1 micro=2"),
    ("llama_parallel", "pp=2 dp=2 zero=1 micro=4 schedule=zb-h1"),
    ("plain_parallel", "dp=4 zero=3"),
    ("plain_parallel", "pp=4 micro=8 stages=1,2,2,1"),
]


def test_readme_has_a_command_for_every_script() -> None:
    named = {name for parallel, (one, _) in COMMANDS.items() for name in (parallel, one)}
    assert named == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("parallel", COMMANDS)
def test_a_script_and_its_parallel_version_differ_in_six_lines(parallel: str) -> None:
    texts = [(EXAMPLES / f"{name}.py").read_text().splitlines() for name in (COMMANDS[parallel][0], parallel)]
    added = [line for line in difflib.ndiff(*texts) if line.startswith("+ ")]
    assert 0 < len(added) <= MOST_LINES, added


@pytest.fixture(scope="module")
def one_device() -> dict[str, dict[int, float]]:
    """The losses of the one-device scripts, by the name of their parallel version."""
    return {parallel: losses(printed_by(one)) for parallel, (one, _) in COMMANDS.items()}


@pytest.mark.parametrize("parallel", COMMANDS)
def test_on_one_rank_a_parallel_script_prints_the_one_devices_losses(
    parallel: str, one_device: dict[str, dict[int, float]]
) -> None:
    check(losses(printed_by(parallel)), one_device[parallel])


@pytest.mark.parametrize("parallel", COMMANDS)
def test_on_four_ranks_a_parallel_script_prints_the_one_devices_losses_once(
    parallel: str, one_device: dict[str, dict[int, float]]
) -> None:
    check(losses(printed_on_ranks(COMMANDS[parallel][1])), one_device[parallel])


@pytest.mark.sweep
@pytest.mark.parametrize(("parallel", "plan"), OTHER_PLANS)
def test_other_plans_print_the_one_devices_losses(
    parallel: str, plan: str, one_device: dict[str, dict[int, float]]
) -> None:
    command = [*COMMANDS[parallel][1], "--plan", plan]  # of two plans, the last one holds
    check(losses(printed_on_ranks(command)), one_device[parallel])


def printed_by(script: str) -> str:
    """What a script prints that is started by itself. It runs in this process, which has torch imported."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        mock.patch.object(sys, "argv", [script, *STEPS]),
    ):
        runpy.run_path(str(EXAMPLES / f"{script}.py"))
    return out.getvalue()


def printed_on_ranks(command: list[str]) -> str:
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in command]
    return finish(start(*words, *STEPS, entry=TORCHRUN))[0]


def losses(printed: str) -> dict[int, float]:
    """By step. A line that stands there twice was printed by more ranks than one."""
    found = re.findall(r"^step +(\d+)  loss (\S+)$", printed, re.M)
    assert len(found) == len(dict(found)), printed
    return {int(step): float(loss) for step, loss in found}


def check(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys() == {5, 10, 15, 20}
    assert expected[20] < 0.7 * expected[5], "it learns"
    assert found == pytest.approx(expected, rel=CLOSE)
