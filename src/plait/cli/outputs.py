"""Files that commands are asked to write: looked at before the work, written after it, with letters."""

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from plait.errors import ConfigError

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
