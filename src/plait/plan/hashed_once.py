"""Frozen dataclasses with many fields that are keys of many dicts."""

from typing import Any, TypeVar

_T = TypeVar("_T")
HASH = "_hash"  # in vars() of such an object. No field, so that `replace` and == do not see it


def hashed_once(cls: type[_T]) -> type[_T]:
    """Let objects of a frozen dataclass keep their hash, which is computed when it is first asked for."""
    compute: Any = cls.__hash__

    def kept_hash(self: Any) -> int:
        try:
            found: int = self.__dict__[HASH]
        except KeyError:
            found = self.__dict__[HASH] = compute(self)
        return found

    def without_hash(self: Any) -> dict[str, Any]:  # hashes of texts differ between processes
        return {key: value for key, value in vars(self).items() if key != HASH}

    # mypy knows no decorator that replaces methods of its class, as `dataclass` does.
    cls.__hash__ = kept_hash  # type: ignore[method-assign]
    cls.__getstate__ = without_hash  # type: ignore[method-assign]
    return cls
