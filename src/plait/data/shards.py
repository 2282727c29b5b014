"""Tokenize one shard of text into one part: a file of training tokens, one of validation tokens, a record."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from plait.data.index import MAX_UINT16_VOCAB, Count, PartFile, Sha256, Strict
from plait.data.readers import BadRows, ReadOptions, TextChunk, read_chunks
from plait.data.sources import Shard
from plait.fileio import json_hash, temp_path, write_json

BATCH_BYTES = 1 << 20  # text tokenized at once: some 100 MB of encodings
UNFINISHED = "unfinished"


class PartRecord(Strict):
    """Record of a finished part. `key` hashes its inputs; `lowest` and `highest` are draws."""

    key: Sha256
    threshold: int = Field(ge=0, le=2**64)
    source: Count
    documents: Count
    skipped_rows: Count = 0
    bytes: Count
    lowest: int = Field(ge=0, lt=2**64)
    highest: int = Field(ge=0, lt=2**64)
    max_token: Count
    source_sha256: Sha256
    train: PartFile | None
    validation: PartFile | None


@dataclass(frozen=True)
class BuildSettings:
    """Settings shared by all parts of a build. A document with a draw below `threshold` is for validation.

    `share` is the threshold that the recipe requests; `threshold` differs from it where that would leave one
    of the two splits empty.
    """

    folder: Path
    tokenizer: Path
    tokenizer_sha256: str
    text_key: str
    errors: Literal["raise", "skip"]
    seed: int
    vocab_size: int
    end_of_document: int
    share: int
    threshold: int

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        return "uint16" if self.vocab_size <= MAX_UINT16_VOCAB else "uint32"

    def key(self, shard: Shard) -> str:
        """Hash of a part's inputs: the same key and threshold give the same part."""
        split = [self.dtype, self.end_of_document, self.share, self.errors]
        return json_hash([1, self.tokenizer_sha256, self.text_key, self.seed, *split, asdict(shard)])


class _TokenFile:
    """Writer of token ids. The file is renamed into place once it is complete and on disk."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path = path
        self._temporary = temp_path(path)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        self._file = self._temporary.open("wb")
        self.tokens = 0
        self.max_token = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

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
        self._temporary.replace(self._path)
        return PartFile(name=self._path.name, tokens=self.tokens, sha256=self._hash.hexdigest())


class _SourceDigest:
    """Size and hash of the decompressed source."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()

    def update(self, raw: bytes) -> None:
        self.num_bytes += len(raw)
        self.sha256.update(raw)


def write_part(
    number: int, shard: Shard, settings: BuildSettings, tokenizer: Tokenizer, report: Callable[[int], None]
) -> PartRecord:
    """Tokenize a shard; write its files, then its record. Raises DataError for bad text.

    `report` is called with the number of source bytes done since the last call; if it raises, the work ends.
    """
    source_digest = _SourceDigest()
    skipped = BadRows(settings.errors == "skip")
    chunks = read_chunks(shard, ReadOptions(settings.text_key, settings.seed, source_digest.update, skipped))
    stem = settings.folder / f"part-{number:05d}"
    documents, lowest, highest = 0, 2**64 - 1, 0
    with (
        _TokenFile(stem.with_suffix(".train.bin"), settings.dtype) as train,
        _TokenFile(stem.with_suffix(".validation.bin"), settings.dtype) as validation,
    ):
        for batch in _batches(chunks):
            encoded = tokenizer.encode_batch_fast([chunk.text for chunk in batch], add_special_tokens=False)
            ids: dict[bool, list[int]] = {True: [], False: []}
            for chunk, encoding in zip(batch, encoded, strict=True):
                target = ids[chunk.draw < settings.threshold]
                target += encoding.ids
                if chunk.last:
                    target.append(settings.end_of_document)
            validation.add(ids[True])
            train.add(ids[False])
            draws = [chunk.draw for chunk in batch]
            lowest, highest = min(lowest, *draws), max(highest, *draws)
            documents += sum(chunk.last for chunk in batch)
            report(sum(chunk.num_bytes for chunk in batch))
        record_path(settings.folder, number).unlink(missing_ok=True)  # it describes the previous files
        record = PartRecord(
            key=settings.key(shard),
            threshold=settings.threshold,
            source=shard.source,
            documents=documents,
            skipped_rows=skipped.number,
            bytes=source_digest.num_bytes,
            lowest=lowest,
            highest=highest,
            max_token=max(train.max_token, validation.max_token),
            source_sha256=source_digest.sha256.hexdigest(),
            train=train.finish(),
            validation=validation.finish(),
        )
    write_json(record_path(settings.folder, number), record.model_dump(mode="json"))
    return record


def _batches(chunks: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def record_path(folder: Path, number: int) -> Path:
    return folder / UNFINISHED / f"part-{number:05d}.json"


def finished_part(number: int, shard: Shard, settings: BuildSettings) -> PartRecord | None:
    """Record of a part that an earlier build with the same key finished; None if its files are incomplete."""
    try:
        record = PartRecord.model_validate_json(record_path(settings.folder, number).read_bytes())
    except (OSError, ValidationError):
        return None
    for file in (record.train, record.validation):
        if file is not None:
            path, num_bytes = settings.folder / file.name, file.tokens * np.dtype(settings.dtype).itemsize
            if not path.is_file() or path.stat().st_size != num_bytes:
                return None
    return record if record.key == settings.key(shard) else None
