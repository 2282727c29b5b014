"""A shard as documents, streamed in pieces. No text file is whole in memory, however large; a JSON line or a
dataset's row is.

[Note: pieces]  A text file is read in pieces of about a megabyte that end at line ends (or, in a line
longer than that, anywhere between two characters). A piece is tokenized for itself. Byte-level BPE never
joins a word across a line end; it may tokenize a run of blank lines at a cut in two instead of one. The
text that comes back is the same to the byte.

[Note: draw]  Whether a document is for validation is decided by its draw: 64 bits of a hash of the seed
and its text (a file's: its first piece). So the split does not depend on paths, on order or on how many
processes read, and a document that occurs twice is never on both sides.
"""

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from plait.data.sources import HF_ROW_BYTES, Shard, Slice, dataset_fingerprint, open_dataset
from plait.errors import DataError, unknown_key_hint

PIECE_BYTES = 1 << 20
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some text of one document; `last` ends it. `num_bytes` is how much of the source was read for it."""

    text: str
    draw: int
    last: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TextStream:
    """How to read: the recipe's key and seed, and what takes every byte of the source (a hash's update)."""

    text_key: str
    seed: int
    digest: Callable[[bytes], None]

    def draw(self, content: bytes) -> int:
        """See [Note: draw]. In [0, 2**64)."""
        key = self.seed.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "little")


def read_pieces(shard: Shard, how: TextStream) -> Iterator[TextPiece]:
    """The shard's documents in order, in pieces; empty ones are left out. Raises DataError with the place."""
    for item in shard.slices:
        read = _dataset_pieces if item.kind == "hf" else _file_pieces
        yield from read(item, how)


def _file_pieces(item: Slice, how: TextStream) -> Iterator[TextPiece]:
    try:
        if item.kind == "jsonl.gz":
            with Path(item.name).open("rb") as packed, gzip.GzipFile(fileobj=packed) as file:
                yield from _row_pieces(_packed_lines(file, packed), item, how)
            return
        with Path(item.name).open("rb") as file:
            begin = _line_start(file, item.start, item.size)
            end = _line_start(file, item.stop, item.size)
            if item.kind == "jsonl":
                yield from _row_pieces(_lines(file, begin, end), item, how)
            else:
                yield from _text_pieces(file, begin, end, item, how)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{item.name} is not a whole gzip file", given=error) from error
    except OSError as error:
        raise DataError(f"cannot read {item.name}", given=error.strerror or error) from error


def _line_start(file: BinaryIO, place: int, size: int) -> int:
    """The first byte at or after `place` that begins a line; `size` when none does."""
    if place == 0 or place >= size:
        return min(place, size)
    file.seek(place - 1)
    while (line := file.readline(PIECE_BYTES)) and not line.endswith(b"\n"):
        pass
    return file.tell()


def _text_pieces(file: BinaryIO, begin: int, end: int, item: Slice, how: TextStream) -> Iterator[TextPiece]:
    file.seek(0)
    draw = how.draw(_read_piece(file, item.size, item))
    file.seek(begin)
    ends_file = item.stop == item.size
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = begin
    while place < end:
        raw = _read_piece(file, end - place, item)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(raw, final=place + len(raw) >= end)
        except UnicodeDecodeError as error:
            raise _not_utf8(item.name, place - pending + error.start, error) from error
        place += len(raw)
        how.digest(raw)
        yield TextPiece(text, draw, last=place >= end and ends_file, num_bytes=len(raw))
    if begin >= end and ends_file and item.size:
        # The file's last line began in a slice before this one, which left the end to the last slice.
        yield TextPiece("", draw, last=True, num_bytes=0)


def _read_piece(file: BinaryIO, limit: int, item: Slice) -> bytes:
    """At most `limit` bytes: a piece, up to a line's end."""
    raw = file.read(min(PIECE_BYTES, limit))
    if not raw and limit:
        raise DataError(f"{item.name} has changed while it was read", expected=f"{item.size} bytes")
    if len(raw) < limit and not raw.endswith(b"\n"):
        raw += file.readline(min(PIECE_BYTES, limit - len(raw)))
    return raw


