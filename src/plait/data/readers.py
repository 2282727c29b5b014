"""Stream the documents of a shard in chunks.

No text file is in memory in full, however large; a JSON line or a dataset's row is.

[Note: chunks]  A text file is read in chunks of about a megabyte that end at line ends (or, in a longer line,
between any two characters). Each chunk is tokenized separately. Byte-level BPE never joins a word across a
line end; at a chunk boundary it may tokenize a run of blank lines in two instead of one. The decoded text is
identical.

[Note: draw]  A document's draw decides whether it is for validation: 64 bits of a hash of the seed and its
text (for a file: its first chunk). So the split is independent of paths, order and number of processes, and a
document that occurs twice is always on one side.
"""

import codecs
import gzip
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from plait.data.encoder import Sample, located, row_key, without_none
from plait.data.pairs import AnswerEncoder, Pair, PairEncoder
from plait.data.python_docs import answers, conversations, pairs
from plait.data.sources import (
    HF_ROW_BYTES,
    ROW_KINDS,
    FileSlice,
    Shard,
    list_shards,
    open_dataset,
    open_parquet,
)
from plait.errors import ContentError, DataError, unknown_key_hint, unreadable
from plait.fileio import open_regular, parse_json

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28
ROWS_PER_READ = 64
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk of a document; `last`: its last one. `num_bytes`: bytes read from the source for it. A row that
    is encoded already is a chunk with a sample."""

    text: str
    draw: int
    last: bool
    num_bytes: int
    sample: Sample | None = None


@dataclass
class BadRows:
    """The number of rows that are not text, and the errors of the first `keep` of them. `add` raises an error
    unless `skip`."""

    skip: bool = False
    keep: int = 1
    number: int = 0
    errors: list[ContentError] = field(default_factory=list)

    @property
    def keeps_next(self) -> bool:
        """True if the error of the next row is kept, and so needs its place."""
        return len(self.errors) < self.keep

    def add(self, error: ContentError) -> None:
        if not self.skip:
            raise error
        self.number += 1
        if self.keeps_next:
            self.errors.append(error)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Recipe's key and seed; `digest` is called with every byte of the source (a hash's update). `encode`:
    rows are not text, but chat or prompts."""

    text_key: str
    seed: int = 0
    digest: Callable[[bytes], None] = lambda _: None
    bad_rows: BadRows = field(default_factory=BadRows)
    encode: Callable[[Any], Sample | Pair] | None = None

    @property
    def example(self) -> str:
        """The form of a row, for messages."""
        return f"an object with the key {self.text_key!r}" if self.encode is None else "an object"

    def draw(self, content: bytes) -> int:
        """Draw of a document, in [0, 2**64). See [Note: draw]."""
        key = self.seed.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "little")


def read_chunks(shard: Shard, options: ReadOptions) -> Iterator[TextChunk]:
    """Yield the shard's non-empty documents in order, in chunks. Raises DataError with the location."""
    for item in shard.slices:
        yield from _read(item, options)


def _read(item: FileSlice, options: ReadOptions) -> Iterator[TextChunk]:
    return (_dataset_chunks if item.kind in ROW_KINDS else _file_chunks)(item, options)


class _TimeOver(Exception):
    """The clock has passed a search's limit."""


def find_bad(
    items: Iterable[FileSlice],
    text_key: str,
    end_s: float = math.inf,
    encode: Callable[[Any], Sample | Pair] | None = None,
    keep: int = 1,
) -> Iterator[tuple[FileSlice, list[ContentError], int]]:
    """Read files or datasets to the end, or until time.monotonic() is `end_s`. Yield those that are not text,
    each with the errors of its first `keep` bad rows and their number; 0: it cannot be read at all."""

    def check_time(_: bytes) -> None:
        if time.monotonic() > end_s:
            raise _TimeOver

    for item in items:
        rows, is_over = BadRows(skip=True, keep=keep), False
        try:
            for _ in _read(item, ReadOptions(text_key, digest=check_time, bad_rows=rows, encode=encode)):
                pass
        except ContentError as error:
            yield item, [error], 0
            continue
        except _TimeOver:
            is_over = True
        if rows.errors:
            yield item, rows.errors, rows.number
        if is_over:
            return


