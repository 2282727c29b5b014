"""A stream of tokens and a sample order as a torch DataLoader, with no state except the step."""

from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from plait.data.dataset import TokenStream
from plait.data.sampler import SampleOrder
from plait.data.workers import init_loader_worker, worker_context
from plait.errors import DataError

PREFETCH = 4  # batches per worker; a batch is a few hundred kilobytes


class Windows(Dataset[dict[str, Tensor]]):
    """This data rank's share of each step: item `step` is one batch.

    Sample i covers tokens [i * (S - 1), i * (S - 1) + S): each token is predicted once an epoch, except for
    the stream's first and up to S - 2 at its end that fill no window. Sample j of a step is number c = step *
    global_batch + j of the order; rank r of R takes the r-th of R equal runs of them.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence: int,
        global_batch: int,
        data_rank: int,
        data_ranks: int,
        seed: int,
        order: Literal["random", "sequential"] = "random",
    ) -> None:
        """Raises DataError if the stream is too short."""
        assert 0 <= data_rank < data_ranks, f"data rank {data_rank} of {data_ranks}"
        assert global_batch % data_ranks == 0, f"batch {global_batch} over {data_ranks} data ranks"
        check_samples(stream, sequence=sequence, global_batch=global_batch)
        self.stream = stream
        self.sequence = sequence
        self.global_batch = global_batch
        self.share = global_batch // data_ranks
        self.first = data_rank * self.share
        self.order = SampleOrder(count_samples(stream.num_tokens, sequence), seed, order)

    def __len__(self) -> int:
        """Number of full batches per epoch. Later steps continue with the next epoch's order."""
        return self.order.num_samples // self.global_batch

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        """Batch {"input_ids", "labels"}: (b, S) int64, the same tensor twice: models shift labels inside."""
        indices = self.order.indices(step * self.global_batch + self.first, self.share)
        tokens = torch.from_numpy(self.stream.read_windows(indices * (self.sequence - 1), self.sequence))
        return {"input_ids": tokens, "labels": tokens}


def count_samples(num_tokens: int, sequence: int) -> int:
    """Number of windows of `sequence` tokens, each starting with the last token of the previous one."""
    return max(0, (num_tokens - 1) // (sequence - 1))


def check_samples(stream: TokenStream, *, sequence: int, global_batch: int) -> None:
    """Check the stream's length. Raises DataError if it is shorter than one batch."""
    num_samples = count_samples(stream.num_tokens, sequence)
    if num_samples < 1:
        raise DataError(
            f"the {stream.name} tokens are fewer than one sequence",
            given=f"{stream.num_tokens} tokens for sequence={sequence}",
            expected=f"at least {sequence} tokens",
            hint="a shorter sequence, more text"
            + (", or a larger validation share" if stream.name == "validation" else ""),
        )
    if num_samples < global_batch:
        raise DataError(
            f"the {stream.name} tokens are fewer than one batch",
            given=f"{num_samples} sequences of {sequence} tokens for batch={global_batch}",
            expected=f"at least {global_batch} sequences",
            hint=f"batch={num_samples} or less, a shorter sequence, or more text",
        )


def loader(
    windows: Windows, steps: range, *, workers: int = 0, pin_memory: bool = False
) -> "DataLoader[dict[str, Tensor]]":
    """DataLoader of the items of `windows` with these numbers, from 0 on.

    `workers` processes read ahead; 0 reads in this process.
    """
    return DataLoader(
        windows,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        multiprocessing_context=worker_context() if workers else None,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=init_loader_worker if workers else None,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),  # its own: leaves torch's global RNG untouched
    )
