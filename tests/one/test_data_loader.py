"""A loader gives each rank its share of each step: the same global batches on any number of ranks."""

import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.data.dataset import TokenStream
from plait.data.loader import Batches, Windows, check_samples, loader
from plait.data.sampler import BatchRamp, BatchSizes, SampleOrder
from plait.data.workers import worker_context
from plait.errors import DataError

S = 9


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    """1001 tokens that count up, in two parts: 125 samples of 9."""
    np.arange(300, dtype="<u2").tofile(tmp_path / "a")
    np.arange(300, 1001, dtype="<u2").tofile(tmp_path / "b")
    return TokenStream("training", [(tmp_path / "a", 300), (tmp_path / "b", 701)], "uint16")


def steps(
    stream: TokenStream, *, rank: int = 0, ranks: int = 1, last_step: int = 40, **changes: Any
) -> list[Tensor]:
    return [
        batch["input_ids"]
        for batch in batches(stream, rank=rank, ranks=ranks, last_step=last_step, **changes)
    ]


def batches(
    stream: TokenStream,
    *,
    rank: int,
    ranks: int,
    last_step: int,
    first_step: int = 0,
    workers: int = 0,
    **changes: Any,
) -> Iterator[dict[str, Tensor]]:
    sequence, sizes = changes.get("sequence", S), changes.get("sizes", BatchSizes(8))
    windows = Windows(stream, sequence)
    order = SampleOrder(len(windows), 5, changes.get("order", "random"))
    shares = Batches(windows, order, sizes, data_rank=rank, data_ranks=ranks)
    return iter(loader(shares, range(first_step, last_step), workers=workers))


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
    rows = torch.cat(steps(stream, sizes=BatchSizes(25), last_step=10))
    starts = rows[:, 0].tolist()
    every = [number * (S - 1) for number in range(125)]
    assert sorted(starts[:125]) == sorted(starts[125:]) == every
    assert starts[:125] != starts[125:] != every
    assert (rows.diff(dim=1) == 1).all()


def test_samples_over_all_ranks_are_the_same_when_their_number_changes_between_steps(
    stream: TokenStream,
) -> None:
    """None lost, none doubled: dp=1, then 2, then 4, then 1, each from the step where the last one ended."""
    undisturbed = torch.cat(steps(stream, last_step=40))[:, 0].tolist()
    found = []
    for ranks, first, last in ((1, 0, 7), (2, 7, 16), (4, 16, 31), (1, 31, 40)):
        shares = [
            steps(stream, rank=rank, ranks=ranks, first_step=first, last_step=last) for rank in range(ranks)
        ]
        found += [row[0].item() for step in zip(*shares, strict=True) for row in torch.cat(step)]
    assert found == undisturbed
    assert max(Counter(found).values()) - min(Counter(found).values()) <= 1, "2.56 epochs"


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


def test_a_ramp_changes_no_sample_and_no_order_on_any_number_of_ranks(stream: TokenStream) -> None:
    """Batches of 4, 8, 12 and 16, resumed in the midst of the ramp on other ranks."""
    sizes = BatchSizes(16, BatchRamp(start=4, step=4, tokens=40 * S, sequence=S))
    found, lengths = [], []
    for ranks, first, last in ((1, 0, 3), (4, 3, 5), (2, 5, 12)):
        shares = [
            steps(stream, rank=rank, ranks=ranks, first_step=first, last_step=last, sizes=sizes)
            for rank in range(ranks)
        ]
        for step in zip(*shares, strict=True):
            found += torch.cat(step)[:, 0].tolist()
            lengths.append(len(torch.cat(step)))
    assert lengths == [4, 4, 4, 4, 8, 8, 12, 16, 16, 16, 16, 16]
    assert found == torch.cat(steps(stream))[:, 0].tolist()[: len(found)]


def test_workers_give_the_same_batches_in_order_and_leave_torchs_generator_alone(stream: TokenStream) -> None:
    state = torch.get_rng_state()
    with_workers = steps(stream, workers=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(with_workers, steps(stream), strict=True))


def test_a_stream_shorter_than_one_sequence_or_one_batch_is_an_error(stream: TokenStream) -> None:
    check_samples(Windows(stream, 1001), 1)
    with pytest.raises(DataError, match="training tokens are fewer than one sequence"):
        Windows(stream, 1002)
    with pytest.raises(DataError, match="training samples are fewer than one batch") as error:
        check_samples(Windows(stream, S), 126)
    assert error.value.given == "125 sequences of 9 tokens for batch=126"


# A rank, as its process group sees it: it remembers SIGTERM, and goes on reading with its workers' help.
READS_ON = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from plait.data.dataset import TokenStream
from plait.data.loader import Batches, Windows, loader
from plait.data.sampler import BatchSizes, SampleOrder

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
stream = TokenStream("training", [(Path(sys.argv[1]), 1001)], "uint16")
windows = Windows(stream, 9)
shares = Batches(windows, SampleOrder(len(windows), 5), BatchSizes(8))
batches = iter(loader(shares, range(10_000), workers=2))
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
while not asked:
    next(batches)
time.sleep(0.2)  # the signal has come to all
for _ in range(30):
    next(batches)
print("read on", flush=True)
if sys.argv[2] == "waits":
    time.sleep(60)
"""


def assert_they_end(pids: list[int]) -> None:
    until_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until_s, "workers outlive their rank"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("then", ["ends", "waits"])
def test_workers_ignore_signals_to_their_process_group_and_end_with_their_rank(
    tmp_path: Path, then: str
) -> None:
    """As by torchrun. Then the rank ends with its loader open, or is killed."""
    np.arange(1001, dtype="<u2").tofile(tmp_path / "tokens")
    command = [sys.executable, "-c", READS_ON, str(tmp_path / "tokens"), then]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        assert rank.stdout is not None
        try:
            workers = [int(word) for word in rank.stdout.readline().split()]
            assert len(workers) == 2
            os.killpg(rank.pid, signal.SIGTERM)
            assert rank.stdout.readline() == "read on\n"
            if then == "waits":
                rank.kill()
            assert rank.wait(20) == (0 if then == "ends" else -signal.SIGKILL)
        finally:
            rank.kill()
    assert_they_end(workers)


def test_workers_that_cannot_share_semaphores_are_an_error_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize.Semaphore, "__init__", fails)
    with pytest.raises(DataError, match="worker processes cannot share semaphores") as raised:
        worker_context(2)
    assert "given   : 2 workers, /dev/shm: No space left on device" in str(raised.value)
    assert "data.workers=0" in str(raised.value)