def read_documents(source: str, text_key: str = "text") -> Iterator[str]:
    """Yield the documents of a source as texts, in order. Raises DataError."""
    options, parts = ReadOptions(text_key), list[str]()
    for shard in list_shards([source]):
        for chunk in read_chunks(shard, options):
            parts.append(chunk.text)
            if chunk.last:
                yield "".join(parts)
                parts.clear()


def read_samples(source: str, encode: Callable[[Any], Sample | Pair], *, skip: bool) -> Iterator[Sample]:
    """Yield the encoded rows of a source, in order. Raises DataError for the first bad one, unless `skip`."""
    options = ReadOptions("", bad_rows=BadRows(skip), encode=encode)
    for shard in list_shards([source]):
        yield from (chunk.sample for chunk in read_chunks(shard, options) if chunk.sample is not None)


def _file_chunks(item: FileSlice, options: ReadOptions) -> Iterator[TextChunk]:
    try:
        if item.kind == "jsonl.gz":
            with open_regular(Path(item.name)) as compressed, gzip.GzipFile(fileobj=compressed) as file:
                yield from _row_chunks(_gzip_lines(file, item.name, compressed), item, options)
            return
        with open_regular(Path(item.name)) as file:
            start = _line_start(file, item.start, item.size)
            stop = _line_start(file, item.stop, item.size)
            if item.kind == "jsonl":
                yield from _row_chunks(_lines(file, item.name, start, stop), item, options)
            elif item.kind == "python":
                yield from _conversations(file.read(), item, options)
            elif options.encode is not None:
                raise ContentError(
                    f"{item.name} has no rows",
                    given=f"a file that ends in {Path(item.name).suffix!r}",
                    expected=".jsonl(.gz), .parquet, hf:NAME or python-docs for data.kind other than text",
                    hint=f"jq -c '.[]' {item.name}, for a JSON array",
                )
            else:
                yield from _text_chunks(file, start, stop, item, options)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ContentError(
            f"{item.name} is not a complete gzip file",
            given=error,
            expected="a complete file",
            hint=f"gzip --test {item.name}",
        ) from error
    except OSError as error:
        raise unreadable(item.name, error) from error


def _line_start(file: BinaryIO, offset: int, size: int) -> int:
    """First byte at or after `offset` that begins a line; `size` if there is none."""
    if offset == 0 or offset >= size:
        return min(offset, size)
    file.seek(offset - 1)
    while (line := file.readline(CHUNK_BYTES)) and not line.endswith(b"\n"):
        pass
    return file.tell()


def _text_chunks(
    file: BinaryIO, start: int, stop: int, item: FileSlice, options: ReadOptions
) -> Iterator[TextChunk]:
    file.seek(0)
    first = _read_chunk(file, item.size, item)
    if first.startswith(_GZIP_MAGIC):
        raise ContentError(
            f"{item.name} is compressed",
            given="gzip data",
            expected="text, .jsonl or .jsonl.gz",
            hint=f"gunzip --keep {item.name}",
        )
    draw = options.draw(first)
    file.seek(start)
    ends_file = item.stop == item.size
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = start
    while offset < stop:
        raw = _read_chunk(file, stop - offset, item)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(raw, final=offset + len(raw) >= stop)
        except UnicodeDecodeError as error:
            raise _not_utf8(item.name, offset - pending + error.start, error) from error
        offset += len(raw)
        options.digest(raw)
        yield TextChunk(text, draw, last=offset >= stop and ends_file, num_bytes=len(raw))
    if start >= stop and ends_file and item.size:
        # The last line began in an earlier slice, which left the end of the document to the last one.
        yield TextChunk("", draw, last=True, num_bytes=0)


def _read_chunk(file: BinaryIO, limit: int, item: FileSlice) -> bytes:
    """Read a chunk up to a line end, at most `limit` bytes."""
    raw = file.read(min(CHUNK_BYTES, limit))
    if not raw and limit:
        raise DataError(
            f"{item.name} changed while being read",
            given="fewer bytes",
            expected=f"{item.size} bytes, as at the start",
            hint="the same command, once nothing writes to the file",
        )
    if len(raw) < limit and not raw.endswith(b"\n"):
        raw += file.readline(min(CHUNK_BYTES, limit - len(raw)))
    return raw


