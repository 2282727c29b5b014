"""One shard of text -> one part: a file of training tokens, one of validation tokens, and a record."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from plait.data.index import (
    MAX_UINT16_VOCAB,
    Count,
    PartFile,
    Sha256,
    Strict,
    json_hash,
)
from plait.data.readers import TextPiece, TextStream, read_pieces
from plait.data.sources import Shard
from plait.fileio import temp_path, write_json

BATCH_BYTES = 1 << 20  # of text, tokenized at once: some 100 MB of encodings
UNFINISHED = "unfinished"


class PartRecord(Strict):
    """What is known of a finished part. `key` says of what it was made; `lowest` and `highest` are draws."""

    key: Sha256
    threshold: int = Field(ge=0, le=2**64)
    source: Count
    documents: Count
    bytes: Count
    lowest: int = Field(ge=0, lt=2**64)
    highest: int = Field(ge=0, lt=2**64)
    max_token: Count
    source_sha256: Sha256
    train: PartFile | None
    validation: PartFile | None


@dataclass(frozen=True)
class Setting:
    """What all parts of a build share. A document whose draw is under `threshold` is for validation.

    `share` is the threshold that the recipe asks for; `threshold` differs from it where that would leave
    one of the two splits empty.
    """

    folder: Path
    tokenizer: Path
    tokenizer_sha256: str
    text_key: str
    seed: int
    vocab_size: int
    end_of_document: int
    share: int
    threshold: int

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        return "uint16" if self.vocab_size <= MAX_UINT16_VOCAB else "uint32"

    def key(self, shard: Shard) -> str:
        """A part made under the same key and threshold is the same part."""
        facts = [
            self.tokenizer_sha256,
            self.text_key,
            self.seed,
            self.dtype,
            self.end_of_document,
            self.share,
        ]
        return json_hash([1, *facts, asdict(shard)])


class _TokenFile:
    """Token ids on their way into a file. It gets its name when it is whole and on disk."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path = path
        self._fresh = temp_path(path)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        self._file = self._fresh.open("wb")
        self.tokens = 0
        self.max_token = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._fresh.unlink(missing_ok=True)

    def add(self, ids: list[int]) -> None:
        if not ids:
            return
        array = np.array(ids, dtype=self._dtype)
        raw = array.tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.tokens += len(ids)
        self.max_token = max(self.max_token, int(array.max()))

    def finish(self) -> PartFile | None:
        if not self.tokens:
            self._path.unlink(missing_ok=True)
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._fresh.replace(self._path)
        return PartFile(name=self._path.name, tokens=self.tokens, sha256=self._hash.hexdigest())


class _Content:
    """What was read of the source, unpacked: its size and its hash."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()

    def take(self, raw: bytes) -> None:
        self.num_bytes += len(raw)
        self.sha256.update(raw)


def write_part(
    number: int, shard: Shard, setting: Setting, tokenizer: Tokenizer, report: Callable[[int], None]
) -> PartRecord:
    """Tokenizes a shard, puts its files and then its record in place. Raises DataError for bad text.

    `report` is called with bytes of the source as they are done; what it raises ends the work.
    """
    content = _Content()
    pieces = read_pieces(shard, TextStream(setting.text_key, setting.seed, content.take))
    stem = setting.folder / f"part-{number:05d}"
    documents = 0
    draws: set[int] = set()
    with (
        _TokenFile(stem.with_suffix(".train.bin"), setting.dtype) as train,
        _TokenFile(stem.with_suffix(".validation.bin"), setting.dtype) as validation,
    ):
        for batch in _batches(pieces):
            encoded = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            ids: dict[bool, list[int]] = {True: [], False: []}
            for piece, encoding in zip(batch, encoded, strict=True):
                target = ids[piece.draw < setting.threshold]
                target += encoding.ids
                if piece.last:
                    target.append(setting.end_of_document)
            validation.add(ids[True])
            train.add(ids[False])
            draws = _extremes(draws, batch)
            documents += sum(piece.last for piece in batch)
            report(sum(piece.num_bytes for piece in batch))
        record_path(setting.folder, number).unlink(missing_ok=True)  # of other files than these
        record = PartRecord(
            key=setting.key(shard),
            threshold=setting.threshold,
            source=shard.source,
            documents=documents,
            bytes=content.num_bytes,
            lowest=min(draws, default=2**64 - 1),
            highest=max(draws, default=0),
            max_token=max(train.max_token, validation.max_token),
            source_sha256=content.sha256.hexdigest(),
            train=train.finish(),
            validation=validation.finish(),
        )
    write_json(record_path(setting.folder, number), record.model_dump(mode="json"))
    return record


def _extremes(draws: set[int], batch: list[TextPiece]) -> set[int]:
    draws = draws | {piece.draw for piece in batch}
    return {min(draws), max(draws)}


def _batches(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def record_path(folder: Path, number: int) -> Path:
    return folder / UNFINISHED / f"part-{number:05d}.json"


def finished_part(number: int, shard: Shard, setting: Setting) -> PartRecord | None:
    """The record of a part that an earlier build of the same finished, if its files are whole."""
    try:
        record = PartRecord.model_validate_json(record_path(setting.folder, number).read_bytes())
    except (OSError, ValidationError):
        return None
    item_bytes = np.dtype(setting.dtype).itemsize
    files: list[Any] = [file for file in (record.train, record.validation) if file is not None]
    for file in files:
        path = setting.folder / file.name
        if not path.is_file() or path.stat().st_size != file.tokens * item_bytes:
            return None
    return record if record.key == setting.key(shard) else None
