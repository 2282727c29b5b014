"""Atomic file writes: a file is complete and on disk when the call returns, or does not exist.

Written next to the target under a unique name, synced, and renamed; the folder is synced too, because a power
failure may otherwise undo the rename.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import ConfigError

_POLL_S = 0.1
# Errors of network file systems that cannot sync a folder.
_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write_text(path: Path, text: str) -> None:
    """Write atomically and sync. Of two concurrent writers one wins, completely. Raises OSError."""
    temp = temp_path(path)
    try:
        with temp.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Like `write_text`, for a JSON value."""
    write_text(path, json.dumps(value, indent=1))


def finite_json(value: Any) -> Any:
    """Replace non-finite numbers in a JSON value by None: JSON has none."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def temp_path(path: Path) -> Path:
    """A name next to `path` that no other writer has."""
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power failure, if the file system can."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _SYNC_UNSUPPORTED:
            raise


def sync_tree(folder: Path) -> None:
    """Sync everything under `folder`, and the folder. Its own name is synced with its parent."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            _sync(path)
    sync_folder(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Exclude other processes while entered, by a lock on the file `path`. No effect on file systems without
    locks. The kernel releases the lock when the process ends, for any reason.

    Raises BlockingIOError if another process holds it for more than `wait_s` seconds; OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    deadline_s = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)
            except OSError:
                break  # a file system without locks
            else:
                break
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold the descriptor too
    finally:
        os.close(descriptor)


def regular_file_bytes(path: Path) -> int | None:
    """The file's size; None for a folder or a symbolic link. Raises OSError if it is missing."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_output_paths(outputs: Mapping[str, Path | None]) -> None:
    """Raise ConfigError for an output path without a parent folder, or that is a folder. `outputs`: path by
    flag."""
    for flag, path in outputs.items():
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"the folder of {flag} does not exist", given=path, hint=f"mkdir -p {path.absolute().parent}"
            )
        if path.is_dir():
            raise ConfigError(f"{flag} is a folder", given=path, expected="a file name")
