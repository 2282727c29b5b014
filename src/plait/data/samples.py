"""The samples of a recipe's [data], and their order."""

import numpy as np

from plait.data.config import DataConfig
from plait.data.dataset import TokenStore, TokenStream
from plait.data.documents import (
    Answers,
    Bins,
    Documents,
    MicroBatches,
    PackedDocuments,
    PaddingCollator,
    Pairs,
)
from plait.data.loader import Samples, Windows, check_samples
from plait.data.packing import Rows, best_fit, rows_of_sources, within_budget
from plait.data.sampler import Int64s, LengthGroups, MixedOrder, OneEpoch, Order, SampleOrder
from plait.errors import DataError


class SampleSource:
    """Makes the samples of a recipe. `first_position`: the number that the model gives to a row's first
    token; `batch`: samples of a step."""

    def __init__(
        self, data: DataConfig, store: TokenStore, *, batch: int, seed: int, first_position: int
    ) -> None:
        self._data, self._store = data, store
        self._batch, self._seed, self._first = batch, seed, first_position

    def training(self) -> tuple[Samples, Order]:
        """The training samples and their order. Raises DataError for fewer than a batch, or none of a source
        that has a weight."""
        weights = self._data.weights
        if weights is None:
            samples, _ = self._samples(self._store.train, None)
            check_samples(samples, self._batch)
            return samples, self._grouped(samples, self._order(len(samples)))
        samples, stops = self._samples(self._store.train, self._store.stops_of_sources())
        check_samples(samples, self._batch)
        orders = [self._order(count) for count in np.diff(stops, prepend=0).tolist()]
        shares = [weight / sum(weights) for weight in weights]
        return samples, self._grouped(samples, MixedOrder(orders, stops, shares))

    def validation(self) -> tuple[Samples, Order]:
        """The validation samples and their order, without weights of sources. Bins, micro-batches
        and pairs are read once. Raises DataError if there are too few."""
        samples, _ = self._samples(self._store.validation, None)
        order = self._order(len(samples))
        if isinstance(samples, Bins | MicroBatches | Pairs | Answers):
            return samples, OneEpoch(order, len(samples))
        check_samples(samples, self._batch)
        return samples, self._grouped(samples, order)

    def _order(self, num_samples: int) -> SampleOrder:
        return SampleOrder(num_samples, self._seed, self._data.order)

    def _grouped(self, samples: Samples, order: SampleOrder | MixedOrder) -> Order:
        if not self._data.group_by_length:
            return order
        assert isinstance(samples, Documents | MicroBatches | Pairs | Answers), (
            "samples of one length are not grouped"
        )
        window = min(self._data.group_by_length, len(samples) // self._batch)  # an epoch at most
        return LengthGroups(order, samples.lengths, self._batch, window)

    def _samples(self, stream: TokenStream, sources: Int64s | None) -> tuple[Samples, Int64s]:
        """The samples, and where those of each source stop. `sources`: stops of their tokens, if they are to
        be apart."""
        data, end = self._data, self._store.index.end_of_document
        if data.samples in ("windows", "packed"):
            windows = Windows(stream, data.sequence)
            packed = data.samples == "packed"
            samples = PackedDocuments(windows, end, self._first) if packed else windows
            return samples, self._stops(samples, sources)
        collator = PaddingCollator(end, data.pad_to_multiple_of, data.sequence)
        documents = Documents(stream, end, collator, split=data.long_documents == "split")
        check_samples(documents, 1)
        if data.kind in ("preference", "answer"):
            pairs = (Answers if data.kind == "answer" else Pairs)(documents)
            return pairs, self._stops(pairs, sources)
        stops = self._stops(documents, sources)
        if data.samples == "documents" and data.tokens_per_micro_batch is None:
            return documents, stops
        seed = self._seed if data.order == "random" else None
        rows, stops = rows_of_sources(documents.lengths, stops, self._rows, seed)
        if data.samples == "bins":
            return Bins(documents, rows, data.sequence, self._first), stops
        return MicroBatches(documents, rows), stops

    def _rows(self, lengths: Int64s) -> Rows:
        data = self._data
        if data.tokens_per_micro_batch is None:
            return best_fit(lengths, data.sequence)
        padded = -(-lengths // data.pad_to_multiple_of) * data.pad_to_multiple_of
        return within_budget(np.minimum(padded, data.sequence), data.tokens_per_micro_batch)

    def _stops(
        self, samples: Windows | PackedDocuments | Documents | Pairs | Answers, sources: Int64s | None
    ) -> Int64s:
        if sources is None:
            return np.array([len(samples)])
        stops = samples.first_after(sources)
        for name, count in zip(self._data.sources, np.diff(stops, prepend=0).tolist(), strict=True):
            if not count:
                raise DataError(
                    "a source with a weight has no training samples",
                    given=f"{name}: 0 {samples.name.partition(' ')[2]}",
                    expected="at least one sample of each source",
                    hint="a shorter data.sequence, more text in it, or data.sources without it",
                )
        return stops
