"""Samples of a split, in an order and in batches, as a torch DataLoader with no state except the step."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from plait.data.dataset import TokenStream
from plait.data.sampler import BatchSizes, Int64s, Order
from plait.data.workers import init_loader_worker, worker_context
from plait.errors import DataError
from plait.plan.grid import share

PREFETCH = 4  # batches per worker; a batch is a few hundred kilobytes

Batch = dict[str, Tensor]


class Samples(Protocol):
    """The samples of one split: `Windows`, or those of documents.py. Pickled for each worker process.

    name    of the samples in messages, e.g. "training sequences of 9 tokens"
    facts   what became of the documents, in words; "" if samples are windows
    documents_per_sample  mean number of separate documents in a sample; 1 for windows, also of documents
    """

    name: str
    facts: str
    documents_per_sample: float

    def __len__(self) -> int: ...

    def batch(self, indices: Int64s) -> Batch:
        """The samples with these indices in [0, len), stacked."""


class Windows:
    """Samples of `sequence` tokens, taken from a stream regardless of documents.

    Sample i covers tokens [i * (S - 1), i * (S - 1) + S): each token is predicted once an epoch, except for
    the stream's first and up to S - 2 at its end that fill no window.
    """

    facts, documents_per_sample = "", 1.0

    def __init__(self, stream: TokenStream, sequence: int) -> None:
        """Raises DataError if the stream is too short."""
        self.name = f"{stream.name} sequences of {sequence} tokens"
        self._stream = stream
        self._sequence = sequence
        if not len(self):
            raise DataError(
                f"the {stream.name} tokens are fewer than one sequence",
                given=f"{stream.num_tokens} tokens for sequence={sequence}",
                expected=f"at least {sequence} tokens",
                hint="a shorter sequence, more text"
                + (", or a larger validation share" if stream.name == "validation" else ""),
            )

    def __len__(self) -> int:
        """Number of windows, each starting with the last token of the previous one."""
        return max(0, (self._stream.num_tokens - 1) // (self._sequence - 1))

    def first_after(self, tokens: Int64s) -> Int64s:
        """The first window that starts at each of these tokens of the stream, or later."""
        return np.minimum(-(-tokens // (self._sequence - 1)), len(self))

    def batch(self, indices: Int64s) -> Batch:
        """{"input_ids", "labels"}: (b, S) int64, the same tensor twice: the loss shifts the labels."""
        tokens = torch.from_numpy(self._stream.read_windows(indices * (self._sequence - 1), self._sequence))
        return {"input_ids": tokens, "labels": tokens}


class Batches(Dataset[Batch | list[Batch]]):
    """This data rank's share of each batch: item `number` is that of batch `number`.

    Rank r of R takes the r-th of R equal runs of a batch's samples. An item is all of the share in one,
    or with `micro` a list of that many micro-batches, each collated separately.
    """

    def __init__(
        self,
        samples: Samples,
        order: Order,
        sizes: BatchSizes,
        *,
        data_rank: int = 0,
        data_ranks: int = 1,
        micro: int | None = None,
    ) -> None:
        assert 0 <= data_rank < data_ranks, f"data rank {data_rank} of {data_ranks}"
        self._samples = samples
        self._order = order
        self._sizes = sizes
        self._data_rank = data_rank
        self._data_ranks = data_ranks
        self._micro = micro

    def __getitem__(self, number: int) -> Batch | list[Batch]:
        indices = self.all_indices(number)[self.own(number)]
        if self._micro is None:
            return self._samples.batch(indices)
        return [self._samples.batch(part) for part in indices.reshape(self._micro, -1)]

    def all_indices(self, number: int) -> Int64s:
        """Indices of the batch's samples, of all data ranks."""
        return self._order.indices(*self._sizes.span(number))

    def own(self, number: int) -> slice:
        """This data rank's part of them."""
        _, size = self._sizes.span(number)
        assert not size % self._data_ranks, f"batch of {size} over {self._data_ranks} data ranks"
        return share(size, self._data_rank, self._data_ranks)


def check_samples(samples: Samples, batch: int) -> None:
    """Check the number of samples. Raises DataError for fewer than one batch."""
    if len(samples) < batch:
        split, _, what = samples.name.partition(" ")
        other = ", a larger data.validation or run.evaluate_every=0" if split == "validation" else ""
        fewer = f"batch={len(samples)} or less, " if len(samples) else ""
        raise DataError(
            f"the {split} samples are fewer than one batch",
            given=f"{len(samples)} {what} for batch={batch}",
            expected=f"at least {batch} {what.split()[0]}",
            hint=f"{fewer}more text{other}",
        )


def loader(
    batches: Batches, numbers: range, *, workers: int = 0, pin_memory: bool = False
) -> "DataLoader[Batch | list[Batch]]":
    """DataLoader of the items of `batches` with these numbers, from 0 on.

    `workers` processes read ahead; 0 reads in this process.
    """
    return DataLoader(
        batches,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        multiprocessing_context=worker_context(workers) if workers else None,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=init_loader_worker if workers else None,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),  # its own: leaves torch's global RNG untouched
    )
