"""Packed rows to verify: their documents, each of them alone, and what a changed token moves.

[Note: probe of documents]
A token of one document is changed, in every row. No logit of another document may move: in float64 by more
than the sums of experts round, whose sizes follow from all tokens of a row. The changed document itself has
to move, or the probe shows nothing. Rows come without an attention mask, with one of ones, and with padding
at either end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm import all_reduce
from plait.engine.engine import Engine
from plait.engine.inputs import divide
from plait.errors import ModelError
from plait.models import IGNORED_LABEL, check_documents_apart, documents_of, numbering_of, vocabulary_size
from plait.models.routers import router_loss
from plait.verify.model_spec import ModelSpec, random_tokens
from plait.verify.tiny_config import inputs_of

_KINDS = 4  # of rows: without a mask, with ones, with padding on the right, and on the left
_PROBED = 3  # documents of a row
_ROUNDING = {  # of a logit, by the largest one: sums of experts may round
    "float64": 1e-12,
    "float32": 64 * torch.finfo(torch.float32).eps,
    "bf16": 4 * torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True)
class PackedBatches:
    """A `BatchFn` of packed rows. `first`: the position that the model gives to a row's first token."""

    vocabulary: int
    first: int
    length: int
    seed: int

    def __call__(self, step: int, samples: int) -> Mapping[str, Tensor]:
        """Rows of at least two documents; the label of a document's first token is ignored."""
        batch = random_tokens(self.vocabulary, self.seed, step, samples, self.length)
        generator = torch.Generator().manual_seed(1019 * self.seed + step)
        starts = torch.rand(samples, self.length, generator=generator) < 4 / self.length
        order, num_hidden = torch.arange(self.length).expand(samples, -1), max(1, self.length // 4)
        mask = torch.ones_like(order)
        if (kind := step % _KINDS) > 1:
            mask[:, slice(-num_hidden, None) if kind == 2 else slice(num_hidden)] = 0
        starts[:, 0] = starts[:, self.length // 2] = True
        starts[:, num_hidden] |= kind == 3
        positions = order - torch.where(starts, order, 0).cummax(1).values
        batch |= {"position_ids": positions + self.first}
        batch["labels"] = batch["labels"].masked_fill(starts, IGNORED_LABEL)
        if kind:
            batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED_LABEL)}
        return batch


def check_packed(model: nn.Module, spec: ModelSpec, dtype: str) -> int:
    """The position of a row's first token. Raises ModelError for a model without packed rows to verify."""
    if vocabulary_size(model) is None or spec.batch is not None or inputs_of(model):
        raise ModelError(
            "packed rows consist of token ids",
            given=f"{type(model).__name__}, which has other inputs",
            expected="a model of token ids and position_ids",
            hint="no --packed",
        )
    if dtype.startswith("fp8"):
        raise ModelError(
            "scales of float8 follow from all tokens of a row",
            given=f"--packed --dtype {dtype}",
            expected="float64, float32 or bf16",
            hint="--dtype bf16",
        )
    if spec.loss is None and router_loss(model) is not None:
        raise ModelError(
            "the auxiliary loss of routers follows from all tokens of a micro-batch",
            given="--packed, output_router_logits=True",
            expected="a loss that each document has alone",
            hint="output_router_logits=False, or no --packed",
        )
    check_documents_apart(model)
    return numbering_of(model).first


def documents_alone(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each document with a target as a batch of its own, without padding."""
    found = documents_of(batch)
    assert found is not None, "rows without documents"
    alone = []
    for row, intervals in enumerate(found.intervals):
        for start, stop in intervals:
            own = {key: batch[key][row : row + 1, start:stop] for key in ("input_ids", "labels")}
            if (own["labels"] != IGNORED_LABEL).any():
                alone.append(own)
    return alone


@dataclass(frozen=True)
class Leak:
    """Relative changes of logits: the largest one of other documents, and the smallest of changed ones."""

    largest: float
    own: float

    def problem(self, dtype: str) -> str:
        """Say why the documents are not shown to be apart, in numbers of this dtype; "" if they are."""
        rounding = _ROUNDING.get(dtype, _ROUNDING["bf16"])
        if self.largest > rounding:
            return f"a changed token moves other documents by {self.largest:.1e}, more than {rounding:.1e}"
        if self.own <= rounding:
            return f"a changed token moves its own document by {self.own:.1e} only: nothing is shown"
        return ""


def measured_leak(engine: Engine, spec: ModelSpec, samples: int) -> Leak:
    """Measure what changed tokens move: [Note: probe of documents]. Collective."""
    largest, own = 0.0, float("inf")
    for kind in range(_KINDS):
        batch = divide(spec.make_batch(kind, samples), engine.data_ranks)[engine.data_rank]
        found = documents_of(batch)
        assert found is not None, "rows without documents"
        logits = _logits(engine, batch)
        size = float(logits.abs().max())
        for number in range(_PROBED):
            ids, others = batch["input_ids"].clone(), torch.ones_like(batch["input_ids"], dtype=torch.bool)
            for row, intervals in enumerate(found.intervals):
                start, stop = intervals[min(number, len(intervals) - 1)]
                ids[row, start] = (ids[row, start] + 1) % logits.shape[-1]
                others[row, start:stop] = False
            moves = (_logits(engine, {**batch, "input_ids": ids}) - logits).abs().amax(-1) / size
            largest, own = max(largest, float(moves[others].max())), min(own, float(moves[~others].max()))
    totals = torch.tensor([largest, -own], dtype=torch.float64, device=engine.device)
    all_reduce(totals, engine.world.group, "max")
    return Leak(float(totals[0]), -float(totals[1]))


def _logits(engine: Engine, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, S, vocabulary), on the CPU."""
    logits: Tensor = engine.outputs(batch, lambda outputs: getattr(outputs, "logits", outputs))
    return logits.double().cpu()
