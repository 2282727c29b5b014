"""The exception tree. User errors carry four parts: fact, given, expected, try (STYLE 17)."""

import difflib
import re
import reprlib
from collections.abc import Iterable

# Characters that control a terminal, reorder a line, or cannot be encoded in UTF-8. Not tab and newline.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_MAX_PART = 4000  # characters of one part of an error


def printable(text: str) -> str:
    """Escape control characters, as in `\\x1b`: names and keys in files must not control a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PlaitError(Exception):
    """An error that the user can fix. `str()` gives a message of up to four parts, of one line or several.

    `fact` states the problem in the user's terms; `given` the value received; `expected` a valid value;
    `hint` what to try. Errors of the package have all four, except where nothing is given or right, as listed
    in tests/pure/test_error_parts.py. Long parts are shortened.
    """

    def __init__(
        self,
        fact: str,
        *,
        given: object | None = None,
        expected: object | None = None,
        hint: object | None = None,
    ) -> None:
        self.fact = fact
        self.given = given
        self.expected = expected
        self.hint = hint
        super().__init__(fact)

    def __str__(self) -> str:
        lines = [_shortened(self.fact)]
        for label, value in (("given", self.given), ("expected", self.expected), ("try", self.hint)):
            if value is not None:
                text = _shortened(value).replace("\n", "\n" + " " * 12)
                lines.append(f"  {label:<8}: {text}")
        return printable("\n".join(lines))

    def message(self) -> str:
        """The class name and the message, as the command line prints them."""
        return f"{type(self).__name__}: {self}"


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_PART else f"{text[:_MAX_PART]} ... ({len(text):,} characters)"


class PlanError(PlaitError):
    """An invalid plan, or one that does not fit the ranks, the batch or the model."""


class ScheduleError(PlanError):
    """A pipeline schedule that cannot be read or executed."""


class ConfigError(PlaitError):
    """An invalid recipe, flag or argument."""


class DataError(PlaitError):
    """An unusable corpus, tokenizer, token file or trace."""


class ContentError(DataError):
    """A file or row of a corpus that is not text, or does not have any."""


def unreadable(what: object, error: OSError) -> DataError:
    """The error of a file of data that cannot be read."""
    return DataError(
        f"cannot read {what}",
        given=error.strerror or error,
        expected="a file that this user can read",
        hint=f"ls -l {what}",
    )


class ModelError(PlaitError):
    """A model that cannot be built, sharded, initialized or run as requested, or an unsuitable batch."""


class CommError(PlaitError):
    """A failure to connect ranks or to communicate between them."""


class DDPError(PlaitError, RuntimeError):
    """A model or training loop whose gradients DistributedDataParallel cannot average."""


class CompatError(PlaitError):
    """A call of another library's interface that plait does not support, or that breaks its rules."""


class CheckpointError(PlaitError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model or run."""


class ProfileError(PlaitError):
    """A host profile that is damaged, cannot be written, or lacks the requested entry."""


class RunError(PlaitError):
    """A run that cannot start or cannot continue."""


def shown(value: object) -> str:
    """Return a short `repr` of any value, even if its own is long, deeply nested or raises an error."""
    try:
        return _SHORT.repr(value)
    except Exception:  # of the value's own code, or an integer with too many digits
        return f"a {type(value).__name__}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`, or None if none is similar."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def unknown_key_hint(word: str, known: Iterable[str]) -> str:
    """The `try` text for an unknown key: the nearest known key, else all of them."""
    known = list(known)
    match = nearest(word, known)
    return match if match is not None else "one of " + ", ".join(sorted(known))
