"""All shards of the sources -> a directory of tokens. Larger than memory is fine, and so is kill -9.

[Note: restart]  A part's files get their names when they are whole and on disk, then its record is
written to unfinished/. A part whose record has the right key is not made again. index.json comes last.

[Note: how many processes]  A worker takes about a second to start, in which a core tokenizes 3 MB. Below
PARALLEL_FROM_BYTES this process tokenizes alone, on all cores: `tokenizers` has threads of its own. Above,
processes scale better: reading, JSON and NumPy are done in parallel too.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from plait.data import tokenizer as tokenizers
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore, open_store
from plait.data.index import (
    INDEX,
    TOKENIZER,
    DatasetSpec,
    Index,
    SourceFacts,
    json_hash,
    write_index,
)
from plait.data.readers import TextStream, read_pieces
from plait.data.shards import UNFINISHED, PartRecord, Setting, finished_part
from plait.data.sources import Shard, list_shards
from plait.data.workers import Report, write_parts
from plait.errors import DataError
from plait.fileio import sync_folder, write_json

PARALLEL_FROM_BYTES = 64 << 20
SAMPLE_BYTES = 64 << 20  # of text, to train a tokenizer on: evenly from all shards
LOCK = ".lock"


def build(
    data: DataConfig, tokenizer: TokenizerConfig, *, progress: bool = True, force: bool = False
) -> TokenStore:
    """Tokenizes the sources into data.dir, or opens what is there if it was built from the same recipe.

    A build that was killed goes on where it was; one that runs in another process is waited for. `force`
    builds anew. `progress` shows a bar on stderr. Raises DataError: bad sources, or a directory that holds
    something else.
    """
    console = Console(stderr=True, quiet=not progress)
    spec = DatasetSpec.of(data, tokenizer)
    try:
        if not force and (data.dir / INDEX).exists():
            store = open_store(data, tokenizer)
            _note_changed_sources(store, data, console)
            return store
        _check_folder(data.dir)
        shards = list_shards(data.sources)
        with _locked(data.dir, console):
            if force:
                (data.dir / INDEX).unlink(missing_ok=True)
                shutil.rmtree(data.dir / UNFINISHED, ignore_errors=True)
            if not (data.dir / INDEX).exists():  # else the build that was waited for has made it
                _Build(data, tokenizer, spec, shards, console).run()
    except OSError as error:
        raise DataError(f"cannot write the tokens to {data.dir}", given=error.strerror or error) from error
    return open_store(data, tokenizer, verify=False)


@dataclass
class _Build:
    data: DataConfig
    tokenizer: TokenizerConfig
    spec: DatasetSpec
    shards: list[Shard]
    console: Console

    def run(self) -> None:
        folder = self.data.dir
        (folder / UNFINISHED).mkdir(exist_ok=True)
        try:
            setting = self._setting()
            records = self._parts(setting)
            self._write(setting, records)
        except BaseException:
            if not any((folder / UNFINISHED).glob("part-*.json")):
                _clear(folder)  # nothing that a restart could use
            raise

    def _setting(self) -> Setting:
        folder = self.data.dir / TOKENIZER
        self._make_tokenizer(folder)
        found = tokenizers.load_tokenizer(folder)
        share = int(self.data.validation * 2**64)
        return Setting(
            folder=self.data.dir,
            tokenizer=folder,
            tokenizer_sha256=json_hash(tokenizers.file_hashes(folder)),
            vocab_size=max(found.get_vocab().values()) + 1,  # not their count: ids may have gaps
            text_key=self.data.text_key,
            seed=self.data.seed,
            end_of_document=found.get_vocab()[found.eos_token],
            share=share,
            threshold=share,
        )

    def _make_tokenizer(self, folder: Path) -> None:
        """Trains or takes over, unless a build that was killed has done so for the same recipe."""
        corpus = [asdict(shard) for shard in self.shards] if self.tokenizer.path is None else None
        key = json_hash([self.spec.model_dump(), corpus])
        record = self.data.dir / UNFINISHED / "tokenizer.json"
        with contextlib.suppress(OSError, ValueError):
            if json.loads(record.read_bytes()) == {"key": key, "files": tokenizers.file_hashes(folder)}:
                return
        if self.tokenizer.path is not None:
            made = tokenizers.read_tokenizer(self.tokenizer.path, self.tokenizer.end_of_document)
        else:
            assert self.tokenizer.vocab_size is not None, "the configuration's check"
            self.console.print("training the tokenizer", highlight=False)
            made = tokenizers.train_tokenizer(
                self._sample(), self.tokenizer.vocab_size, self.tokenizer.end_of_document
            )
        tokenizers.save_tokenizer(made, folder)
        write_json(record, {"key": key, "files": tokenizers.file_hashes(folder)})

    def _sample(self) -> Iterator[str]:
        """The beginning of every shard: at most SAMPLE_BYTES in all, spread over the corpus."""
        how = TextStream(self.data.text_key, self.data.seed, lambda _: None)
        for shard in self.shards:
            left = SAMPLE_BYTES // len(self.shards)
            for piece in read_pieces(shard, how):
                yield piece.text
                left -= len(piece.text)
                if left <= 0:
                    break

    def _parts(self, setting: Setting) -> dict[int, PartRecord]:
        """All parts' records, in order; makes the parts that are not there."""
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("tokenizing", total=sum(shard.num_bytes for shard in self.shards))

            def report(num_bytes: int) -> None:
                bar.advance(task, num_bytes)

            records = {}
            for number, shard in enumerate(self.shards):
                record = finished_part(number, shard, setting)
                if record is not None:
                    records[number] = record
                    report(shard.num_bytes)
            missing = [number for number in range(len(self.shards)) if number not in records]
            records |= self._made(missing, setting, report)
            threshold = _settled(records.values(), setting.share)
            wrong = [number for number, record in records.items() if _is_on_wrong_side(record, threshold)]
            records |= self._made(wrong, replace(setting, threshold=threshold), lambda _: None)
        return dict(sorted(records.items()))

    def _made(self, numbers: Sequence[int], setting: Setting, report: Report) -> dict[int, PartRecord]:
        jobs = [(number, self.shards[number]) for number in numbers]
        return dict(write_parts(jobs, setting, self._workers(jobs), report))

    def _workers(self, jobs: Sequence[tuple[int, Shard]]) -> int:
        """See [Note: how many processes]. 0 means this one."""
        workers = self.data.build_workers
        if workers is None:
            large = sum(shard.num_bytes for _, shard in jobs) >= PARALLEL_FROM_BYTES
            workers = len(os.sched_getaffinity(0)) if large else 0
        return min(workers, len(jobs))

    def _write(self, setting: Setting, records: dict[int, PartRecord]) -> None:
        """The index, last; then what a finished directory does not need is removed."""
        folder = self.data.dir
        parts = records.values()
        index = Index(
            spec=self.spec,
            dtype=setting.dtype,
            vocab_size=setting.vocab_size,
            max_token=max(part.max_token for part in parts),
            end_of_document=setting.end_of_document,
            tokenizer_files=tokenizers.file_hashes(setting.tokenizer),
            listing=_listing(self.shards),
            sources=[
                _source_facts(name, [part for part in parts if part.source == number])
                for number, name in enumerate(self.data.sources)
            ],
            train=[part.train for part in parts if part.train is not None],
            validation=[part.validation for part in parts if part.validation is not None],
        )
        sync_folder(folder)
        write_index(folder, index)
        kept = {file.name for file in (*index.train, *index.validation)}
        for path in folder.glob("part-*.bin"):
            if path.name not in kept:
                path.unlink()
        for path in folder.glob(".part-*.tmp"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder / UNFINISHED)


