"""Tokenize one shard of text into one part: a file of training tokens, one of validation tokens, a record."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from plait.data.encoder import Encoder, Kind, Sample, TrainOn
from plait.data.index import (
    MAX_UINT16_VOCAB,
    MAX_WEIGHTS,
    Count,
    LengthsFile,
    PartFile,
    Sha256,
    Strict,
    WeightsFile,
    lengths_name,
    weights_name,
)
from plait.data.pairs import AnswerEncoder, PairEncoder
from plait.data.readers import BadRows, ReadOptions, TextChunk, read_chunks
from plait.data.sources import Shard
from plait.data.tokenizer import read_tokenizer
from plait.errors import DataError
from plait.fileio import json_hash, temp_path, write_json

BATCH_BYTES = 1 << 20  # text tokenized at once: some 100 MB of encodings
UNFINISHED = "unfinished"
_TOKEN_BYTES = 4  # of text, about


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


RowEncoder = Encoder | PairEncoder | AnswerEncoder


@dataclass(frozen=True)
class Encoding:
    """How rows of chat and prompts are encoded, as a value that processes exchange."""

    tokenizer: Path
    kind: Kind
    train_on: TrainOn
    train_empty_thinking: bool

    def encoder(self) -> RowEncoder:
        """Load the tokenizer. Raises DataError."""
        return _encoder(self)


@lru_cache(maxsize=1)
def _encoder(encoding: Encoding) -> RowEncoder:
    kinds: dict[str, type[PairEncoder | AnswerEncoder]] = {"preference": PairEncoder, "answer": AnswerEncoder}
    of_answers = kinds.get(encoding.kind)
    encoder = Encoder(
        read_tokenizer(encoding.tokenizer),
        encoding.kind if of_answers is None else "prompt",
        train_on=encoding.train_on,
        train_empty_thinking=encoding.train_empty_thinking,
    )
    return encoder if of_answers is None else of_answers(encoder)


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
    encoding: Encoding | None = None

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        return "uint16" if self.vocab_size <= MAX_UINT16_VOCAB else "uint32"

    def key(self, shard: Shard) -> str:
        """Hash of a part's inputs: the same key and threshold give the same part."""
        split = [self.dtype, self.end_of_document, self.share, self.errors]
        rows = (
            [self.encoding.kind, self.encoding.train_on, self.encoding.train_empty_thinking]
            if self.encoding
            else []
        )
        return json_hash([1, self.tokenizer_sha256, self.text_key, self.seed, *split, asdict(shard), *rows])


class _File:
    """Writer of numbers. The file is renamed into place once it is complete and on disk."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path = path
        self._temporary = temp_path(path)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        self._file = self._temporary.open("wb")
        self.count = 0

    def close(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, numbers: Sequence[int] | NDArray[np.generic]) -> None:
        raw = np.asarray(numbers, dtype=self._dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.count += len(numbers)

    def finish(self, *, keep: bool) -> str:
        """Return the hash of the file, which is removed unless `keep`."""
        if keep:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._temporary.replace(self._path)
        else:
            self._path.unlink(missing_ok=True)
        return self._hash.hexdigest()


class _PartWriter:
    """Writer of a part's tokens in one split; of samples also their weights and lengths."""

    def __init__(self, path: Path, dtype: str, *, has_samples: bool) -> None:
        self._path, self._has_samples = path, has_samples
        self._tokens = _File(path, dtype)
        self._weights = _File(path.with_name(weights_name(path.name)), "uint8")
        self._lengths = _File(path.with_name(lengths_name(path.name)), "int64")
        self._codes = {0.0: 0}
        self.max_token = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._weights, self._lengths):
            file.close()

    def add(self, ids: list[int]) -> None:
        if ids:
            self._tokens.add(ids)
            self.max_token = max(self.max_token, *ids)

    def add_sample(self, sample: Sample) -> None:
        """Raises DataError for too many different weights."""
        self.add(sample.ids)
        values, indices = np.unique(sample.weights, return_inverse=True)
        codes = [self._codes.setdefault(value, len(self._codes)) for value in values.tolist()]
        if len(self._codes) > MAX_WEIGHTS:
            raise DataError(
                "the messages have too many different weights",
                given=f"more than {MAX_WEIGHTS} in one part",
                expected=f"at most {MAX_WEIGHTS}, with 0",
                hint="rounded weights",
            )
        self._weights.add(np.array(codes, dtype=np.uint8)[indices])
        self._lengths.add([len(sample.ids)])

    def finish(self) -> PartFile | None:
        keep = self._tokens.count > 0
        found = self._tokens.finish(keep=keep)
        table, is_plain = list(self._codes), not self._has_samples
        lengths = LengthsFile(
            documents=max(1, self._lengths.count),
            sha256=self._lengths.finish(keep=keep and not is_plain),
        )
        weights = WeightsFile(table=table, sha256=self._weights.finish(keep=keep and not is_plain))
        if not keep:
            return None
        part = PartFile(name=self._path.name, tokens=self._tokens.count, sha256=found)
        return part if is_plain else part.model_copy(update={"weights": weights, "lengths": lengths})


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
    encode = None if settings.encoding is None else settings.encoding.encoder()
    options = ReadOptions(settings.text_key, settings.seed, source_digest.update, skipped, encode)
    chunks = read_chunks(shard, options)
    stem = settings.folder / f"part-{number:05d}"
    documents, lowest, highest = 0, 2**64 - 1, 0
    with (
        _PartWriter(stem.with_suffix(".train.bin"), settings.dtype, has_samples=encode is not None) as train,
        _PartWriter(
            stem.with_suffix(".validation.bin"), settings.dtype, has_samples=encode is not None
        ) as validation,
    ):
        for batch in _batches(chunks):
            texts = [chunk.text for chunk in batch if chunk.sample is None]
            encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            ids: dict[bool, list[int]] = {True: [], False: []}
            for chunk in batch:
                is_validation = chunk.draw < settings.threshold
                if chunk.sample is not None:
                    (validation if is_validation else train).add_sample(chunk.sample)
                    continue
                target = ids[is_validation]
                target += next(encoded).ids
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
        size += len(chunk.text) if chunk.sample is None else _TOKEN_BYTES * len(chunk.sample.ids)
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
    parts = (part for part in (record.train, record.validation) if part is not None)
    for file in (file for part in parts for file in part.files(np.dtype(settings.dtype).itemsize)):
        path = settings.folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            return None
    return record if record.key == settings.key(shard) else None
