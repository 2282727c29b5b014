"""Samples that are one document each, of unequal length.

[Note: finding documents]
Token files contain documents one after the other, each with its end token. If this token is a special one,
the tokenizer never produces it from text; an ordinary one may also occur inside documents. The index records
the number of documents, so the end tokens are counted before a run.
"""

import numpy as np
import torch

from plait.data.collator import PaddingCollator
from plait.data.dataset import TokenStore, TokenStream
from plait.data.loader import Batch
from plait.data.sampler import Int64s
from plait.errors import DataError


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