def _settled(records: Iterable[PartRecord], share: int) -> int:
    """The threshold that leaves no split empty: the recipe's, or one that moves a single draw across."""
    lowest = min(record.lowest for record in records)
    highest = max(record.highest for record in records)
    if share == 0 or lowest >= highest or lowest < share <= highest:
        return share
    return lowest + 1 if lowest >= share else highest


def _is_on_wrong_side(record: PartRecord, threshold: int) -> bool:
    low, high = sorted((record.threshold, threshold))
    return low <= record.lowest < high or low <= record.highest < high


def _source_facts(name: str, parts: Sequence[PartRecord]) -> SourceFacts:
    """Raises DataError for a source without text."""
    files = [file for part in parts for file in (part.train, part.validation) if file is not None]
    if not files:
        raise DataError(f"the source {name} is empty", given="no document with text", expected="text")
    hashes = "".join(part.source_sha256 for part in parts)
    return SourceFacts(
        name=name,
        bytes=sum(part.bytes for part in parts),
        documents=sum(part.documents for part in parts),
        tokens=sum(file.tokens for file in files),
        sha256=hashlib.sha256(hashes.encode()).hexdigest(),
    )


def _listing(shards: Sequence[Shard]) -> str:
    """A hash of the sources' files, by name and size: cheap, and enough to notice most changes."""
    return json_hash(
        [[Path(item.name).name, item.start, item.size] for shard in shards for item in shard.slices]
    )


def _note_changed_sources(store: TokenStore, data: DataConfig, console: Console) -> None:
    """Tokens once built stay valid, so this is a line and no letter. Sources that are gone are no news."""
    if any(source.startswith("hf:") for source in data.sources):
        return  # asking could mean a download
    with contextlib.suppress(DataError):
        if _listing(list_shards(data.sources)) != store.index.listing:
            console.print(
                f"note: the sources have changed since the tokens in {data.dir} were built from them"
            )


def _check_folder(folder: Path) -> None:
    """Raises DataError where something else lives in the directory."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is no directory", expected="a directory for the tokens")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names - {LOCK} and not names & {INDEX, UNFINISHED}:
        raise DataError(
            f"{folder} holds something else than tokens",
            given=", ".join(sorted(names)[:5]),
            expected="an empty or a new directory",
            hint="another dir",
        )


@contextlib.contextmanager
def _locked(folder: Path, console: Console) -> Iterator[None]:
    """One builder at a time. The kernel lets go of the lock when its holder ends, however it ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print(f"waiting for another process that builds {folder}")
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == (folder / LOCK).stat().st_ino:
                    yield
                    return
        # The holder before found nothing worth keeping and took the file away: begin anew.


def _clear(folder: Path) -> None:
    """Leaves nothing of a build that made no part."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    for path in (*folder.glob(".part-*.tmp"), *folder.glob("part-*.bin"), folder / LOCK):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not ours alone, then
        folder.rmdir()
