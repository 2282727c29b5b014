"""The order of samples is a pure function of (seed, epoch, sample number)."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.sampler import BLOCK, BatchRamp, BatchSizes, Permutation, SampleOrder

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10**6)
LAW = settings(deadline=None, max_examples=60)  # shared cores: a time limit would only be noise


@LAW
@given(n=st.integers(1, 5000), seed=SEEDS, epoch=EPOCHS)
def test_every_place_comes_once(n: int, seed: int, epoch: int) -> None:
    places = Permutation(n, seed=seed, epoch=epoch)(np.arange(n))
    assert np.array_equal(np.sort(places), np.arange(n))


@LAW
@given(n=st.integers(2**20, 2**61), seed=SEEDS, first=st.integers(0, 2**20 - 64))
def test_large_domains_stay_inside_and_do_not_collide(n: int, seed: int, first: int) -> None:
    places = Permutation(n, seed=seed, epoch=0)(np.arange(first, first + 64))
    assert places.min() >= 0
    assert places.max() < n
    assert len(set(places.tolist())) == 64


@LAW
@given(n=st.integers(1, 10**9), seed=SEEDS, epoch=EPOCHS, size=st.integers(1, 50))
def test_a_place_does_not_depend_on_which_others_are_asked_for(
    n: int, seed: int, epoch: int, size: int
) -> None:
    permutation = Permutation(n, seed=seed, epoch=epoch)
    numbers = np.linspace(0, n - 1, size).astype(np.int64)
    assert permutation(numbers).tolist() == [int(permutation(number)) for number in numbers]


@LAW
@given(n=st.integers(20, 5000), seed=SEEDS, epoch=EPOCHS)
def test_epochs_and_seeds_differ(n: int, seed: int, epoch: int) -> None:
    numbers = np.arange(n)
    here = Permutation(n, seed=seed, epoch=epoch)(numbers)
    assert not np.array_equal(here, Permutation(n, seed=seed, epoch=epoch + 1)(numbers))
    assert not np.array_equal(here, Permutation(n, seed=(seed + 1) % 2**63, epoch=epoch)(numbers))
    assert not np.array_equal(here, numbers)


def test_all_orders_of_four_occur_about_equally_often() -> None:
    draws = 4800
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for seed in range(draws):
        counts[tuple(Permutation(4, seed=seed, epoch=0)(np.arange(4)).tolist())] += 1
    expected = draws / len(counts)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 60  # 23 degrees of freedom: beyond 60 once in 30,000 fair draws


def test_neighbours_are_sent_apart_without_correlation() -> None:
    n = 100_003
    places = Permutation(n, seed=7, epoch=3)(np.arange(n))
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(places, np.arange(n))[0, 1]) < 0.02


def test_the_order_of_a_seed_never_changes() -> None:
    """Golden: a checkpoint's place in the data means something only as long as this holds."""
    assert Permutation(10, seed=0, epoch=0)(np.arange(10)).tolist() == [6, 2, 7, 5, 3, 1, 4, 0, 9, 8]


@LAW
@given(
    n=st.integers(50, 3 * BLOCK),
    seed=SEEDS,
    first=st.integers(0, 10 * BLOCK),
    count=st.integers(0, 2 * BLOCK),
)
def test_samples_roll_over_into_the_next_epochs_permutation(
    n: int, seed: int, first: int, count: int
) -> None:
    order = SampleOrder(n, seed)
    order.indices(5, 1)  # what was asked before must not matter
    numbers = np.arange(first, first + count)
    expected = np.empty(count, dtype=np.int64)
    for epoch in np.unique(numbers // n):
        of_epoch = numbers // n == epoch
        expected[of_epoch] = Permutation(n, seed=seed, epoch=int(epoch))(numbers[of_epoch] % n)
    assert np.array_equal(order.indices(first, count), expected)


@LAW
@given(n=st.integers(1, 1000), first=st.integers(0, 5000), count=st.integers(0, 300))
def test_sequential_order_is_the_text_again_and_again(n: int, first: int, count: int) -> None:
    places = SampleOrder(n, 0, "sequential").indices(first, count)
    assert places.tolist() == [number % n for number in range(first, first + count)]


@LAW
@given(
    n=st.integers(10, 3000),
    seed=SEEDS,
    share=st.integers(1, 8),
    resumed_at=st.integers(0, 40),
    ranks_before=st.sampled_from([1, 2, 4]),
    ranks_after=st.sampled_from([1, 2, 4]),
)
def test_global_batches_are_the_same_on_any_ranks_and_after_a_resume(
    n: int, seed: int, share: int, resumed_at: int, ranks_before: int, ranks_after: int
) -> None:
    batch = 4 * share

    def steps(first: int, last: int, ranks: int) -> list[list[int]]:
        orders = [SampleOrder(n, seed) for _ in range(ranks)]  # each rank has its own
        b = batch // ranks
        return [
            [
                place
                for rank, order in enumerate(orders)
                for place in order.indices(step * batch + rank * b, b).tolist()
            ]
            for step in range(first, last)
        ]

    uninterrupted = steps(0, 50, 1)
    assert steps(0, resumed_at, ranks_before) + steps(resumed_at, 50, ranks_after) == uninterrupted


@LAW
@given(
    start=st.integers(1, 20),
    step=st.integers(1, 20),
    increments=st.integers(1, 30),
    tokens=st.integers(1, 10**5),
    sequence=st.integers(2, 300),
)
def test_a_ramp_is_what_counting_one_batch_after_the_other_gives(
    start: int, step: int, increments: int, tokens: int, sequence: int
) -> None:
    """Each batch has an increment for each full share of the ramp's tokens that were read before it."""
    full = start + increments * step
    sizes = BatchSizes(full, BatchRamp(start, step, tokens, sequence))
    read = 0
    for batch in range(200):
        share = min(increments, read * sequence * increments // tokens)
        assert sizes.span(batch) == (read, start + share * step)
        read += start + share * step
    last = 10**7
    assert sizes.span(last)[1] == full
    assert sizes.span(last + 1)[0] - sizes.span(last)[0] == full