class _Line(NamedTuple):
    raw: bytes
    offset: int  # in the decompressed file
    num_bytes: int


def _lines(file: BinaryIO, name: str, start: int, stop: int) -> Iterator[_Line]:
    file.seek(start)
    offset = start
    while offset < stop and (raw := _read_line(file, name)):
        yield _Line(raw, offset, len(raw))
        offset += len(raw)


def _read_line(file: BinaryIO | gzip.GzipFile, name: str) -> bytes:
    """Read a line. Raises DataError for one that is too long to be read into memory."""
    raw = file.readline(MAX_LINE_BYTES + 1)
    if len(raw) > MAX_LINE_BYTES:
        raise DataError(
            f"{name} contains a line that is too long",
            given=f"more than {MAX_LINE_BYTES:,} bytes",
            expected="one JSON object per line",
            hint="jq -c '.[]' FILE, which converts a JSON array",
        )
    return raw


def _gzip_lines(file: gzip.GzipFile, name: str, compressed: BinaryIO) -> Iterator[_Line]:
    done = offset = 0
    while raw := _read_line(file, name):
        before, done = done, compressed.tell()
        yield _Line(raw, offset, done - before)
        offset += len(raw)


def _row_chunks(lines: Iterator[_Line], item: FileSlice, options: ReadOptions) -> Iterator[TextChunk]:
    for line in lines:
        options.digest(line.raw)
        if not line.raw.strip():
            continue
        keeps_next = options.bad_rows.keeps_next
        locate = partial(_line_of, item, line) if keeps_next else str  # the former reads the file again
        try:
            row = _row_of(line, item, locate, options.example)
        except ContentError as error:
            options.bad_rows.add(error)
            continue
        yield from _documents(row, options, item.name, locate, line.num_bytes)