@dataclass(frozen=True, slots=True)
class _Line:
    raw: bytes
    place: str  # for letters
    offset: int
    num_bytes: int


def _lines(file: BinaryIO, begin: int, end: int) -> Iterator[_Line]:
    file.seek(begin)
    place = begin
    while place < end and (raw := file.readline()):
        yield _Line(raw, f"the line at byte {place}", place, len(raw))
        place += len(raw)


def _packed_lines(file: gzip.GzipFile, packed: BinaryIO) -> Iterator[_Line]:
    done = offset = 0
    for number, raw in enumerate(file, start=1):
        before, done = done, packed.tell()
        yield _Line(raw, f"line {number}", offset, done - before)
        offset += len(raw)


def _row_pieces(lines: Iterator[_Line], item: Slice, how: TextStream) -> Iterator[TextPiece]:
    for line in lines:
        how.digest(line.raw)
        if not line.raw.strip():
            continue
        try:
            row = json.loads(line.raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(item.name, line.offset + error.start, error) from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{item.name} holds a line that is no JSON", given=f"{line.place}: {error}"
            ) from error
        text = _text_of(row, item.name, line.place, how.text_key)
        yield from _cut_text(text, how, line.num_bytes)


def _text_of(row: Any, name: str, place: str, text_key: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{name} holds a row that is no object", given=f"{place}: a {type(row).__name__}")
    if text_key not in row:
        raise DataError(
            f"{name} holds a row without {text_key!r}",
            given=f"{place}: {', '.join(map(repr, row)) or 'no keys'}",
            expected="text under text_key",
            hint=f"data.text_key = {unknown_key_hint(text_key, map(str, row))}" if row else None,
        )
    text = row[text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{name} holds a row whose {text_key!r} is no text", given=f"{place}: a {type(text).__name__}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} holds a row with half of a surrogate pair", given=f"{place}: {error.reason}"
        ) from error
    return text


def _cut_text(text: str, how: TextStream, num_bytes: int) -> Iterator[TextPiece]:
    """A row's text in pieces; see [Note: pieces]."""
    draw = how.draw(text.encode())
    place = 0
    while place < len(text):
        stop = min(place + PIECE_BYTES, len(text))
        if stop < len(text):
            stop = text.rfind("\n", place, stop) + 1 or stop
        yield TextPiece(text[place:stop], draw, last=stop == len(text), num_bytes=num_bytes)
        place, num_bytes = stop, 0


@lru_cache(maxsize=4)
def _rows(name: str, fingerprint: str) -> Any:
    """One opening for all shards of a dataset: by name it takes a second."""
    rows = open_dataset(name)
    if dataset_fingerprint(rows) != fingerprint:
        raise DataError(f"hf:{name} has changed while it was read")
    return rows


def _dataset_pieces(item: Slice, how: TextStream) -> Iterator[TextPiece]:
    rows = _rows(item.name, item.version)
    if how.text_key in rows.column_names:
        rows = rows.select_columns([how.text_key])  # the others need not be read
    for first in range(item.start, item.stop, ROWS_AT_ONCE):
        columns = rows[first : min(first + ROWS_AT_ONCE, item.stop)]
        for number, values in enumerate(zip(*columns.values(), strict=True), start=first):
            row = dict(zip(columns, values, strict=True))
            text = _text_of(row, f"hf:{item.name}", f"row {number}", how.text_key)
            how.digest(text.encode() + b"\0")
            yield from _cut_text(text, how, HF_ROW_BYTES)


def _not_utf8(name: str, place: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{Path(name)} is not UTF-8",
        given=f"byte {place} (0x{error.object[error.start]:02x}): {error.reason}",
        expected="text in UTF-8",
        hint=f"iconv -t utf-8 {name}, or leave the file out",
    )
