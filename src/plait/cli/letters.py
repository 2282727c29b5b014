"""How a command ends: with its letter on stderr and exit code 2 after a user's mistake."""

import functools
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from plait.errors import PlaitError

USER_MISTAKE = 2
LOST_RANK = 1  # another rank ended: what it said is the cause
CTRL_C = 130

P = ParamSpec("P")
R = TypeVar("R")


def ends_with_letter(command: Callable[P, R]) -> Callable[P, R]:
    """Turns a PlaitError into its letter, and Ctrl-C into one line. `debug=True` adds the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PlaitError as error:
            show_letter(error, debug=bool(kwargs.get("debug")))
            raise typer.Exit(USER_MISTAKE) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(CTRL_C) from None

    return run


def show_letter(error: PlaitError, *, debug: bool = False) -> None:
    if debug:
        traceback.print_exception(error)
    print(error.letter(), file=sys.stderr, flush=True)
