"""Build a directory of tokens from all shards of the sources. Works beyond memory size, and survives kill -9.

[Note: restart]  A part's files are renamed into place once they are complete and on disk, then its record is
written to unfinished/. A part whose record has the right key is not written again. index.json comes last.

[Note: number of processes]  A worker takes about a second to start, in which a core tokenizes 3 MB. Below
PARALLEL_FROM_BYTES this process tokenizes alone, on all cores: `tokenizers` has threads of its own. Above,
processes scale better: reading, JSON and NumPy also run in parallel.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from plait.data import tokenizer as tokenizers
from plait.data.config import INDEX, DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore, open_store
from plait.data.index import TOKENIZER, DatasetSpec, Index, SourceStats
from plait.data.readers import BadRows, ReadOptions, find_bad, read_chunks
from plait.data.shards import UNFINISHED, BuildSettings, Encoding, PartRecord, finished_part
from plait.data.sources import FileSlice, Shard, empty_source, list_shards, list_source
from plait.data.workers import Report, write_parts
from plait.errors import ContentError, DataError
from plait.fileio import WRITABLE, disk_hint, json_hash, read_json, sync_folder, write_json
from plait.tables import counted, plain

PARALLEL_FROM_BYTES = 64 << 20
SAMPLE_BYTES = 64 << 20  # text to train a tokenizer on, evenly from all shards
LOCK = ".lock"
_MAX_SHOWN = 20  # files that are not text, or rows of one file
_SEARCH_S = 60.0  # for such files, after the first


def build(
    data: DataConfig, tokenizer: TokenizerConfig, *, progress: bool = True, force: bool = False
) -> TokenStore:
    """Tokenize the sources into data.dir, or open the tokens there if they were built from the same recipe.

    A killed build is resumed; a build running in another process is waited for. `force` rebuilds from
    scratch. `progress` shows a bar on stderr. Raises DataError: bad sources, or a directory with other
    contents.
    """
    console = Console(stderr=True, quiet=not progress)
    spec = DatasetSpec.from_config(data, tokenizer)
    try:
        if not force and (data.dir / INDEX).exists():
            store = open_store(data, tokenizer)
            _print_changed_sources(store, data, console)
            return store
        _check_folder(data.dir)
        shards = list_shards(data.sources)
        with _lock(data.dir, console):
            if force:
                (data.dir / INDEX).unlink(missing_ok=True)
                shutil.rmtree(data.dir / UNFINISHED, ignore_errors=True)
            if not (data.dir / INDEX).exists():  # else another process has just built it
                _Build(data, tokenizer, spec, shards, console).run()
    except OSError as error:
        raise DataError(
            f"cannot write the tokens to {data.dir}",
            given=error.strerror or error,
            expected=WRITABLE,
            hint=disk_hint(data.dir),
        ) from error
    return open_store(data, tokenizer, verify=False)


@dataclass
class _Build:
    data: DataConfig
    tokenizer: TokenizerConfig
    spec: DatasetSpec
    shards: list[Shard]
    console: Console

    def __post_init__(self) -> None:
        self._listing = _listing_hash(self.shards)  # with the files that are skipped
        self._bad_files: dict[str, ContentError] = {}
        self._encoding: Encoding | None = None

    def run(self) -> None:
        unfinished = self.data.dir / UNFINISHED
        unfinished.mkdir(exist_ok=True)
        try:
            if self.data.errors == "skip":
                self._leave_out_bad_files()
            settings = self._settings()
            self._write(settings, self._write_all_parts(settings))
        except BaseException as error:
            if not any(unfinished.glob("part-*.json")):
                _clear(self.data.dir)  # nothing that a restart could use
            if isinstance(error, ContentError) and self.data.errors == "raise":
                raise self._all_bad(error) from error
            raise

    def _leave_out_bad_files(self) -> None:
        """List the shards again, without the files that are not text. Raises ContentError if none is left."""
        items = [item for item in self._items() if item.kind in ("text", "jsonl.gz")]  # others: row by row
        found = find_bad(items, self.data.text_key) if self.data.kind == "text" else ()
        self._bad_files = {item.name: error for item, (error, *_), rows in found if not rows}
        for name, error in itertools.islice(self._bad_files.items(), _MAX_SHOWN):
            self.console.print(plain(f"skipped {name}: {error.given}"))
        self.shards = list_shards(self.data.sources, without=self._bad_files)
        if len({shard.source for shard in self.shards}) < len(self.data.sources):
            raise next(iter(self._bad_files.values()))

    def _items(self) -> Iterator[FileSlice]:
        return itertools.chain.from_iterable(map(list_source, self.data.sources))

    def _all_bad(self, first: ContentError) -> ContentError:
        """Return one error for all files and rows that are not text, as far as they are found in a minute."""
        self.console.print("looking for other invalid rows and files", highlight=False)
        end_s = time.monotonic() + _SEARCH_S
        encode = None if self._encoding is None else self._encoding.encoder()
        found = list(find_bad(self._items(), self.data.text_key, end_s, encode, keep=_MAX_SHOWN))
        skip = 'data.errors = "skip" leaves such files and rows out'
        if len(found) == 1 and found[0][2] > 1:
            (_, errors, number), problem = found[0], "rows are not"
            lines = [f"{error.fact}: {error.given}" for error in errors]
        elif len(found) > 1:
            number, problem, lines = len(found), "files are not", []
            for _, (error, *_), rows in found[:_MAX_SHOWN]:
                more = f" (and {counted(rows - 1, 'more row')})" if rows > 1 else ""
                lines.append(f"{error.fact}: {error.given}{more}")
        else:
            first.hint = f"{first.hint}; {skip}"
            return first
        others = [f"... ({number - _MAX_SHOWN} more)"] if number > _MAX_SHOWN else []
        rest = ", or have rows that are not" if len(found) > 1 else ""
        return ContentError(
            f"{number} {problem} {self.data.kind}{rest}",
            given="\n".join([*lines, *others]),
            expected=f"text in UTF-8, or JSON lines with text under {self.data.text_key!r}"
            if self.data.kind == "text"
            else first.expected,
            hint=f"{skip}; or sources without them" if len(found) > 1 else f"{first.hint}; {skip}",
        )

    def _settings(self) -> BuildSettings:
        folder = self.data.dir / TOKENIZER
        self._make_tokenizer(folder)
        loaded = tokenizers.read_tokenizer(folder)
        share = int(self.data.validation * 2**64)
        if (kind := self.data.kind) != "text":
            self._encoding = Encoding(folder, kind, self.data.train_on, self.data.train_empty_thinking)
            self._encoding.encoder()  # raises errors of the template
        return BuildSettings(
            folder=self.data.dir,
            tokenizer=folder,
            tokenizer_sha256=json_hash(tokenizers.file_hashes(folder)),
            vocab_size=max(loaded.get_vocab().values()) + 1,  # not the number of tokens: ids may have gaps
            text_key=self.data.text_key,
            errors=self.data.errors,
            seed=self.data.seed,
            end_of_document=loaded.get_vocab()[loaded.eos_token],
            share=share,
            threshold=share,
            encoding=self._encoding,
        )

    def _make_tokenizer(self, folder: Path) -> None:
        """Train or import the tokenizer, unless a killed build of the same recipe has done so."""
        corpus = [asdict(shard) for shard in self.shards] if self.tokenizer.path is None else None
        key = json_hash([self.spec.model_dump(), corpus])
        record = self.data.dir / UNFINISHED / "tokenizer.json"
        with contextlib.suppress(OSError, ValueError):
            if read_json(record) == {"key": key, "files": tokenizers.file_hashes(folder)}:
                return
        path, vocab_size, end = self.tokenizer.path, self.tokenizer.vocab_size, self.tokenizer.end_of_document
        if path is not None:
            tokenizers.probe_tokenizer(path)
            tokenizer = tokenizers.read_tokenizer(path, end, self.tokenizer.chat_template)
        else:
            assert vocab_size is not None, "TokenizerConfig requires path or vocab_size"
            self.console.print("training the tokenizer", highlight=False)
            tokenizer = tokenizers.train_tokenizer(self._sample(), vocab_size, end)
        tokenizers.save_tokenizer(tokenizer, folder)
        write_json(record, {"key": key, "files": tokenizers.file_hashes(folder)})

    def _sample(self) -> Iterator[str]:
        """Text to train on: the beginning of every shard, at most SAMPLE_BYTES in total."""
        how = ReadOptions(self.data.text_key, bad_rows=BadRows(self.data.errors == "skip"))
        for shard in self.shards:
            left = SAMPLE_BYTES // len(self.shards)
            for chunk in read_chunks(shard, how):
                yield chunk.text
                left -= len(chunk.text)
                if left <= 0:
                    break

    def _write_all_parts(self, settings: BuildSettings) -> list[PartRecord]:
        """Write the missing parts. Return all records in order."""
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("tokenizing", total=sum(shard.num_bytes for shard in self.shards))
            report = partial(bar.advance, task)
            found = [finished_part(number, shard, settings) for number, shard in enumerate(self.shards)]
            records = {number: record for number, record in enumerate(found) if record is not None}
            report(sum(self.shards[number].num_bytes for number in records))
            to_write = [number for number, record in enumerate(found) if record is None]
            records |= self._write_parts(to_write, settings, report)
            threshold = _final_threshold(records.values(), settings.share)
            to_resplit = [number for number, record in records.items() if _needs_resplit(record, threshold)]
            records |= self._write_parts(to_resplit, replace(settings, threshold=threshold), lambda _: None)
        return [records[number] for number in range(len(self.shards))]

    def _write_parts(
        self, numbers: Sequence[int], settings: BuildSettings, report: Report
    ) -> dict[int, PartRecord]:
        jobs = [(number, self.shards[number]) for number in numbers]
        workers = self.data.build_workers
        if workers is None:  # see [Note: number of processes]
            large = sum(shard.num_bytes for _, shard in jobs) >= PARALLEL_FROM_BYTES
            workers = len(os.sched_getaffinity(0)) if large else 0
        return dict(write_parts(jobs, settings, min(workers, len(jobs)), report))

    def _write(self, settings: BuildSettings, parts: Sequence[PartRecord]) -> None:
        """Write the index, last; then remove files that a finished directory does not need."""
        folder = self.data.dir
        index = Index(
            spec=self.spec,
            dtype=settings.dtype,
            vocab_size=settings.vocab_size,
            max_token=max(part.max_token for part in parts),
            end_of_document=settings.end_of_document,
            tokenizer_files=tokenizers.file_hashes(settings.tokenizer),
            listing=self._listing,
            sources=[
                _source_stats(name, [part for part in parts if part.source == number], self._num_bad(name))
                for number, name in enumerate(self.data.sources)
            ],
            train=[part.train for part in parts if part.train is not None],
            validation=[part.validation for part in parts if part.validation is not None],
        )
        sync_folder(folder)
        content = index.model_dump(mode="json")
        write_json(folder / INDEX, {"sha256": json_hash(content), "index": content})
        parts_files = (part.files(index.item_bytes) for part in (*index.train, *index.validation))
        part_names = {file.name for file in itertools.chain.from_iterable(parts_files)}
        for path in (*folder.glob("part-*.bin"), *folder.glob(".part-*.tmp")):
            if path.name not in part_names:
                path.unlink(missing_ok=True)
        shutil.rmtree(folder / UNFINISHED)

    def _num_bad(self, source: str) -> int:
        """Number of files of a source that were left out."""
        return sum(item.name in self._bad_files for item in list_source(source)) if self._bad_files else 0


def _final_threshold(records: Iterable[PartRecord], share: int) -> int:
    """Threshold that leaves no split empty: the recipe's, or one that moves a single document across."""
    lowest = min(record.lowest for record in records)
    highest = max(record.highest for record in records)
    if share == 0 or lowest >= highest or lowest < share <= highest:
        return share
    return lowest + 1 if lowest >= share else highest


