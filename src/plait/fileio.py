"""Atomic file writes, bounded reads, and imports of a user's modules.

A file is complete and on disk when a write returns, or does not exist. It is written next to the target under
a unique name, synced, and renamed; the folder is synced too, because a power failure may otherwise undo the
rename.

[Note: reads of untrusted files]
Reads take time and memory in proportion to the file's size, which is bounded, and never block: only regular
files are opened, not pipes or devices. JSON and TOML are refused if they are nested deeper than any file of
plait, as parsers, encoders and copies recurse over them; so are integers of more than 64 bits, and TOML keys
of many parts, on which `tomllib` spends quadratic time.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import socket
import stat
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from plait.errors import ConfigError, RunError, shown

TEXT_LIMIT_BYTES = 1 << 26
MAX_DEPTH = 64  # of nested JSON and TOML
NOT_REGULAR = "not a regular file"
WRITABLE = "permission to write there, and free space"  # expected by errors of writes
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # on Linux
_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h
_IN_KEYS = re.compile(r"""[ \t]+|"[^"\n]*"|'[^'\n]*'""")  # within a dotted key of TOML, besides bare words
_BETWEEN_KEYS = re.compile(r"[^\w.-]+")

T = TypeVar("T")
P = TypeVar("P", str, Path)

_POLL_S = 0.1
_RANDOM_DIGITS = 8  # in the name of a temporary folder
_LOCKED_WITHIN_S = 60.0  # from the creation of a temporary folder
# Errors of network file systems that cannot sync a folder.
_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write_text(path: Path, text: str) -> None:
    """Write atomically and sync. Of two concurrent writers one wins, completely. Raises OSError."""
    write_lines(path, [text])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Like `write_text`, for lines that need not be in memory together. Each has its end of line."""
    temp = temp_path(path)
    try:
        with temp.open("w", encoding="utf-8") as file:
            file.writelines(lines)
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


def json_hash(value: Any) -> str:
    """sha256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; an `object_pairs_hook` of `json.loads`. Raises ValueError for a repeated key, of
    which `json` silently keeps the last value."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.100} is repeated")
        found[key] = value
    return found


def temp_path(path: Path) -> Path:
    """A name next to `path` that no other writer has."""
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


