"""Scores of rows of tokens under any plan: the log-probability of what a row predicts, and whether greedy
decoding would write it. Full logits are not gathered.

# B rows  S tokens

[Note: micro-batches of rows]
The last bits of a sum depend on the shapes of the products before it, and so on the rows that are computed
together. So micro-batches are formed from all rows, equal ones once, in an order of their own: the longest
first. Each has about `TOKENS` tokens with padding. Then they are divided over the data ranks: a row's score
has the same bits for any number of data ranks and of micro-batches in a call, as long as each rank has as
many threads, between which a product may divide sums.

[Note: windows]
A document longer than `context` is read in windows. Strided ones are of `context` tokens: the first window
predicts all of its tokens but the first; each later one ends `stride` tokens after the one before, or where
the document ends, and predicts the tokens that are new in it, with at least `context - stride` tokens before
them. Rolling windows, those of lm-evaluation-harness, have one token more, of which the model does not read
the last one, and each later one ends `context` tokens after the one before. Every token but the document's
first is predicted once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plait.comm import all_reduce
from plait.engine.engine import Engine
from plait.models import IGNORED_LABEL

TOKENS = 1024  # of a micro-batch: enough for a matrix product, and little memory


@dataclass(frozen=True)
class Row:
    """Tokens that are read together; the last one is only predicted.

    first    index of the first token whose log-probability is added, from 1; the others are all after it
    checked  indices of tokens for `RowScore.is_greedy`, from 1; None: as for the log-probability
    """

    ids: tuple[int, ...]
    first: int
    checked: range | None = None

    def __post_init__(self) -> None:
        assert self.first >= 1, "a row's first token is only read"

    @property
    def width(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.ids) - 1

    @property
    def all_checked(self) -> range:
        return range(self.first, len(self.ids)) if self.checked is None else self.checked


class RowScore(NamedTuple):
    """`log_prob`: of the predicted tokens, in nats, their sum in float64. `is_greedy`: no token is likelier
    than any of the checked ones; False if there are none."""

    log_prob: float
    is_greedy: bool


def score_rows(
    engine: Engine,
    rows: Sequence[Row],
    *,
    batch: int = 1,
    shown: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[RowScore]:
    """Score all rows, which every rank passes, on every rank. See [Note: micro-batches of rows].

    `batch`: a rank's rows in a call of the engine, rounded up to micro-batches, of which there are at least
    the plan's number: more of them fill a pipeline. `shown`: wraps the calls, to show progress.
    """
    micros, ranks = micro_batches(rows), engine.data_ranks
    index_of = {row: index for index, row in enumerate(row for micro in micros for row in micro)}
    unit = 1 if engine.pairs is None else 2  # rows of a sample
    own_scores = torch.zeros(len(index_of), 2, dtype=torch.float64)
    for call in shown([*_calls(micros, ranks, batch, engine.plan.micro)]):
        own = [micros[index] if index < len(micros) else [] for index in call[engine.data_rank :: ranks]]
        nothing = Row(rows[0].ids[:2], first=2)  # also of a rank without rows, which joins the others
        batches = [_batch([*micro, *[nothing] * (-len(micro) % unit if micro else unit)]) for micro in own]
        for micro, found in zip(own, engine.label_statistics(batches, shifted=True), strict=True):
            for row, of_row in zip(micro, found.cpu(), strict=False):
                own_scores[index_of[row]] = torch.tensor(_score(row, of_row), dtype=torch.float64)
    scores = own_scores.to(engine.device)
    all_reduce(scores, engine.data_group)
    of_rows = [RowScore(log_prob, bool(is_greedy)) for log_prob, is_greedy in scores.tolist()]
    return [of_rows[index_of[row]] for row in rows]


def micro_batches(rows: Iterable[Row]) -> list[list[Row]]:
    """See [Note: micro-batches of rows]."""
    micros: list[list[Row]] = []
    for row in sorted({*rows}, key=lambda row: (-row.width, row.ids, row.first, str(row.checked))):
        if not micros or (len(micros[-1]) + 1) * micros[-1][0].width > TOKENS:
            micros.append([])
        micros[-1].append(row)
    return micros


def _calls(micros: Sequence[Sequence[Row]], ranks: int, batch: int, least: int) -> Iterator[range]:
    """Indices of the micro-batches of each call, as many for each rank."""
    start = 0
    while start < len(micros):
        stop = start + ranks * max(least, -(-batch // len(micros[start])))
        stop = min(stop, start + ranks * -(-(len(micros) - start) // ranks))
        yield range(start, stop)
        start = stop


def _batch(rows: Sequence[Row]) -> dict[str, Tensor]:
    """The rows, padded on the right. Labels are those of the next tokens."""
    ids = [torch.tensor(row.ids) for row in rows]
    labels = [each[1:].clone() for each in ids]
    for label_S, row in zip(labels, rows, strict=True):
        label_S[: min(row.first, row.all_checked.start or row.first) - 1] = IGNORED_LABEL
    return {
        "input_ids": pad_sequence([each[:-1] for each in ids], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in labels], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    }


def _score(row: Row, statistics_S3: Tensor) -> tuple[float, bool]:
    log_prob = statistics_S3[row.first - 1 : row.width, 0].sum(dtype=torch.float64)
    likeliest = [bool(statistics_S3[index - 1, 2]) for index in row.all_checked]
    return log_prob.item(), bool(likeliest) and all(likeliest)


def strided_rows(ids: Sequence[int], last_word: range, context: int, stride: int) -> Iterator[Row]:
    """Yield the windows of a document. In the last one, its last word is checked, if the word fits in; in the
    others nothing. See [Note: windows]."""
    first, stop = 1, min(len(ids), context)
    while first < len(ids):
        begin = max(0, stop - context)
        inside = range(last_word.start - begin, last_word.stop - begin)
        is_last = stop == len(ids) and last_word and inside.start >= 1
        yield Row(tuple(ids[begin:stop]), first - begin, inside if is_last else range(0))
        first, stop = stop, min(len(ids), stop + stride)


def rolling_rows(ids: Sequence[int], last_word: range, context: int) -> Iterator[Row]:
    """The same for rolling windows."""
    return strided_rows(ids, last_word, context + 1, context)
