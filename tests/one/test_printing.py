"""Names and keys in files reach the terminal as text: never as control characters or markup."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import rich
import torch
from typer.testing import CliRunner

from plait.cli.main import app
from plait.errors import PlaitError
from plait.tables import facts_table, table
from support import checkpoints
from support.checkpoints import seal, values_of
from support.cli_runs import environment, write_recipe

EVIL = "[/red]\x1b]0;title\x07\x9b31m\x7f\r\u202e\u2066:ship:"
NAME = EVIL.partition("/")[2]  # of a file
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]")


def output(*words: object) -> str:
    """Everything that `plait words...` prints, without control characters and tracebacks."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert not CONTROL.search(result.output), ascii(result.output)
    return result.output


def test_an_error_escapes_control_characters() -> None:
    error = PlaitError(EVIL, given=f"a\n\tb {EVIL}\ud800", expected=Path(EVIL), hint=EVIL)
    assert not CONTROL.search(error.message())
    assert r"[/red]\x1b]0;title\x07\x9b31m\x7f\r\u202e\u2066:ship:\ud800" in error.message()
    assert f"a\n{' ' * 12}\tb" in str(error)  # later lines are indented as the first one


def test_a_long_part_of_an_error_is_shortened() -> None:
    said = str(PlaitError("fact", given="x" * 10**6))
    assert len(said) < 5000
    assert said.endswith("... (1,000,000 characters)")


def test_a_table_shows_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rich.print(table(EVIL, ("", "b"), [(EVIL, EVIL)], caption=EVIL))
    rich.print(facts_table(EVIL, [(EVIL, EVIL)]))
    said = capsys.readouterr().out
    assert not CONTROL.search(said), ascii(said)
    assert said.count(r"[/red]\x1b]0;title") == 7


@pytest.fixture
def evil_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with control characters in the keys of its facts and tensors."""
    path = checkpoints.save(tmp_path, 2, {f"{EVIL}/{EVIL}": torch.ones(2)})
    values = values_of(path / "manifest.json")
    values["facts"] = {EVIL: EVIL, "plan": EVIL}
    seal(path / "manifest.json", values)
    return path


def test_checkpoint_commands_escape_keys_and_names(evil_checkpoint: Path, tmp_path: Path) -> None:
    other = checkpoints.save(tmp_path / "other", 2, {"weights/a": torch.ones(2)})
    assert "title" in output("checkpoint", "show", "--tensors", evil_checkpoint)
    assert r"\u007f" in output("checkpoint", "show", "--tensors", "--json", "-", evil_checkpoint)
    assert "title" in output("checkpoint", "diff", evil_checkpoint, other)
    (evil_checkpoint / NAME).write_text("")
    assert "title" in output("checkpoint", "verify", evil_checkpoint)


def test_commands_escape_recipes_plans_and_rows(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert "title" in output("train", recipe, "--plan", EVIL)
    assert "title" in output("train", recipe, "--set", f"{EVIL}=1")
    assert "title" in output("train", tmp_path / NAME)
    assert "title" in output("train", recipe, "--set", f"model.config.model_type={NAME}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"\\u001b]0;title\\u0007": "text"}\n')
    assert "title" in output("data", "build", recipe, "--set", f'data.sources=["{rows}"]')


def test_a_note_on_data_with_markup_in_its_folder_is_printed(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    folder = ("--set", f"data.dir={tmp_path}/[/red]")
    output("data", "build", recipe, *folder)
    (tmp_path / "text" / "more.txt").write_text("more")
    assert "have changed" in output("data", "build", recipe, *folder)


def test_logs_and_warnings_of_libraries_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import logging, warnings; from plait.cli.program import prepare_streams; prepare_streams()"
    text = repr(f"x %s {EVIL}")
    words = f"logging.warning({text}, 5); logging.warning('%d', 'a'); warnings.warn({text})"
    subprocess.run([sys.executable, "-W", "default", "-c", f"{code}; {words}"], check=True, env=environment())
    said = capfd.readouterr().err
    assert said.count(r"[/red]\x1b]0;title") == 2
    assert not CONTROL.search(said), ascii(said)


def test_a_warning_of_plait_is_one_line_without_a_place_in_its_code() -> None:
    code = "import warnings, plait.cli.program as program; program.prepare_streams()"
    own, users = "warnings.warn_explicit('own', UserWarning, program.__file__, 1)", "warnings.warn('theirs')"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", f"{code}; {own}; {users}"],
        check=True,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert "warning: own\n" in done.stderr
    assert "program.py" not in done.stderr
    assert "<string>:1: UserWarning: theirs" in done.stderr
