"""A recipe's `sources`: files in a fixed order, split into shards of bounded size.

A shard becomes one part of the token files. Shard boundaries depend only on the sources, never on the number
of processes, so the tokens are the same on every machine.
"""

import glob
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

from plait.data.python_docs import library_files
from plait.errors import DataError, unreadable

Kind = Literal["text", "jsonl", "jsonl.gz", "parquet", "hf", "python"]

SHARDS = 64  # target number: enough for many cores and for restarts, few enough for one directory
MIN_SHARD_BYTES = 1 << 20
MAX_SHARD_BYTES = 1 << 28
HF_ROW_BYTES = 2048  # estimate for progress and shard sizes: the size is unknown until a row is read
ROW_KINDS = ("hf", "parquet")  # whose slices are ranges of rows
UNSPLIT_KINDS = ("jsonl.gz", "python")
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".parquet": "parquet"}
LIBRARY: dict[str, Kind] = {"python-stdlib": "text", "python-docs": "python"}  # as text, as conversations


@dataclass(frozen=True)
class FileSlice:
    """A range of a file: the lines that begin in bytes [start, stop). For `hf` and `parquet`, rows.

    `size` and `version` are those of the full file when it was listed (modification time, a dataset's
    fingerprint): if they change, the part is rebuilt. `name` is the path, or the dataset's name.
    """

    kind: Kind
    name: str
    start: int
    stop: int
    size: int
    version: str = ""

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * (HF_ROW_BYTES if self.kind in ROW_KINDS else 1)


@dataclass(frozen=True)
class Shard:
    """Slices of one source (its index in the recipe) that become one part. `num_bytes` is for progress."""

    source: int
    slices: tuple[FileSlice, ...]
    num_bytes: int