def _needs_resplit(record: PartRecord, threshold: int) -> bool:
    low, high = sorted((record.threshold, threshold))
    return low <= record.lowest < high or low <= record.highest < high


def _source_stats(name: str, parts: Sequence[PartRecord], skipped_files: int) -> SourceStats:
    """Statistics of a source. Raises DataError if it has no text."""
    files = [file for part in parts for file in (part.train, part.validation) if file is not None]
    if not files:
        raise empty_source(name, "no document with text", "at least one document with text")
    hashes = "".join(part.source_sha256 for part in parts)
    return SourceStats(
        name=name,
        bytes=sum(part.bytes for part in parts),
        documents=sum(part.documents for part in parts),
        tokens=sum(file.tokens for file in files),
        sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        skipped_files=skipped_files,
        skipped_rows=sum(part.skipped_rows for part in parts),
    )


def _listing_hash(shards: Sequence[Shard]) -> str:
    """Hash of the names and sizes of the sources' files: cheap, and detects most changes."""
    slices = [item for shard in shards for item in shard.slices]
    return json_hash([[Path(item.name).name, item.start, item.size] for item in slices])


def _print_changed_sources(store: TokenStore, data: DataConfig, console: Console) -> None:
    """Print a note if the sources have changed; built tokens stay valid. Missing sources are ignored."""
    if any(source.startswith("hf:") for source in data.sources):
        return  # listing them may download data
    with contextlib.suppress(DataError):
        if _listing_hash(list_shards(data.sources)) != store.index.listing:
            text = f"note: the sources have changed since the tokens in {data.dir} were built from them"
            console.print(plain(text))


def _check_folder(folder: Path) -> None:
    """Check that the directory is usable. Raises DataError if it has other contents."""
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} is not a directory",
            given="a file",
            expected="a new or empty directory for the tokens",
            hint="--set data.dir=DIRECTORY",
        )
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names - {LOCK} and not names & {INDEX, UNFINISHED}:
        raise DataError(
            f"{folder} contains something other than tokens",
            given=", ".join(sorted(names)[:5]),
            expected="an empty or new directory",
            hint="another dir",
        )


@contextlib.contextmanager
def _lock(folder: Path, console: Console) -> Iterator[None]:
    """Lock the directory for one builder. The kernel releases the lock when its holder exits, in any way."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print(plain(f"waiting for another process that builds {folder}"))
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == (folder / LOCK).stat().st_ino:
                    yield
                    return
        # The previous holder wrote no part and removed the file: try again.


def _clear(folder: Path) -> None:
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    for path in (*folder.glob(".part-*.tmp"), *folder.glob("part-*.bin"), folder / LOCK):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # then it has other files
        folder.rmdir()
