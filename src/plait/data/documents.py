"""Samples that know where documents begin: one document each, of unequal length, or rows of several.

[Note: targets]
A token with weight 0 is no target: its label is -100. If a stream has other weights than 0 and 1, samples
have `loss_weights` too, which are divided like labels. Labels are masked by position and never by token, as
the token that pads may also end documents.

[Note: padding]
Samples are padded on the right. In causal attention no position depends on later ones, so padding changes no
output at a sample's own positions; the attention mask is for models that need it. Labels are -100 at padding,
which losses ignore.

[Note: finding documents]
Token files contain documents one after the other, each with its end token. If this token is a special one,
the tokenizer never produces it from text; an ordinary one may also occur inside documents. The index records
the number of documents, so the end tokens are counted before a run.

[Note: packed documents]
A row of packed documents is a window of the stream, so no position holds padding. Its position ids start
again after each end token, which is what separates documents in attention: see engine/inputs.py. They start
at the number that the model gives to a row's first token. The first token of a document is no target, as
nothing of its document precedes it. A document that continues in the next window starts again there, with
that window's first token.

[Note: bins]
A row of complete documents, which data/packing.py chooses, with position ids as above. What is left of the
row is padding, numbered as a document of its own, so that no attention mask is needed. A document of more
than `sequence` tokens is truncated, or split into samples that overlap by one token, so that each token but
the document's first is predicted once, as in windows.

[Note: samples without targets]
An evaluation reads each sample once. Where there is none left for a rank, it reads one without targets,
number `len(samples)`, so that all ranks take part in every collective.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from plait.data.dataset import TokenStore, TokenStream
from plait.data.loader import Batch, Windows
from plait.data.packing import Rows
from plait.data.sampler import Int64s
from plait.errors import DataError
from plait.models import IGNORED_LABEL
from plait.models.task import LOSS_WEIGHTS

Ids = Tensor | Sequence[int]


@dataclass(frozen=True)
class PaddingCollator:
    """Stack samples of token ids: see [Note: padding]. Also the `collate_fn` of a torch DataLoader.

    pad_token    any id in the vocabulary
    multiple_of  the padded length is a multiple of this, e.g. 8 for matrix products on a GPU
    max_length   longer samples are truncated, and the padded length is at most this
    """

    pad_token: int = 0
    multiple_of: int = 1
    max_length: int | None = None

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return {"input_ids", "attention_mask", "labels"}: (samples, padded length) int64.

        A sample is its token ids, or a dict of `input_ids` and `labels` (with -100 at positions without a
        target, e.g. of a prompt). By default the labels are the ids: the loss shifts them. If samples have
        `loss_weights`, so has the batch: float32, by default 1. A sample may also be a pair of such dicts,
        chosen and rejected, which become two rows.
        """
        answers = [each for sample in samples for each in (sample if _is_pair(sample) else (sample,))]
        rows: list[Mapping[str, Any]] = [
            answer if isinstance(answer, Mapping) else {"input_ids": answer} for answer in answers
        ]
        ids = [self._row(row["input_ids"]) for row in rows]
        labels = [self._row(row.get("labels", row["input_ids"])) for row in rows]
        if different := [(len(i), len(j)) for i, j in zip(ids, labels, strict=True) if len(i) != len(j)]:
            raise DataError(
                "a sample's labels do not fit its tokens",
                given="{} tokens and {} labels".format(*different[0]),
                expected="a label for each token, -100 where it is not a target",
                hint="no labels, if all tokens are targets",
            )
        longest = max(len(row) for row in ids)
        width = -(-longest // self.multiple_of) * self.multiple_of
        width = width if self.max_length is None else min(width, self.max_length)
        batch = {
            "input_ids": _stack(ids, width, self.pad_token),
            "attention_mask": _stack([torch.ones_like(row) for row in ids], width, 0),
            "labels": _stack(labels, width, IGNORED_LABEL),
        }
        if any(LOSS_WEIGHTS in row for row in rows):
            weights = [torch.as_tensor(row.get(LOSS_WEIGHTS, [1.0] * len(row["input_ids"]))) for row in rows]
            batch[LOSS_WEIGHTS] = _stack([row.float()[: self.max_length] for row in weights], width, 0)
        return batch

    def _row(self, ids: Ids) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.long)[: self.max_length]


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple) and all(isinstance(each, Mapping) for each in sample)