def _conversations(content: bytes, item: FileSlice, options: ReadOptions) -> Iterator[TextChunk]:
    options.digest(content)
    kinds = {PairEncoder: pairs, AnswerEncoder: answers}
    rows = list(kinds.get(type(options.encode), conversations)(Path(item.name), content))
    for number, row in enumerate(rows):
        locate = partial("conversation {}".format, number)
        yield from _documents(row, options, item.name, locate, len(content) // len(rows))


def _documents(
    row: Any, options: ReadOptions, name: str, locate: Callable[[], str], num_bytes: int
) -> Iterator[TextChunk]:
    """Yield the chunks of a row's document; none of a bad row that is skipped."""
    try:
        if options.encode is not None:
            found, draw = options.encode(row), options.draw(row_key(row))
            for sample in found if isinstance(found, Pair) else [found]:
                yield TextChunk("", draw, last=True, num_bytes=num_bytes, sample=sample)
                num_bytes = 0
        else:
            yield from _chunk_text(_text_of(row, options.text_key), options, num_bytes)
    except ContentError as error:
        options.bad_rows.add(located(error, name, locate()))


def _row_of(line: _Line, item: FileSlice, locate: Callable[[], str], expected: str) -> Any:
    try:
        return parse_json(line.raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(item.name, line.offset + error.start, error) from error
    except ValueError as error:
        raise ContentError(
            f"{item.name} contains a line that is not JSON",
            given=f"{locate()}: {error}",
            expected=expected,
            hint="correct the line, or remove it",
        ) from error


def _line_of(item: FileSlice, line: _Line) -> str:
    """The number of a line in its file, of which this process may have read only a slice."""
    number, left = 1, line.offset
    with open_regular(Path(item.name)) as source:
        file = gzip.GzipFile(fileobj=source) if item.kind == "jsonl.gz" else source
        while left and (content := file.read(min(CHUNK_BYTES, left))):
            number += content.count(b"\n")
            left -= len(content)
    return f"line {number:,}"


def _text_of(row: Any, text_key: str) -> str:
    def invalid(problem: str, detail: str, expected: str, hint: str) -> ContentError:
        return ContentError(problem, given=detail, expected=expected, hint=hint)

    example = json.dumps({text_key: "..."})
    if not isinstance(row, dict):
        raise invalid("that is not an object", f"a {type(row).__name__}", "an object", example)
    if isinstance(row.get("messages"), list) and not isinstance(row.get(text_key), str):
        expected = f"text under {text_key!r}, for data.kind = 'text'"
        raise invalid("that is a conversation", "'messages'", expected, 'data.kind = "chat"')
    if text_key not in row:
        keys = ", ".join(map(repr, row)) or "no keys"
        hint = f"data.text_key = {unknown_key_hint(text_key, map(str, row))}" if row else example
        raise invalid(f"without {text_key!r}", keys, "text under text_key", hint)
    text = row[text_key]
    if not isinstance(text, str):
        raise invalid(f"whose {text_key!r} is not text", f"a {type(text).__name__}", "text", example)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid("with an unpaired surrogate", error.reason, "text in UTF-8", "leave it out") from error
    return text


def _chunk_text(text: str, options: ReadOptions, num_bytes: int) -> Iterator[TextChunk]:
    """Yield a row's text in chunks. See [Note: chunks]."""
    draw = options.draw(text.encode())
    offset = 0
    while offset < len(text):
        stop = min(offset + CHUNK_BYTES, len(text))
        if stop < len(text):
            stop = text.rfind("\n", offset, stop) + 1 or stop
        yield TextChunk(text[offset:stop], draw, last=stop == len(text), num_bytes=num_bytes)
        offset, num_bytes = stop, 0


@lru_cache(maxsize=4)
def _rows(name: str, fingerprint: str) -> Any:
    """Open a dataset once for all its shards: opening takes a second."""
    rows = open_dataset(name)
    if str(rows._fingerprint) != fingerprint:  # by which `datasets` identifies contents
        raise DataError(
            f"hf:{name} changed while being read",
            given=f"fingerprint {rows._fingerprint}",
            expected=f"{fingerprint}, as at the start",
            hint="the same command, once nothing changes the dataset",
        )
    return rows


def _dataset_chunks(item: FileSlice, options: ReadOptions) -> Iterator[TextChunk]:
    for number, row in (_dataset_rows if item.kind == "hf" else _parquet_rows)(item, options):
        name = f"hf:{item.name}" if item.kind == "hf" else item.name
        found = list(_documents(row, options, name, partial("row {}".format, number), HF_ROW_BYTES))
        if found:
            text = "".join(chunk.text for chunk in found)
            options.digest(row_key(row) if options.encode else text.encode() + b"\0")
        yield from found


def _dataset_rows(item: FileSlice, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    rows = _rows(item.name, item.version)
    if options.encode is None and options.text_key in rows.column_names:
        rows = rows.select_columns([options.text_key])  # other columns need not be read
    for first in range(item.start, item.stop, ROWS_PER_READ):
        columns = rows[first : min(first + ROWS_PER_READ, item.stop)]
        for number, values in enumerate(zip(*columns.values(), strict=True), start=first):
            row = dict(zip(columns, values, strict=True))
            yield number, row if options.encode is None else without_none(row)


def _parquet_rows(item: FileSlice, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    file = open_parquet(item.name)
    has_text = options.encode is None and options.text_key in file.schema_arrow.names
    number = 0
    for group in range(file.num_row_groups):
        first, number = number, number + file.metadata.row_group(group).num_rows
        start, stop = max(item.start, first), min(item.stop, number)
        if start >= stop:
            continue
        table = file.read_row_group(group, columns=[options.text_key] if has_text else None)
        for batch in table.slice(start - first, stop - start).to_batches(max_chunksize=ROWS_PER_READ):
            for row in batch.to_pylist():
                yield start, row if options.encode is None else without_none(row)
                start += 1


def _not_utf8(name: str, offset: int, error: UnicodeDecodeError) -> ContentError:
    return ContentError(
        f"{Path(name)} is not UTF-8",
        given=f"byte {offset} (0x{error.object[error.start]:02x}): {error.reason}",
        expected="text in UTF-8",
        hint=f"iconv -t utf-8 {name}, or leave the file out",
    )
