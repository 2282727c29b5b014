"""The exception tree. A user's mistake is a small letter: fact, given, expected, try (STYLE 8)."""

import difflib
from collections.abc import Iterable


class PlaitError(Exception):
    """A mistake that the user can mend. `str()` is a letter of up to four lines.

    `fact` says what is wrong, in words of the user's world; `given` what was found; `expected` what
    would have been right; `hint` what to try. Only the fact is required.
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
        lines = [self.fact]
        for label, value in (("given", self.given), ("expected", self.expected), ("try", self.hint)):
            if value is not None:
                lines.append(f"  {label:<8}: {value}")
        return "\n".join(lines)

    def message(self) -> str:
        """What the command line prints: the class's name and the letter."""
        return f"{type(self).__name__}: {self}"


class PlanError(PlaitError):
    """A plan that cannot exist, or does not fit the ranks, the batch or the model."""


class ScheduleError(PlanError):
    """A pipeline schedule that cannot be read, or cannot be run."""


class ConfigError(PlaitError):
    """A recipe or a flag that does not say something possible."""


class DataError(PlaitError):
    """A corpus, a tokenizer, a token file or a trace that cannot be used."""


class ModelError(PlaitError):
    """A model that cannot be built, cut or initialised as asked."""


class CommError(PlaitError):
    """Ranks that cannot find, reach or hear each other."""


class DDPError(PlaitError, RuntimeError):
    """A model, or a way of training it, whose gradients DistributedDataParallel cannot average."""


class CheckpointError(PlaitError):
    """A checkpoint that cannot be written, or is damaged, or is of something else."""


class ProfileError(PlaitError):
    """A host's profile that is damaged, cannot be written, or does not know what is asked."""


class RunError(PlaitError):
    """A run that cannot start where it was told to, or cannot go on."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when none is like it."""
    spelt = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=0.6)
    return spelt[matches[0]] if matches else None


def unknown_key_hint(word: str, known: Iterable[str]) -> str:
    """The `try` line for a misspelt key: the nearest known one, else all of them."""
    known = list(known)
    match = nearest(word, known)
    return match if match is not None else "one of " + ", ".join(sorted(known))