def _stack(rows: Sequence[Tensor], width: int, value: int) -> Tensor:
    return torch.stack([pad(row, (0, width - len(row)), value=value) for row in rows])


class Documents:
    """The documents of a stream, with their end tokens; those that are longer than the collator's
    `max_length` are truncated, or `split`: see [Note: bins].

    lengths  number of tokens of each sample
    facts    what became of the documents, in words
    """

    documents_per_sample = 1.0

    def __init__(
        self, stream: TokenStream, end_of_document: int, collator: PaddingCollator, *, split: bool = False
    ) -> None:
        """Reads the stream once. See [Note: finding documents]."""
        assert collator.max_length is not None, "samples of documents have a maximum length"
        self.name = f"{stream.name} documents"
        self.collator = collator
        self._stream, longest = stream, collator.max_length
        starts = stream.starts_of_documents(end_of_document)
        stops = np.append(starts[1:], stream.num_tokens)[: len(starts)]
        complete = stops - starts
        samples_of = np.where(complete > longest, -(-(complete - 1) // (longest - 1)), 1) if split else 1
        document = np.repeat(np.arange(len(starts)), samples_of)
        number = np.arange(len(document)) - np.searchsorted(document, document)  # of its document's samples
        self._starts = starts[document] + number * (longest - 1)
        self.lengths = np.minimum(stops[document] - self._starts, longest)
        num_long, lost = int((complete > longest).sum()), int((complete - longest).clip(min=0).sum())
        how = "split" if split else f"truncated by {lost:,} of {int(complete.sum()):,} tokens"
        if not split and (untrained := self._num_untrained(np.flatnonzero(complete > longest))):
            how += f" ({untrained:,} without a trained token left)"
        self.facts = f"{len(starts):,}" + (f", of which {num_long:,} {how}" if num_long else "")

    def _num_untrained(self, truncated: Int64s) -> int:
        """Number of these samples that have no target. Raises DataError if no sample has one."""
        weights = (
            self._stream.weights(int(self._starts[i]) + 1, int(self.lengths[i]) - 1) for i in truncated
        )
        found = sum(1 for of_sample in weights if of_sample is not None and not of_sample.any())
        if found and found == len(self):
            raise DataError(
                f"no sample of the {self._stream.name} data has a trained token",
                given=f"{found:,} documents, truncated to {self.collator.max_length:,} tokens",
                expected="a trained token among the first ones of a document",
                hint='a longer data.sequence, or data.long_documents = "split"',
            )
        return found

    def __len__(self) -> int:
        return len(self.lengths)

    def first_after(self, tokens: Int64s) -> Int64s:
        """The first sample that starts at each of these tokens of the stream, or later."""
        return np.searchsorted(self._starts, tokens)

    def span(self, index: int) -> slice:
        """The tokens of the stream that a sample has."""
        return slice(int(self._starts[index]), int(self._starts[index] + self.lengths[index]))

    def read(self, index: int) -> dict[str, Tensor]:
        """{"input_ids", "labels"}: (length,) int64, and `loss_weights` if there are some: see
        [Note: targets]."""
        own = int(self._starts[index]), int(self.lengths[index])
        ids, weights = torch.from_numpy(self._stream.read(*own)), self._stream.weights(*own)
        if weights is None:
            return {"input_ids": ids, "labels": ids}
        sample = {"input_ids": ids, "labels": ids.masked_fill(torch.from_numpy(weights == 0), IGNORED_LABEL)}
        return sample | ({LOSS_WEIGHTS: torch.from_numpy(weights)} if self._stream.is_weighted else {})

    def without_targets(self, length: int) -> dict[str, Tensor]:
        """A sample of padding, with the same entries."""
        sample = {
            "input_ids": torch.full((length,), self.collator.pad_token),
            "labels": torch.full((length,), IGNORED_LABEL),
        }
        return sample | ({LOSS_WEIGHTS: torch.zeros(length)} if self._stream.is_weighted else {})

    def batch(self, indices: Int64s) -> Batch:
        """The documents with these indices, padded: see `PaddingCollator`."""
        return self.collator([self.read(index) for index in indices.tolist()])


class Bins:
    """Rows of complete documents: see [Note: bins]. Number `len(self)` is padding: see
    [Note: samples without targets]."""

    def __init__(self, documents: Documents, rows: Rows, sequence: int, first_position: int = 0) -> None:
        self.name = documents.name.replace("documents", f"rows of {sequence} tokens")
        self._documents, self._rows = documents, rows
        self._sequence, self._first = sequence, first_position
        self.facts = _filled(documents, f"{len(rows):,} rows", len(rows) * sequence)
        self.documents_per_sample = len(documents) / len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Int64s) -> Batch:
        """{"input_ids", "labels", "position_ids"}: (b, S) int64, and `loss_weights` if there are some."""
        rows = [self._row(index) for index in indices.tolist()]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def _row(self, index: int) -> dict[str, Tensor]:
        documents = (
            [] if index == len(self) else [self._documents.read(i) for i in self._rows[index].tolist()]
        )
        left = self._sequence - sum(len(document["input_ids"]) for document in documents)
        parts = [*documents, self._documents.without_targets(left)]
        row = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        positions = self._first + torch.cat([torch.arange(len(part["labels"])) for part in parts])
        labels = row["labels"].masked_fill(positions == self._first, IGNORED_LABEL)
        return row | {"labels": labels, "position_ids": positions}


class MicroBatches:
    """Micro-batches of documents, padded, as samples. Number `len(self)` is padding: see
    [Note: samples without targets].

    lengths   of each one's longest document
    """

    def __init__(self, documents: Documents, rows: Rows) -> None:
        self.name = documents.name.replace("documents", "micro-batches")
        self._documents, self._rows = documents, rows
        firsts = np.append(0, rows.stops[:-1])[: len(rows)]
        self.lengths = np.maximum.reduceat(documents.lengths[rows.documents], firsts)
        positions = int((self.lengths * np.diff(rows.stops, prepend=0)).sum())
        self.facts = _filled(documents, f"{len(rows):,} micro-batches", positions)
        self.documents_per_sample = len(documents) / len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Int64s) -> Batch:
        """The documents of these micro-batches, padded: see `PaddingCollator`."""
        documents = self._documents
        is_left = indices < len(self)
        samples = [documents.read(i) for index in indices[is_left] for i in self._rows[index].tolist()]
        return documents.collator(samples or [documents.without_targets(2)])


