"""Files that are whole, and on disk when a call returns, or are not there at all.

Written beside their place under a name that no other writer has, synced, and renamed; the folder is synced
too, without which a power cut may take the rename back.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import ConfigError

# What some network file systems answer when a folder is to be synced.
_POLL_S = 0.1
_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write_text(path: Path, text: str) -> None:
    """Atomic, and on disk when it returns. Two writers at once: one of them wins, whole. Raises OSError."""
    fresh = temp_path(path)
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """As `write_text`."""
    write_text(path, json.dumps(value, indent=1))


def temp_path(path: Path) -> Path:
    """A name beside `path` that no other writer has."""
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def sync_folder(folder: Path) -> None:
    """Makes the renames in a directory last through a power cut, where the file system can."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _SYNC_UNSUPPORTED:
            raise


def sync_tree(folder: Path) -> None:
    """Everything under `folder`, and itself, is on disk when this returns; its name, when its parent is."""
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
    """While entered, no other process is in it: a file beside what is to be left alone. Where the file system
    has no locks, nobody is kept out. The kernel lets go when the process ends, however that is.

    Raises BlockingIOError when another process is in it, for `wait_s` seconds; OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    limit_s = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > limit_s:
                    raise
                time.sleep(_POLL_S)
            except OSError:
                break  # a file system without locks
            else:
                break
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may hold the descriptor too
    finally:
        os.close(descriptor)


def regular_file_bytes(path: Path) -> int | None:
    """The file's size; None for a folder, or a link, which could lead anywhere. Raises OSError: missing."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_output_paths(outputs: Mapping[str, Path | None]) -> None:
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
