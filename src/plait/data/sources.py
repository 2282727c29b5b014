"""What a recipe's `sources` mean: files in a fixed order, cut into shards of bounded size.

A shard becomes one part of the token files. Where the cuts fall depends on the sources alone, never on
how many processes tokenize, so the tokens are the same on every machine.
"""

import glob
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

from plait.errors import DataError

Kind = Literal["text", "jsonl", "jsonl.gz", "hf"]

SHARDS = 64  # aimed at: enough for many cores and for restarts, few enough for one directory
MIN_SHARD_BYTES = 1 << 20
MAX_SHARD_BYTES = 1 << 28
HF_ROW_BYTES = 2048  # a guess, for progress and for the size of shards: a row's size is known when read
NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Slice:
    """A stretch of a file: it owns the lines that begin in bytes [start, stop). For `hf` it is rows.

    `size` and `version` are the whole file's when it was listed (its time of change, a dataset's
    fingerprint): a part made of other ones is made again. `name` is the path, or the dataset's name.
    """

    kind: Kind
    name: str
    start: int
    stop: int
    size: int
    version: str = ""


@dataclass(frozen=True)
class Shard:
    """Slices of one source (its number in the recipe) that become one part. `num_bytes` is for progress."""

    source: int
    slices: tuple[Slice, ...]
    num_bytes: int


def list_shards(sources: Sequence[str]) -> list[Shard]:
    """All shards of all sources, in the recipe's order. Raises DataError: missing, empty, unreadable."""
    listed = [list_source(name) for name in sources]
    total = sum(_num_bytes(item) for items in listed for item in items)
    limit = max(MIN_SHARD_BYTES, min(MAX_SHARD_BYTES, total // SHARDS))
    return [
        Shard(source, slices, sum(map(_num_bytes, slices)))
        for source, items in enumerate(listed)
        for slices in _grouped((part for item in items for part in _cut(item, limit)), limit)
    ]


def list_source(source: str) -> list[Slice]:
    """The files of one source, each whole, sorted by path. Raises DataError: missing or empty."""
    if source.startswith("hf:"):
        return [_dataset_slice(source.removeprefix("hf:"))]
    paths = _stdlib() if source == "python-stdlib" else _matches(source)
    slices = [_file_slice(path) for path in paths]
    if not any(item.size for item in slices):
        raise DataError(
            f"the source {source} is empty",
            given=f"{len(slices)} file(s) of 0 bytes",
            expected="text",
        )
    return slices


def _matches(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        raise DataError(
            f"the source {source} is a directory", expected="files", hint=f"{source.rstrip('/')}/**/*.txt"
        )
    if path.exists():
        return [path]
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
    paths = sorted(Path(name) for name in found)
    paths = [p for p in paths if p.is_file()]
    if not paths:
        raise DataError(
            f"the source {source} is missing",
            given=f"no such file, looked for from {Path.cwd()}",
            expected="a path or a glob of text, .jsonl or .jsonl.gz files, hf:NAME, or python-stdlib",
        )
    return paths


def _stdlib() -> list[Path]:
    """The sources of Python's standard library, without its tests."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError("Python's standard library has no sources here", given=f"no .py file under {root}")
    return sorted(found)


def _file_slice(path: Path) -> Slice:
    kind: Kind = "text"
    if path.name.endswith(".jsonl.gz"):
        kind = "jsonl.gz"
    elif path.suffix == ".jsonl":
        kind = "jsonl"
    elif path.suffix == ".gz":
        raise DataError(f"{path} is compressed", expected="text, .jsonl or .jsonl.gz", hint="unpack it first")
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}", given=error.strerror) from error
    return Slice(kind, str(path), 0, status.st_size, status.st_size, str(status.st_mtime_ns))


def _cut(item: Slice, limit: int) -> Iterator[Slice]:
    """Pieces of about `limit` bytes. A compressed file cannot be entered in its middle: it stays whole."""
    if item.kind == "jsonl.gz" or _num_bytes(item) <= limit:
        yield item
        return
    pieces = -(-_num_bytes(item) // limit)
    bounds = [item.size * number // pieces for number in range(pieces + 1)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield replace(item, start=start, stop=stop)


def _grouped(items: Iterable[Slice], limit: int) -> Iterator[tuple[Slice, ...]]:
    group: list[Slice] = []
    filled = 0
    for item in items:
        if group and filled + _num_bytes(item) > limit:
            yield tuple(group)
            group, filled = [], 0
        group.append(item)
        filled += _num_bytes(item)
    if group:
        yield tuple(group)


def _num_bytes(item: Slice) -> int:
    if item.kind == "hf":
        return (item.stop - item.start) * HF_ROW_BYTES
    return item.stop - item.start


def _dataset_slice(name: str) -> Slice:
    rows = open_dataset(name)
    if len(rows) == 0:
        raise DataError(f"the source hf:{name} is empty", given="0 rows")
    return Slice("hf", name, 0, len(rows), len(rows), dataset_fingerprint(rows))


def dataset_fingerprint(rows: Any) -> str:
    """What `datasets` itself tells contents apart by."""
    return str(rows._fingerprint)


def open_dataset(name: str) -> Any:
    """The rows of a Hugging Face dataset: a directory by save_to_disk, one of data files, or a name.

    `name` may end in `?config=..&split=..`; the split is `train` unless said. Raises DataError.
    """
    try:
        import datasets  # noqa: PLC0415  optional: only a recipe that names hf: needs it
    except ImportError as error:
        raise DataError(
            f"the source hf:{name} needs the package `datasets`, which is not installed",
            hint="pip install 'plait[datasets]'",
        ) from error
    place, _, query = name.partition("?")
    options = {key: values[-1] for key, values in parse_qs(query).items()}
    if options.keys() - {"config", "split"}:
        raise DataError(f"hf:{name} has an unknown option", expected="config and split after the ?")
    try:
        if any((Path(place) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(place)
        else:
            found = datasets.load_dataset(place, options.get("config"))
    except Exception as error:  # its errors have no common class: network, name, format, disk
        raise DataError(f"cannot load hf:{name}", given=f"{type(error).__name__}: {error}") from error
    if isinstance(found, dict):
        split = options.get("split", "train")
        if split not in found:
            raise DataError(
                f"hf:{name} has no split {split}", expected=", ".join(found), hint=f"hf:{place}?split=.."
            )
        found = found[split]
    return found