def _filled(documents: Documents, where: str, positions: int) -> str:
    return f"{documents.facts}; in {where}, {documents.lengths.sum() / positions:.2%} filled"


class Pairs:
    """The pairs of a stream: see [Note: files of pairs] in pairs.py. Number `len(self)` is padding: see
    [Note: samples without targets].

    lengths  of each pair's longer row
    """

    documents_per_sample = 2.0

    def __init__(self, documents: Documents) -> None:
        self.name = documents.name.replace("documents", "pairs")
        self._documents = documents
        self.lengths = documents.lengths.reshape(-1, 2).max(1)
        self.facts = f"{documents.facts}; {len(self):,} pairs"

    def __len__(self) -> int:
        return len(self.lengths)

    def first_after(self, tokens: Int64s) -> Int64s:
        """See `Documents.first_after`."""
        return self._documents.first_after(tokens) // 2

    def span(self, index: int, answer: int) -> slice:
        """The tokens of the stream that a row has; of padding none."""
        return self._documents.span(2 * index + answer) if index < len(self) else slice(0, 0)

    def batch(self, indices: Int64s) -> Batch:
        """Two rows for each pair, chosen and rejected, padded: see `PaddingCollator`."""
        documents = self._documents
        rows = [
            documents.read(2 * index + answer) if index < len(self) else documents.without_targets(2)
            for index in indices.tolist()
            for answer in (0, 1)
        ]
        return documents.collator(rows)


