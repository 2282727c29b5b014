"""Rows and micro-batches have each document once; rows are no more than the textbook's best fit makes, and
micro-batches no larger than their budget."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.packing import Rows, best_fit, rows_of_sources, within_budget
from plait.data.sampler import BLOCK, Int64s, MixedOrder, SampleOrder

LAW = settings(deadline=None, max_examples=60)
ROW_TOKENS = st.integers(1, 70)
SEEDS = st.integers(0, 2**32 - 1)


def drawn(num: int, row_tokens: int, seed: int) -> Int64s:
    return np.random.default_rng(seed).integers(1, row_tokens + 1, num)


def contents(rows: Rows) -> list[list[int]]:
    return [rows[number].tolist() for number in range(len(rows))]


def textbook(lengths: Int64s, row_tokens: int, *, decreasing: bool) -> int:
    """Rows of best fit decreasing, or of first fit, document by document."""
    left: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True) if decreasing else lengths.tolist():
        fitting = [space for space in left if space >= length]
        if fitting:
            chosen = left.index(min(fitting) if decreasing else fitting[0])
            left[chosen] -= length
        else:
            left.append(row_tokens - length)
    return len(left)


@LAW
@given(num=st.integers(1, 90), row_tokens=ROW_TOKENS, seed=SEEDS)
def test_best_fit_has_each_document_once_and_as_many_rows_as_the_textbook(
    num: int, row_tokens: int, seed: int
) -> None:
    lengths = drawn(num, row_tokens, seed)
    rows = contents(best_fit(lengths, row_tokens))
    assert sorted(document for row in rows for document in row) == list(range(num))
    assert max(lengths[row].sum() for row in rows) <= row_tokens
    assert len(rows) == textbook(lengths, row_tokens, decreasing=True)
    assert rows == contents(best_fit(lengths, row_tokens)), "deterministic"
    assert [row[0] for row in rows] == sorted(row[0] for row in rows), "in the order of documents"


def test_best_fit_wastes_less_than_first_fit_and_is_fast_for_a_million_documents() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1, 1_000_000).astype(np.int64) + 1, 2048)
    few = lengths[:1500]
    assert len(best_fit(few, 2048)) <= textbook(few, 2048, decreasing=False)
    start_s = time.process_time()
    rows = best_fit(lengths, 2048)
    assert time.process_time() - start_s < 5, "0.4 s on an idle core"
    assert lengths.sum() / (2048 * len(rows)) > 0.999


@LAW
@given(num=st.integers(1, 90), row_tokens=ROW_TOKENS, more=st.integers(0, 100), seed=SEEDS)
def test_micro_batches_within_a_budget_have_each_document_once(
    num: int, row_tokens: int, more: int, seed: int
) -> None:
    lengths = drawn(num, row_tokens, seed)
    rows = contents(within_budget(lengths, row_tokens + more))
    assert sorted(document for row in rows for document in row) == list(range(num))
    assert max(lengths[row].max() * len(row) for row in rows) <= row_tokens + more


@LAW
@given(num=st.integers(2, 90), row_tokens=ROW_TOKENS, seed=SEEDS, data=st.data())
def test_rows_of_sources_are_apart(num: int, row_tokens: int, seed: int, data: st.DataObject) -> None:
    lengths, border = drawn(num, row_tokens, seed), data.draw(st.integers(1, num - 1))
    rows, stops = rows_of_sources(
        lengths, np.array([border, num]), lambda own: best_fit(own, row_tokens), seed
    )
    of_rows = contents(rows)
    for first, last, of_source in ((0, border, of_rows[: stops[0]]), (border, num, of_rows[stops[0] :])):
        assert sorted(document for row in of_source for document in row) == list(range(first, last))
    assert stops[-1] == len(of_rows)


@LAW
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), first=st.integers(0, 10**12), seed=SEEDS
)
def test_a_mixture_takes_each_source_by_weight_in_its_own_order_from_any_sample_on(
    weights: list[float], first: int, seed: int
) -> None:
    sizes = [700 + 300 * number for number in range(len(weights))]
    stops, shares = np.cumsum(sizes), [weight / sum(weights) for weight in weights]
    order = MixedOrder([SampleOrder(size, seed) for size in sizes], stops, shares)
    count = BLOCK + 50
    found = order.indices(first, count)
    again = MixedOrder([SampleOrder(size, seed) for size in sizes], stops, shares)
    assert again.indices(first + 40, count - 40).tolist() == found[40:].tolist(), "resumed in the midst"
    for number, (size, stop, share) in enumerate(zip(sizes, stops, shares, strict=True)):
        own = found[(found >= stop - size) & (found < stop)] - (stop - size)
        assert abs(len(own) - share * count) <= len(weights), f"source {number}"
        if not first:
            assert own.tolist() == SampleOrder(size, seed).indices(0, len(own)).tolist()


@pytest.mark.parametrize("count", [1, 64, 4096])
def test_epochs_of_sources_are_counted_apart(count: int) -> None:
    order = MixedOrder([SampleOrder(10, 0), SampleOrder(40, 0)], np.array([10, 50]), [0.75, 0.25])
    assert order.epochs(count) == pytest.approx([count * 0.075, count * 0.00625])
