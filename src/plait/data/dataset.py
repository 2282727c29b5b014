"""A checked directory of tokens, as two streams."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.data import tokenizer as tokenizers
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.index import TOKENIZER, DatasetSpec, Index, lengths_name, read_index, weights_name
from plait.errors import DataError, unreadable
from plait.fileio import open_regular, regular_file_bytes

HASH_THREADS = 8
SCAN_TOKENS = 1 << 20


class TokenStream:
    """Tokens of one split: part files, memory-mapped and concatenated.

    Pickles as names and sizes: another process maps the files itself.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[Path, int]],
        dtype: str,
        tables: Sequence[tuple[float, ...] | None] = (),
        documents: Sequence[int] = (),
    ) -> None:
        """`files`: paths and numbers of tokens; `tables`: of their weights; `documents`: numbers of stored
        lengths, if they are. Truncating a mapped file kills the processes that read it."""
        self.name = name
        self.files = tuple(files)
        self._dtype, self._tables, self._documents = dtype, tuple(tables), tuple(documents)
        counts = np.array([count for _, count in self.files], dtype=np.int64)
        self._stops = np.cumsum(counts)
        self._parts = [_memory_map(path, count, dtype) for path, count in self.files]
        self._codes = [
            None if table is None else _memory_map(path.with_name(weights_name(path.name)), count, "uint8")
            for (path, count), table in zip(self.files, tables, strict=bool(tables))
        ]
        self.num_tokens = int(counts.sum())

    @property
    def is_weighted(self) -> bool:
        """True if some token has another weight than 0 and 1."""
        return any(not {*(table or ())} <= {0, 1} for table in self._tables)

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[object, ...]]:
        return TokenStream, (self.name, self.files, self._dtype, self._tables, self._documents)

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Token ids from `start` on, (length,) int64."""
        return self.read_windows(np.array([start], dtype=np.int64), length)[0]

    def read_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Token ids, (len(starts), length) int64: row i is tokens [starts[i], starts[i] + length)."""
        windows = np.empty((len(starts), length), dtype=np.int64)
        if windows.size == 0:
            return windows
        assert starts.min() >= 0, f"window starts at {starts.min()}"
        assert starts.max() + length <= self.num_tokens, f"window beyond the last of {self.num_tokens} tokens"
        part_indices = np.searchsorted(self._stops, starts, side="right").tolist()
        ends = self._stops.tolist()
        for window, part_index, start in zip(windows, part_indices, starts.tolist(), strict=True):
            part = self._parts[part_index]
            offset = start - ends[part_index] + len(part)
            if offset + length <= len(part):
                window[:] = part[offset : offset + length]
            else:
                self._read_across(window, part_index, offset)
        return windows

    def positions(self, token: int) -> NDArray[np.int64]:
        """Positions of a token, in order. Reads the entire stream, about a gigabyte a second."""
        found = [np.empty(0, dtype=np.int64)]
        for part, stop in zip(self._parts, self._stops.tolist(), strict=True):
            for begin in range(0, len(part), SCAN_TOKENS):
                inside = np.flatnonzero(part[begin : begin + SCAN_TOKENS] == token)
                found.append(inside + (stop - len(part) + begin))
        return np.concatenate(found)

    def weights(self, start: int, length: int) -> NDArray[np.float32] | None:
        """Weights of the tokens from `start` on, as targets, (length,) float32. 0: no target. None: all
        tokens of the stream are targets with weight 1."""
        if not any(self._tables):
            return None
        assert 0 <= start <= start + length <= self.num_tokens, f"weights of [{start}, {start + length})"
        found = np.ones(length, dtype=np.float32)
        for table, codes, stop in zip(self._tables, self._codes, self._stops.tolist(), strict=True):
            if table is None or codes is None:
                continue
            begin = stop - len(codes)  # of the part
            low, high = max(start, begin), min(start + length, stop)
            if low < high:
                weights = np.array(table, dtype=np.float32)[codes[low - begin : high - begin]]
                found[low - start : high - start] = weights
        return found

    def starts_of_documents(self, end_of_document: int) -> NDArray[np.int64]:
        """Positions of the documents' first tokens: from their stored lengths, or else after each end token.
        See [Note: finding documents] in documents.py."""
        stops = self.positions(end_of_document) + 1 if not self._documents else np.cumsum(self._lengths())
        return np.concatenate([np.zeros(1, dtype=np.int64), stops])[: len(stops)]

    def _lengths(self) -> NDArray[np.int64]:
        names = [path.with_name(lengths_name(path.name)) for path, _ in self.files]
        return np.concatenate([np.fromfile(name, dtype="<i8") for name in names]).astype(np.int64)

    def _read_across(self, window: NDArray[np.int64], part_index: int, offset: int) -> None:
        filled = 0
        while filled < len(window):
            chunk = self._parts[part_index][offset : offset + len(window) - filled]
            window[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            part_index, offset = part_index + 1, 0


def _memory_map(path: Path, count: int, dtype: str) -> NDArray[np.generic]:
    little_endian = np.dtype(dtype).newbyteorder("<")
    # A plain array over the map: slicing np.memmap itself costs a microsecond more each time.
    return np.memmap(path, dtype=little_endian, mode="r", shape=(count,)).view(np.ndarray)


@dataclass(frozen=True)
class TokenStore:
    """A checked directory of tokens.

    `digest` (hex) identifies the tokens, their order and the tokenizer; checkpoints contain it.
    """

    dir: Path
    index: Index
    train: TokenStream
    validation: TokenStream
    digest: str

    @property
    def tokenizer_dir(self) -> Path:
        return self.dir / TOKENIZER

    def stops_of_sources(self) -> NDArray[np.int64]:
        """The ends of each source's training tokens. Parts are in the order of sources, whose tokens the
        index has for both splits together."""
        counts: dict[int, NDArray[np.int64]] = {}
        for column, parts in ((0, self.index.train), (1, self.index.validation)):
            for part in parts:
                number = int(part.name.removeprefix("part-").partition(".")[0])
                counts.setdefault(number, np.zeros(2, dtype=np.int64))[column] = part.tokens
        stops = np.cumsum([counts[number] for number in sorted(counts)], axis=0)
        of_both = np.cumsum([source.tokens for source in self.index.sources])
        return stops[np.searchsorted(stops.sum(axis=1), of_both), 0]

    def check_model(self, *, vocab_size: int, max_sequence: int | None, sequence: int) -> None:
        """Check that a model can train on these tokens. Raises DataError: ids or sequences too large."""
        if self.index.max_token >= vocab_size:
            raise DataError(
                f"the tokens in {self.dir} do not fit the model's vocabulary",
                given=f"token ids up to {self.index.max_token}, model with vocab_size={vocab_size}",
                expected=f"vocab_size of at least {self.index.max_token + 1}",
                hint=f"vocab_size={self.index.vocab_size}, the tokenizer's",
            )
        check_sequence(sequence, max_sequence)


def check_sequence(sequence: int, longest: int | None) -> None:
    """Check the sequence length. Raises DataError if it exceeds the model's positions."""
    if longest is not None and sequence > longest:
        raise DataError(
            "the sequence is longer than the model allows",
            given=f"data.sequence = {sequence}, model with {longest} positions",
            expected=f"at most {longest}",
            hint=f"data.sequence = {longest}, or a model with more positions (max_position_embeddings)",
        )


def open_store(
    data: DataConfig, tokenizer: TokenizerConfig | None = None, *, verify: bool | None = None
) -> TokenStore:
    """Open and check a directory that `build` wrote. `verify` (data.verify) reads every byte once to hash it.

    Raises DataError: missing or truncated files, another hash, another tokenizer, another recipe.
    """
    index = read_index(data.dir)
    if tokenizer is not None:
        _check_spec(data.dir, index.spec, DatasetSpec.from_config(data, tokenizer))
    _check_tokenizer(data.dir, index)
    parts = [*index.train, *index.validation]
    files = [file for part in parts for file in part.files(index.item_bytes)]
    for file in files:
        _check_size(data.dir / file.name, file.num_bytes)
    if data.verify if verify is None else verify:
        # Hashing releases the GIL, so disk or cores are the limit. The first error cancels the others.
        with ThreadPoolExecutor(min(HASH_THREADS, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(lambda file: _check_hash(data.dir / file.name, file.sha256), files))
    train, validation = (
        TokenStream(
            name,
            [(data.dir / part.name, part.tokens) for part in parts],
            index.dtype,
            [None if part.weights is None else tuple(part.weights.table) for part in parts],
            [part.lengths.documents for part in parts if part.lengths],
        )
        for name, parts in (("training", index.train), ("validation", index.validation))
    )
    return TokenStore(data.dir, index, train, validation, index.digest())


def _rebuild_hint(folder: Path) -> str:
    return f"remove {folder} and build the tokens again"


def _check_spec(folder: Path, built: DatasetSpec, wanted: DatasetSpec) -> None:
    for key, built_value in built.model_dump().items():
        wanted_value = getattr(wanted, key)
        if built_value == wanted_value:
            continue
        difference = "with another tokenizer" if key == "tokenizer" else f"with other {key}"
        raise DataError(
            f"the tokens in {folder} were built {difference}",
            given=f"{key} = {_short(built_value)}",
            expected=f"{key} = {_short(wanted_value)}, from the recipe",
            hint=f"another dir, or {_rebuild_hint(folder)}",
        )


def _short(value: object) -> str:
    return f"{str(value)[:200]}{' ..' if len(str(value)) > 200 else ''}"


def _check_tokenizer(folder: Path, index: Index) -> None:
    found = tokenizers.file_hashes(folder / TOKENIZER)
    if found == index.tokenizer_files:
        return
    changed = sorted({name for name, _ in found.items() ^ index.tokenizer_files.items()})
    raise DataError(
        f"the tokens in {folder} were built with another tokenizer",
        given=f"{folder / TOKENIZER}: {', '.join(changed)} {'differs' if found else 'missing'}",
        expected="the tokenizer that the tokens were built with",
        hint=f"restore it, or {_rebuild_hint(folder)}",
    )


def _check_size(path: Path, expected: int) -> None:
    try:
        size = regular_file_bytes(path)
    except OSError as error:
        raise _unusable(
            path, "is missing", error.strerror, f"{expected} bytes, as listed in the index"
        ) from error
    if size is None:
        given = "a link, a directory or a device"
        raise _unusable(path, "is not a regular file", given, f"a file of {expected} bytes")
    if size != expected:
        problem = "is truncated" if size < expected else "is too long"
        raise _unusable(path, problem, f"{size} bytes", f"{expected} bytes")


def _check_hash(path: Path, expected: str) -> None:
    try:
        with open_regular(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
    if found != expected:
        raise _unusable(path, "is damaged", f"sha256 {found}", f"sha256 {expected}")


def _unusable(path: Path, problem: str, given: object, expected: str) -> DataError:
    return DataError(
        f"the token file {path} {problem}", given=given, expected=expected, hint=_rebuild_hint(path.parent)
    )
