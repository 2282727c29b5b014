"""Output that cannot be written: a closed pipe, a full disk, no descriptor, another encoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli_runs import environment

SCHEDULE = ("schedule", "1f1b", "--pp", "4", "--micro", "8")
RUN = """
from plait.cli import program
program.prepare_streams()
program.outlive_output()
for number in range(3):
    print("line", number, flush=True)
open({path!r}, "w").write("went on")
program.finish_output()
"""


def shell(line: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which "$@" is `python *words`."""
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment() | {"COLUMNS": "80"} | env,
        check=False,
        errors="replace",
    )


@pytest.mark.parametrize(
    ("line", "code", "errors"),
    [
        ('"$@" | true; exit ${PIPESTATUS[0]}', 141, ""),
        ('"$@" > /dev/full', 1, "standard output cannot be written: No space left on device\n"),
        ('"$@" >&-', 0, ""),
        ('"$@" >&- 2>&- <&-', 0, ""),
        ('"$@" 2> /dev/full > /dev/null', 0, ""),
    ],
)
def test_a_command_whose_output_cannot_be_written_ends_without_a_traceback(
    line: str, code: int, errors: str
) -> None:
    done = shell(line, "-m", "plait", *SCHEDULE)
    assert (done.returncode, done.stderr) == (code, errors)


def test_an_error_is_the_exit_code_even_if_it_is_not_read() -> None:
    done = shell('"$@" 2>&1 | true; exit ${PIPESTATUS[0]}', "-m", "plait", "schedule", "nonsense")
    assert done.returncode == 2


@pytest.mark.parametrize("line", ['"$@" | true', '"$@" > /dev/full', '"$@" >&-', '"$@" > /dev/full 2>&1'])
def test_a_run_outlives_its_output_and_warns_once(line: str, tmp_path: Path) -> None:
    done = shell(f"set -o pipefail; sleep 0.1; {line}", "-c", RUN.format(path=str(tmp_path / "file")))
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "went on"
    warned = done.stderr.count("warning: standard output cannot be written")
    assert (warned, "Traceback" in done.stderr) == ("&" not in line, False)


def test_characters_that_a_terminal_does_not_have_are_replaced() -> None:
    program = (
        "from plait.cli import program; program.prepare_streams(); print('caf\\u00e9 \\u4e2d', '\\udc80')"
    )
    for encoding, shown in (
        ("ascii", b"caf? ? ?\n"),
        ("latin-1", b"caf\xe9 ? ?\n"),
        ("utf-8", b"caf\xc3\xa9 "),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            env=environment() | {"PYTHONIOENCODING": encoding},
            check=True,
        )
        assert done.stdout.startswith(shown)


def test_a_pipe_that_is_read_gets_everything() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "plait", "schedule", "1f1b", "--pp", "2", "--micro", "4"],
        stdout=write,
        env=environment(),
    )
    os.close(write)
    with os.fdopen(read) as output:
        assert "rank 1" in output.read()
    assert process.wait(60) == 0