def list_shards(sources: Sequence[str], without: Collection[str] = ()) -> list[Shard]:
    """List all shards of all sources, in the recipe's order, except the files in `without`. Raises DataError:
    missing, empty, unreadable."""
    slices_by_source = [[item for item in list_source(name) if item.name not in without] for name in sources]
    total = sum(item.num_bytes for items in slices_by_source for item in items)
    limit = max(MIN_SHARD_BYTES, min(MAX_SHARD_BYTES, total // SHARDS))
    return [
        Shard(source, slices, sum(item.num_bytes for item in slices))
        for source, items in enumerate(slices_by_source)
        for slices in _pack((split for item in items for split in _split(item, limit)), limit)
    ]


def list_source(source: str) -> list[FileSlice]:
    """List the files of one source, unsplit and sorted by path. Raises DataError: missing or empty."""
    if source.startswith("hf:"):
        return [_dataset_slice(source.removeprefix("hf:"))]
    paths = library_files() if source in LIBRARY else _glob_files(source)
    slices = [_file_slice(path, LIBRARY.get(source)) for path in paths]
    if not any(item.size for item in slices):
        raise empty_source(source, f"{len(slices)} file(s) of 0 bytes", "at least one file with text")
    return slices


def absolute_source(source: str) -> str:
    """Return the source with an absolute path, if it has one."""
    if source.startswith(("hf:", "~")) or source in LIBRARY:
        return source
    return str(Path(source).absolute())


def empty_source(
    source: str, given: str, expected: str, hint: str = "leave it out, or other files"
) -> DataError:
    """Return the error of a source without text."""
    return DataError(f"the source {source} is empty", given=given, expected=expected, hint=hint)


def _glob_files(source: str) -> list[Path]:
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"the source {source} names an unknown user",
            given=error,
            expected="the name of a user after ~",
            hint="the full path",
        ) from error
    if path.is_dir():
        raise DataError(
            f"the source {source} is a directory",
            given=f"{path.absolute()}",
            expected="files",
            hint=f"{source.rstrip('/')}/**/*.txt",
        )
    if path.exists():
        return [path]
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
    files: dict[tuple[int, int], Path] = {}  # by device and inode: links to folders give a file many paths
    for each in sorted(map(Path, found), key=lambda each: (len(each.parts), each)):
        if each.is_file():
            files.setdefault(((status := each.stat()).st_dev, status.st_ino), each)
    if not files:
        raise DataError(
            f"the source {source} is missing",
            given=f"no such file, relative to {Path.cwd()}",
            expected="paths or globs of text, .jsonl(.gz) or .parquet, hf:NAME, python-stdlib or python-docs",
            hint="an absolute path",
        )
    return sorted(files.values())


def _file_slice(path: Path, kind: Kind | None = None) -> FileSlice:
    if kind is None:
        kind = "jsonl.gz" if path.name.endswith(".jsonl.gz") else _KINDS.get(path.suffix, "text")
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    size = status.st_size
    if kind == "parquet":
        size = open_parquet(str(path)).metadata.num_rows
    return FileSlice(kind, str(path), 0, size, size, str(status.st_mtime_ns))


def open_parquet(name: str) -> Any:
    """Open a Parquet file with pyarrow. Raises DataError."""
    try:
        from pyarrow import parquet  # noqa: PLC0415  optional: only a recipe that names .parquet files needs it
    except ImportError as error:
        raise _needs_datasets(name, "pyarrow", error) from error
    try:
        return parquet.ParquetFile(name)
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        raise DataError(
            f"{name} is not a complete Parquet file",
            given=error,
            expected="a complete file",
            hint=f"ls -l {name}",
        ) from error


def _needs_datasets(source: str, package: str, error: ImportError) -> DataError:
    return DataError(
        f"the source {source} needs the package `{package}`",
        given=error,
        expected="the packages of plait[datasets]",
        hint="pip install 'plait[datasets]'",
    )


def _split(item: FileSlice, limit: int) -> Iterator[FileSlice]:
    """Split a slice into ranges of about `limit` bytes, if files of its kind can be split."""
    if item.kind in UNSPLIT_KINDS or item.num_bytes <= limit:
        yield item
        return
    num_slices = -(-item.num_bytes // limit)
    bounds = [item.size * index // num_slices for index in range(num_slices + 1)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield replace(item, start=start, stop=stop)


def _pack(items: Iterable[FileSlice], limit: int) -> Iterator[tuple[FileSlice, ...]]:
    group: list[FileSlice] = []
    filled = 0
    for item in items:
        if group and filled + item.num_bytes > limit:
            yield tuple(group)
            group, filled = [], 0
        group.append(item)
        filled += item.num_bytes
    if group:
        yield tuple(group)


def _dataset_slice(name: str) -> FileSlice:
    rows = open_dataset(name)
    if len(rows) == 0:
        hint = f"hf:{name.partition('?')[0]}?split=NAME"
        raise empty_source(f"hf:{name}", "0 rows", "at least one row", hint)
    return FileSlice("hf", name, 0, len(rows), len(rows), str(rows._fingerprint))


def open_dataset(name: str) -> Any:
    """Open the rows of a Hugging Face dataset: a save_to_disk directory, one of data files, or a name.

    `name` may end in `?config=..&split=..`; the default split is `train`. Raises DataError.
    """
    try:
        import datasets  # noqa: PLC0415  optional: only a recipe that names hf: needs it
    except ImportError as error:
        raise _needs_datasets(f"hf:{name}", "datasets", error) from error
    path, _, query = name.partition("?")
    options = {key: values[-1] for key, values in parse_qs(query).items()}
    if options.keys() - {"config", "split"}:
        raise DataError(
            f"hf:{name} has an unknown option",
            given=f"{', '.join(sorted(options))}",
            expected="config and split after the ?",
            hint=f"hf:{path}?split=train",
        )
    try:
        if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, options.get("config"))
    except Exception as error:  # errors without a common class: network, name, format, disk
        raise DataError(
            f"cannot load hf:{name}",
            given=f"{type(error).__name__}: {error}",
            expected="a name on the Hugging Face Hub, or a folder of save_to_disk or of data files",
            hint="an absolute path, for a folder",
        ) from error
    if isinstance(found, dict):
        split = options.get("split", "train")
        if split not in found:
            raise DataError(
                f"hf:{name} has no split {split}",
                given=f"split={split}",
                expected=", ".join(found),
                hint=f"hf:{path}?split={next(iter(found), 'train')}",
            )
        found = found[split]
    return found
