"""Documents of a stream with targets and weights, for tests of rows and micro-batches."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

import plait
from plait.data.dataset import TokenStream
from plait.data.documents import Bins, Documents, MicroBatches
from plait.data.index import weights_name
from plait.data.packing import best_fit, within_budget

END = 2
SEQUENCE = 24
BUDGET = 30
Step = dict[str, Tensor] | list[dict[str, Tensor]]


def stream_of(
    folder: Path,
    documents: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]] | None = None,
    table: tuple[float, ...] = (0.0, 1.0),
) -> TokenStream:
    """A stream of these documents, each of which ends with an end token; with weights out of `table`."""
    path, ids = folder / "part-00000.train.bin", [token for document in documents for token in document]
    np.array(ids, dtype="<u2").tofile(path)
    if weights is None:
        return TokenStream("training", [(path, len(ids))], "uint16")
    codes = [table.index(weight) for of_document in weights for weight in of_document]
    np.array(codes, dtype="uint8").tofile(path.with_name(weights_name(path.name)))
    return TokenStream("training", [(path, len(ids))], "uint16", [table])


@functools.cache
def documents(vocabulary: int) -> Documents:
    """80 documents of up to 15 tokens: half of the tokens are targets, of those from 13 tokens on none."""
    draw = np.random.default_rng(0)
    ids = [[*draw.integers(3, vocabulary, n).tolist(), END] for n in draw.integers(0, 15, 80)]
    weights = [(draw.random(len(d)) < (0.5 if len(d) < 13 else 0)).astype(float).tolist() for d in ids]
    folder = Path(tempfile.mkdtemp())
    return Documents(stream_of(folder, ids, weights), END, plait.PaddingCollator(END, 1, SEQUENCE))


def bins(vocabulary: int, steps: int, rows: int = 4) -> list[dict[str, Tensor]]:
    """Batches of full rows."""
    samples = Bins(documents(vocabulary), best_fit(documents(vocabulary).lengths, SEQUENCE), SEQUENCE)
    return [samples.batch(np.arange(rows * step, rows * (step + 1))) for step in range(steps)]


def budgeted(vocabulary: int, steps: int, micros: int = 4) -> list[list[dict[str, Tensor]]]:
    """Steps of micro-batches; of each step, the first half of them has no target."""
    found = documents(vocabulary)
    samples = MicroBatches(found, within_budget(found.lengths, BUDGET))
    every = [samples.batch(np.array([number])) for number in range(len(samples))]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in every]
    without, trained = ([b for b, n in zip(every, counts, strict=True) if bool(n) == has] for has in (0, 1))
    half = micros // 2
    parts = [slice(half * step, half * (step + 1)) for step in range(steps)]
    return [[*without[part], *trained[part]] for part in parts]


def alone(steps: Sequence[Step]) -> list[list[dict[str, Tensor]]]:
    """The documents of steps, each as a batch of its own, without padding."""
    return [[document for batch in _micros(step) for document in _documents(batch)] for step in steps]


def _micros(step: Step) -> list[dict[str, Tensor]]:
    return step if isinstance(step, list) else [step]


def _documents(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    found = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        stops = (ids == END).nonzero().flatten().add(1).tolist()
        if "attention_mask" in batch:
            stops = [int(batch["attention_mask"][row].sum())]
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            if (labels[start + 1 : stop] != -100).any():
                found.append({"input_ids": ids[None, start:stop], "labels": labels[None, start:stop]})
    return found
