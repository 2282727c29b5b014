"""How a command ends: with its letter on stderr and exit code 2 after a user's mistake.

Options that several commands have.

Files that commands are asked to write: looked at before the work, written after it, with letters.
"""

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec, TextIO, TypeVar

import typer

from plait.errors import ConfigError, PlaitError

PICTURES = (".png", ".pdf", ".svg")


def check_picture(path: Path | None) -> None:
    """Raises ConfigError for a picture of a kind that matplotlib is not asked for here."""
    if path is not None and path.suffix not in PICTURES:
        raise ConfigError("a picture of that kind cannot be drawn", given=path, expected=" ".join(PICTURES))


def write_output(path: Path | None, write: Callable[[Path], None], *, say: TextIO | None = None) -> None:
    """Writes what was asked for, and says so: on stdout, or `say`. Raises ConfigError where it cannot."""
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise ConfigError("the file cannot be written", given=f"{path}: {error.strerror}") from error
    print(f"written: {path}", file=say)


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Put a value over the recipe's, e.g. run.steps=100."),
]
Run = Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)]


USER_MISTAKE = 2
LOST_RANK = 1  # another rank ended: what it said is the cause
CTRL_C = 130

P = ParamSpec("P")
R = TypeVar("R")


def report_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns a PlaitError into its letter, and Ctrl-C into one line. `debug=True` adds the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PlaitError as error:
            show_error(error, debug=bool(kwargs.get("debug")))
            raise typer.Exit(USER_MISTAKE) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(CTRL_C) from None

    return run


def show_error(error: PlaitError, *, debug: bool = False) -> None:
    if debug:
        traceback.print_exception(error)
    print(error.message(), file=sys.stderr, flush=True)
