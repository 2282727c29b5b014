"""Distribution of documents over rows and micro-batches: pure functions of the documents' lengths.

[Note: rows once for all epochs]
Documents are distributed over rows when a run starts, in memory. The rows are then samples like others:
epochs shuffle them, and a row's number is enough to find it, from any step on and on any number of ranks.
If each epoch distributed its shuffled documents again, it would have another number of rows, and a resumed
run would first have to repeat this for all epochs before its step. Documents of a row do not see each other,
so little depends on which ones share it; those of one length are taken in the order in which they are given,
which the caller shuffles.

[Note: best fit]
Best fit decreasing: the longest document first, each into the row with the least space that suffices, or else
into a new one. This takes at most 11/9 of the fewest rows possible, and a few more (Johnson et al. 1974).
Rows are kept by the space that is left in them, and documents of one length are placed together: a row that
is the best for one stays the best for the next ones until they no longer fit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from plait.data.sampler import Int64s, Permutation


@dataclass(frozen=True)
class Rows:
    """The documents of each row: those of row i are `documents[stops[i - 1] : stops[i]]`."""

    documents: Int64s
    stops: Int64s

    @classmethod
    def of_documents(cls, row_of: Int64s) -> "Rows":
        """Rows by the row of each document, in the order of their first documents."""
        _, first, row_of, sizes = np.unique(
            row_of, return_index=True, return_inverse=True, return_counts=True
        )
        in_order = np.argsort(first)
        number = np.empty_like(in_order)
        number[in_order] = np.arange(len(in_order))
        documents = np.argsort(number[row_of], kind="stable")
        return cls(documents, np.cumsum(sizes[in_order]))

    def __len__(self) -> int:
        return len(self.stops)

    def __getitem__(self, row: int) -> Int64s:
        """The row's documents. Raises IndexError."""
        stop = self.stops[row]
        return self.documents[self.stops[row - 1] if row else 0 : stop]


def best_fit(lengths: Int64s, row_tokens: int) -> Rows:
    """Distribute documents of at most `row_tokens` tokens over rows of so many. See [Note: best fit]."""
    row_of, num_rows = np.empty_like(lengths), 0
    by_space: dict[int, list[Int64s]] = {}
    with_space = 0  # bit i: some rows have space for i more tokens

    def keep(rows: Int64s, left: int) -> None:
        nonlocal with_space
        if left and len(rows):
            by_space.setdefault(left, []).append(rows)
            with_space |= 1 << left

    for length, documents in _by_length(lengths):
        while len(documents):
            if fitting := with_space >> length:
                left = length + (fitting & -fitting).bit_length() - 1
                rows = np.concatenate(by_space.pop(left))
                with_space ^= 1 << left
            else:
                left, added = row_tokens, -(-len(documents) // (row_tokens // length))
                rows = np.arange(num_rows, num_rows + added)
                num_rows += added
            each = left // length
            placed = min(len(documents), each * len(rows))
            row_of[documents[:placed]] = np.repeat(rows[: -(-placed // each)], each)[:placed]
            full, more = divmod(placed, each)
            keep(rows[:full], left - each * length)
            keep(rows[full : full + bool(more)], left - more * length)
            keep(rows[full + bool(more) :], left)
            documents = documents[placed:]
    return Rows.of_documents(row_of)


def within_budget(lengths: Int64s, budget: int) -> Rows:
    """Distribute documents of at most `budget` tokens over micro-batches of at most `budget` tokens, when all
    documents of one are padded to the longest. Those of similar length share one."""
    row_of, num_rows = np.empty_like(lengths), 0
    order = np.argsort(-lengths, kind="stable")
    longest = lengths[order].tolist()
    first = 0
    while first < len(order):
        size = budget // longest[first]
        row_of[order[first : first + size]] = num_rows
        first, num_rows = first + size, num_rows + 1
    return Rows.of_documents(row_of)


def rows_of_sources(
    lengths: Int64s, stops: Int64s, pack: Callable[[Int64s], Rows], seed: int | None
) -> tuple[Rows, Int64s]:
    """Distribute the documents of each source, whose samples end at `stops`, over rows of their own. Return
    them and where each source's rows end. `seed`: of the order of documents; None: as they are."""
    documents, sizes, of_sources, first = [], [], [], 0
    for stop in stops.tolist():
        order = np.arange(first, stop)
        if seed is not None and len(order):
            order = first + Permutation(len(order), seed=seed, epoch=0)(order - first)
        rows = pack(lengths[order])
        documents.append(order[rows.documents])
        sizes.append(np.diff(rows.stops, prepend=0))
        of_sources.append(len(rows))
        first = stop
    return Rows(np.concatenate(documents), np.cumsum(np.concatenate(sizes))), np.cumsum(of_sources)


def _by_length(lengths: Int64s) -> Iterator[tuple[int, Int64s]]:
    """The documents of each length, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    found, firsts = np.unique(-lengths[order], return_index=True)
    yield from zip((-found).tolist(), np.split(order, firsts[1:]), strict=True)