class Answers:
    """The single answers of a stream, each with another prompt's: see `OtherAnswers`. Number `len(self)` is
    padding: see [Note: samples without targets].

    lengths  of each answer's own row
    """

    documents_per_sample = 1.0

    def __init__(self, documents: Documents) -> None:
        """Raises DataError unless there are two prompts."""
        self.name = documents.name.replace("documents", "answers")
        self._documents, self.lengths, self.facts = documents, documents.lengths, documents.facts
        self._others = OtherAnswers(documents.read, len(documents), self.name)

    def __len__(self) -> int:
        return len(self.lengths)

    def first_after(self, tokens: Int64s) -> Int64s:
        """See `Documents.first_after`."""
        return self._documents.first_after(tokens)

    def batch(self, indices: Int64s) -> Batch:
        """Two rows for each answer: its prompt with it, and with the other one. Padded: see
        `PaddingCollator`."""
        padding = [self._documents.without_targets(2)] * 2
        rows = [padding if index == len(self) else self._others.rows(index) for index in indices.tolist()]
        return self._documents.collator([row for of_answer in rows for row in of_answer])


class OtherAnswers:
    """Rows of an answer with another prompt: see preferences.py [Note: answers of other prompts]. It is the
    answer of the next document with another prompt, after the last one from the first on."""

    def __init__(self, read: Callable[[int], Mapping[str, Any]], number: int, name: str) -> None:
        """`read`: a document, its `input_ids`, `labels` and other entries (length,). Raises DataError unless
        two of them have different prompts."""
        self._read, self._number = read, number
        first = _prompt(read(0)) if number else []
        if all(_prompt(read(index)) == first for index in range(1, number)):
            raise DataError(
                "single answers are compared with those of other prompts",
                given=f"{number} {name}, of one prompt",
                expected="answers of at least two prompts, also in the validation split",
                hint="more rows, or another data.validation",
            )

    def rows(self, index: int) -> list[Any]:
        """Return the document, and its prompt with the other answer."""
        own = self._read(index)
        prompt, at = _prompt(own), (index + 1) % self._number
        while _prompt(other := self._read(at)) == prompt:
            at = (at + 1) % self._number
        answer = len(_prompt(other))
        parts = {name: (own[name][: len(prompt)], other[name][answer:]) for name in own.keys() & other.keys()}
        return [own, {name: torch.cat([*map(torch.as_tensor, both)]) for name, both in parts.items()}]


def _prompt(document: Mapping[str, Any]) -> list[int]:
    """The tokens before the first one with a target."""
    is_target = torch.as_tensor(document["labels"]) != IGNORED_LABEL
    length = int(is_target.int().argmax()) if is_target.any() else len(is_target)
    return torch.as_tensor(document["input_ids"][:length]).tolist()


class PackedDocuments:
    """Windows of a stream as rows of separate documents: see [Note: packed documents]."""

    facts, documents_per_sample = "", 1.0

    def __init__(self, windows: Windows, end_of_document: int, first_position: int = 0) -> None:
        self.name = windows.name
        self._windows = windows
        self._end, self._first = end_of_document, first_position

    def __len__(self) -> int:
        return len(self._windows)

    def first_after(self, tokens: Int64s) -> Int64s:
        """See `Windows.first_after`."""
        return self._windows.first_after(tokens)

    def batch(self, indices: Int64s) -> Batch:
        """{"input_ids", "labels", "position_ids"}: (b, S) int64."""
        ids_BS = self._windows.batch(indices)["input_ids"]
        begins_BS = pad(ids_BS[:, :-1] == self._end, (1, 0))
        columns_S = torch.arange(ids_BS.shape[1])
        positions_BS = self._first + columns_S - torch.where(begins_BS, columns_S, 0).cummax(1).values
        labels_BS = ids_BS.masked_fill(begins_BS, IGNORED_LABEL)
        return {"input_ids": ids_BS, "labels": labels_BS, "position_ids": positions_BS}


def check_documents(store: TokenStore) -> None:
    """Raise DataError if end tokens occur inside documents. See [Note: finding documents]."""
    end = store.index.end_of_document
    found = sum(len(stream.starts_of_documents(end)) for stream in (store.train, store.validation))
    built = sum(source.documents for source in store.index.sources)
    if found != built:
        raise DataError(
            "the token that ends documents also occurs inside documents",
            given=f"token {end} {found:,} times, in {built:,} documents",
            expected="a token that no text contains",
            hint="another tokenizer.end_of_document, and a new data.dir",
        )