@contextlib.contextmanager
def temporary_folder(final: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new folder `FINAL.tmp-...`, to be renamed to `final` or removed at the end, and remove those
    that killed processes have left. Raises OSError.

    [Note: folders of killed processes] The folder is locked, by this process and those that it forks, until
    all of them have ended: a folder without a lock is not in use. A lock may be of one host only, so names
    contain the host's, and other hosts' folders are left alone. So are those of the last minute: a process
    may be about to lock its own.
    """
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    prefix = f"{final.name}.tmp-{host}"
    if final.parent.is_dir():
        for path in final.parent.iterdir():
            if path.name.startswith(prefix) and len(path.name) == len(prefix) + _RANDOM_DIGITS:
                _remove_if_unused(path)
    path = final.with_name(prefix + os.urandom(_RANDOM_DIGITS // 2).hex())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        with contextlib.suppress(OSError):  # without locks, it is never removed by others
            stack.callback(os.close, _lock_folder(path))
        yield path


def _lock_folder(path: Path) -> int:
    """Return a descriptor that holds the folder's lock. Raises OSError if another process holds it, or if the
    file system has no locks for folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_unused(path: Path) -> None:
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _LOCKED_WITHIN_S:
            return
        descriptor = _lock_folder(path)
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


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


@functools.cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def start_write_back(descriptor: int, start: int, length: int) -> None:
    """Start to write the changed pages of a file to the disk, without waiting. Nothing happens where the C
    library has no such call."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


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
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold the descriptor too
        os.close(descriptor)


def open_descriptor(path: Path, *, follow: bool = True) -> int:
    """Open a regular file for reading; `follow` symbolic links. Never blocks. Raises OSError for anything
    else."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, "not the name of a file", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return descriptor


def open_regular(path: Path) -> BufferedReader:
    """Like `open_descriptor`, as a file."""
    return os.fdopen(open_descriptor(path), "rb")


def copy_regular(source: str, target: str) -> None:
    """Copy a regular file, for `shutil.copytree`: what else may have its name is not read. Raises OSError."""
    with open_regular(Path(source)) as file, Path(target).open("xb") as copy:
        shutil.copyfileobj(file, copy)


def read_regular(path: Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> bytes:
    """Read a regular file. Raises OSError, also for one that is larger than the limit."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
    return content


def read_text(path: Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Read a regular file of UTF-8. Raises OSError, UnicodeDecodeError (a ValueError)."""
    return read_regular(path, limit_bytes).decode("utf-8")


def read_json(path: Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> Any:
    """Read a JSON file without duplicate keys. Raises OSError, ValueError."""
    return parse_json(read_regular(path, limit_bytes), object_pairs_hook=unique_keys)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Like `json.loads`, but raises ValueError also for deep nesting."""
    try:
        return check_values(json.loads(text, **options))
    except RecursionError as error:
        raise _too_deep() from error


def parse_toml(text: str) -> dict[str, Any]:
    """Like `tomllib.loads`, but raises ValueError also for deep nesting and keys of many parts."""
    if any(key.count(".") > MAX_DEPTH for key in _BETWEEN_KEYS.split(_IN_KEYS.sub("", text))):
        raise _too_deep()
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return check_values(values)
    except RecursionError as error:
        raise _too_deep() from error


def check_values(value: T) -> T:
    """Return a JSON value. Raises ValueError if it is nested more than MAX_DEPTH deep, or has an integer that
    does not fit into 64 bits: Python's own are unlimited, but not their conversion to text."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not all(-(2**63) <= each < 2**64 for each in level if isinstance(each, int)):
            raise ValueError("an integer of more than 64 bits")
        outer = [each for each in level if isinstance(each, dict | list | tuple)]
        if not outer:
            return value
        level = [inner for each in outer for inner in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MAX_DEPTH} deep")


def missing_hint(path: Path) -> str:
    """Return the `try` text for a missing model or tokenizer: to download it, if this is a name of a hub."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists():
        return f"hf download {path} --local-dir {path}, which puts the files there"
    return f"ls -l {path}"


def check_path(path: P) -> P:
    """Return the path. Raises ValueError, with the expected kind of path, if no file can have it."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError("a path in UTF-8") from error
    if b"\0" in encoded:
        raise ValueError("a path without NUL characters")
    if len(encoded) > _MAX_PATH_BYTES or any(len(name) > _MAX_NAME_BYTES for name in encoded.split(b"/")):
        raise ValueError(f"a path of at most {_MAX_PATH_BYTES} bytes, and {_MAX_NAME_BYTES} in each name")
    return path


def to_path(value: object, name: str) -> Path:
    """Return an argument that names a file or folder. Raises ConfigError."""
    try:
        return check_path(Path(value))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        expected = error if isinstance(error, ValueError) else "a path"
        raise ConfigError(
            f"{name} is not a valid path", given=f"{shown(value)}", expected=expected, hint=f'{name}="run"'
        ) from error


def disk_hint(path: Path) -> str:
    """The `try` text for a file or folder that cannot be written."""
    folder = next((each for each in (path, *path.absolute().parents) if each.is_dir()), path)
    return f"ls -ld {folder}; df -h {folder}"


@contextlib.contextmanager
def writing(fact: str, path: Path) -> Iterator[None]:
    """Raise RunError with this fact where the block, which writes to `path`, raises OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(fact, given=f"{path}: {error}", expected=WRITABLE, hint=disk_hint(path)) from error


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
                f"the folder of {flag} does not exist",
                given=path,
                expected="a file in an existing folder",
                hint=f"mkdir -p {path.absolute().parent}",
            )
        if path.is_dir():
            raise ConfigError(f"{flag} is a folder", given=path, expected="a file name", hint=f"{path}/NAME")


def import_object(name: str, folder: Path) -> Any:
    """Import `module:attribute`, in this folder or installed. Raises whatever the module raises."""
    module, _, attribute = name.partition(":")
    if (path := str(folder)) not in sys.path:
        sys.path.insert(0, path)
    return getattr(importlib.import_module(module), attribute)
