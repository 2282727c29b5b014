"""Samples that know where documents begin: one document each, of unequal length, or rows of several.

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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from plait.data.dataset import TokenStore, TokenStream
from plait.data.loader import Batch, Windows
from plait.data.sampler import Int64s
from plait.errors import DataError
from plait.models import IGNORED_LABEL

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

    def __call__(self, samples: Sequence[Ids | Mapping[str, Ids]]) -> dict[str, Tensor]:
        """Return {"input_ids", "attention_mask", "labels"}: (samples, padded length) int64.

        A sample is its token ids, or a dict of `input_ids` and `labels` (with -100 at positions without a
        target, e.g. of a prompt). By default the labels are the ids: the loss shifts them.
        """
        rows = [sample if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
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
        return {
            "input_ids": _stack(ids, width, self.pad_token),
            "attention_mask": _stack([torch.ones_like(row) for row in ids], width, 0),
            "labels": _stack(labels, width, IGNORED_LABEL),
        }

    def _row(self, ids: Ids) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.long)[: self.max_length]


def _stack(rows: Sequence[Tensor], width: int, value: int) -> Tensor:
    return torch.stack([pad(row, (0, width - len(row)), value=value) for row in rows])


class Documents:
    """The documents of a stream, with their end tokens, truncated to the collator's `max_length`.

    lengths  number of tokens of each sample, after truncation
    """

    def __init__(self, stream: TokenStream, end_of_document: int, collator: PaddingCollator) -> None:
        """Reads the stream once. See [Note: finding documents]."""
        assert collator.max_length is not None, "samples of documents have a maximum length"
        self.name = f"{stream.name} documents"
        self._stream = stream
        self._collator = collator
        stops = stream.positions(end_of_document) + 1
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1]])[: len(stops)]
        self.lengths = np.minimum(stops - self._starts, collator.max_length)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Int64s) -> Batch:
        """The documents with these indices, padded: see `PaddingCollator`."""
        rows = zip(self._starts[indices].tolist(), self.lengths[indices].tolist(), strict=True)
        return self._collator([torch.from_numpy(self._stream.read(*row)) for row in rows])


class PackedDocuments:
    """Windows of a stream as rows of separate documents: see [Note: packed documents]."""

    def __init__(self, windows: Windows, end_of_document: int, first_position: int = 0) -> None:
        self.name = windows.name
        self._windows = windows
        self._end, self._first = end_of_document, first_position

    def __len__(self) -> int:
        return len(self._windows)

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
    found = sum(len(stream.positions(end)) for stream in (store.train, store.validation))
    built = sum(source.documents for source in store.index.sources)
    if found != built:
        raise DataError(
            "the token that ends documents also occurs inside documents",
            given=f"token {end} {found:,} times, in {built:,} documents",
            expected="a token that no text contains",
            hint="another tokenizer.end_of_document, and a new data.dir",
        )
