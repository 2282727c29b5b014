"""Files that commands are asked to write: looked at before the work, written after it, with letters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from plait.errors import ConfigError

PICTURES = (".png", ".pdf", ".svg")


def check_places(outputs: Mapping[str, Path | None]) -> None:
    """`outputs`: of every flag, the file it names. Raises ConfigError for one in no folder, or a folder."""
    for flag, path in outputs.items():
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"there is no folder for {flag}", given=path, hint=f"mkdir -p {path.absolute().parent}"
            )
        if path.is_dir():
            raise ConfigError(f"{flag} is a folder", given=path, expected="a file's name")


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
