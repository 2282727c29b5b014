"""A loader gives each rank its share of each step: the same global batches on any number of ranks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.errors import DataError, PlanError
from plait.train.data import TokenStream, check_batch, loader

S = 9


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    """1001 tokens that count up, in two parts: 125 samples of 9."""
    np.arange(300, dtype="<u2").tofile(tmp_path / "a")
    np.arange(300, 1001, dtype="<u2").tofile(tmp_path / "b")
    return TokenStream("training", [(tmp_path / "a", 300), (tmp_path / "b", 701)], "uint16")


def steps(
    stream: TokenStream, *, rank: int = 0, ranks: int = 1, last_step: int = 40, **changes: object
) -> list[Tensor]:
    return [
        batch["input_ids"]
        for batch in batches(stream, rank=rank, ranks=ranks, last_step=last_step, **changes)
    ]


def batches(stream: TokenStream, *, rank: int, ranks: int, **changes: object) -> Iterator[dict[str, Tensor]]:
    values = {"sequence": S, "global_batch": 8, "seed": 5, **changes}
    return iter(loader(stream, data_rank=rank, data_ranks=ranks, **values))


def test_batches_are_int64_with_labels_equal_to_inputs(stream: TokenStream) -> None:
    batch = next(batches(stream, rank=1, ranks=2, last_step=1))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].shape == (4, S)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_sequential_samples_share_one_token_so_each_is_predicted_once(stream: TokenStream) -> None:
    rows = torch.cat(steps(stream, order="sequential", last_step=15))
    assert rows[:, 1:].flatten().tolist() == list(range(1, 961))
    assert rows[1:, 0].tolist() == rows[:-1, -1].tolist()


def test_an_epoch_in_random_order_has_each_sample_once_and_the_next_another_order(
    stream: TokenStream,
) -> None:
    rows = torch.cat(steps(stream, global_batch=25, last_step=10))
    starts = rows[:, 0].tolist()
    every = [number * (S - 1) for number in range(125)]
    assert sorted(starts[:125]) == sorted(starts[125:]) == every
    assert starts[:125] != starts[125:] != every
    assert (rows.diff(dim=1) == 1).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_any_number_of_ranks_make_the_same_global_batch(stream: TokenStream, ranks: int) -> None:
    shares = [steps(stream, rank=rank, ranks=ranks) for rank in range(ranks)]
    joined = [torch.cat(share) for share in zip(*shares, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(joined, steps(stream), strict=True))


def test_resuming_on_other_ranks_goes_on_where_it_was(stream: TokenStream) -> None:
    before = [
        torch.cat(pair)
        for pair in zip(*(steps(stream, rank=r, ranks=2, last_step=17) for r in range(2)), strict=True)
    ]
    after = [
        torch.cat(four)
        for four in zip(*(steps(stream, rank=r, ranks=4, first_step=17) for r in range(4)), strict=True)
    ]
    assert all(torch.equal(*pair) for pair in zip(before + after, steps(stream), strict=True))


def test_workers_give_the_same_batches_in_order_and_leave_torchs_generator_alone(stream: TokenStream) -> None:
    state = torch.get_rng_state()
    with_workers = steps(stream, workers=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(with_workers, steps(stream), strict=True))


def test_a_batch_that_does_not_divide_is_a_letter(stream: TokenStream) -> None:
    with pytest.raises(PlanError, match="cannot be dealt evenly") as error:
        steps(stream, ranks=3)
    assert error.value.hint == "batch=9"


def test_a_stream_shorter_than_one_sequence_or_one_batch_is_a_letter(stream: TokenStream) -> None:
    check_batch(stream, sequence=1001, global_batch=1, data_ranks=1)
    with pytest.raises(DataError, match="training tokens are fewer than one sequence"):
        check_batch(stream, sequence=1002, global_batch=1, data_ranks=1)
    with pytest.raises(DataError, match="training tokens are fewer than one batch") as error:
        check_batch(stream, sequence=S, global_batch=126, data_ranks=1)
    assert error.value.given == "125 sequences of 9 tokens for batch=126"
