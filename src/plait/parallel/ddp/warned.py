"""Warnings that a process gives once."""

import warnings

_given: set[str] = set()


def warn_once(text: str) -> None:
    """As a UserWarning, whoever calls first."""
    if text not in _given:
        _given.add(text)
        warnings.warn(text, stacklevel=2)
