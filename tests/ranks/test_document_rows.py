"""Rows of complete documents and micro-batches by a budget of tokens train as their documents alone do, and
evaluate to the same loss, however ranks share them."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.engine.inputs import shift_labels
from plait.plan import Plan
from support import document_rows, hf_models, programs
from support.pool import Pool

VOCABULARY = programs.VOCABULARY
STEPS = 2


def _bins(steps: int) -> Any:
    return document_rows.bins(VOCABULARY, steps)


def _budgeted(steps: int) -> Any:
    return document_rows.budgeted(VOCABULARY, steps)


def _alone(data: Any, steps: int) -> Any:
    return document_rows.alone(data(steps))


def check_as_alone(pool: Pool, family: str, plan: str, data: Any) -> None:
    task = programs.Task(hf_models.builder(family), data, steps=STEPS, own_loss=True)
    ours = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, f"{plan} precision=fp64")[0]
    reference = programs.Task(
        hf_models.builder(family), functools.partial(_alone, data), steps=STEPS, own_loss=True
    )
    programs.assert_same(ours, programs.one_process_task(reference, ours.first_weights, 1))


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", "dp=2 micro=2 zero=2"),
        ("llama", "tp=2 sp=true"),
        ("llama", "pp=2 micro=2"),
        ("gemma3_text", "cp=2"),
        ("gemma3_text", "tp=2"),
        ("gpt2", "dp=2 zero=3"),
        ("gpt2", "cp=2 cp_method=ulysses"),
        ("mixtral", "dp=2 ep=2"),
        ("mixtral", "cp=2"),
    ],
)
def test_full_rows_train_as_their_documents_alone(pool: Pool, family: str, plan: str) -> None:
    check_as_alone(pool, family, plan, _bins)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", "dp=2 micro=2 zero=3"),
        ("llama", "dp=4"),
        ("gpt2", "pp=2 micro=4"),
        ("llama", "cp=2 micro=4"),
        ("mixtral", "dp=2 ep=2 micro=2"),
    ],
)
def test_micro_batches_of_unequal_documents_train_as_documents_alone_and_ranks_without_a_target_take_part(
    pool: Pool, family: str, plan: str
) -> None:
    """The first data rank has no target at all."""
    check_as_alone(pool, family, plan, _budgeted)


def largest_leak(family: str, plan: str) -> tuple[float, float]:
    """The largest change of other documents' logits, and the smallest of its own, when a token changes."""
    engine = plait.parallelize(hf_models.model_of(family), f"{plan} precision=fp64")
    batch = document_rows.bins(VOCABULARY, 1)[0]
    document = (batch["position_ids"] == 0).cumsum(1)

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = engine.outputs({**batch, "input_ids": ids}, lambda outputs: outputs.logits)
        return found

    before, leak, moved = logits(batch["input_ids"]), 0.0, float("inf")
    for number in (1, 2):
        first = (document == number) & (batch["position_ids"] == 0)
        ids = torch.where(first, (batch["input_ids"] + 1) % VOCABULARY, batch["input_ids"])
        moves = (logits(ids) - before).abs().amax(-1)
        leak = max(leak, float(moves[document != number].max()))
        moved = min(moved, float(moves[document == number].max()))
    return leak, moved


@pytest.mark.parametrize(
    ("family", "plan"),
    [("llama", "tp=2 sp=true"), ("gemma3_text", "cp=2"), ("gpt2", "pp=2"), ("mixtral", "dp=1")],
)
def test_a_changed_token_of_a_full_row_moves_no_other_document(pool: Pool, family: str, plan: str) -> None:
    for leak, moved in pool.run(largest_leak, Plan.parse(plan).num_ranks, family, plan):
        assert leak < 1e-12
        assert moved > 1e-4


def weighted_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The weighted loss of targets that the batch has shifted, and their number."""
    targets, weights = batch["labels"], batch.get("loss_weights", torch.ones(()))  # cp tries it without
    losses = F.cross_entropy(outputs.logits.mT, targets, reduction="none")  # 0 at -100
    return (losses * weights).sum(), (targets != -100).sum()


def _weighted(steps: int) -> Any:
    """Rows whose labels and weights are shifted as the engine shifts them for its own loss."""
    draw = torch.Generator().manual_seed(0)
    rows = document_rows.bins(VOCABULARY, steps)
    return [
        dict(shift_labels({**b, "loss_weights": torch.rand(b["labels"].shape, generator=draw)})) for b in rows
    ]


@pytest.mark.parametrize(
    "plan", ["cp=2", "cp=2 cp_method=ring", "dp=2 micro=2", "pp=2 micro=2", "tp=2 sp=true"]
)
def test_weights_of_targets_are_divided_as_labels_are(pool: Pool, plan: str) -> None:
    task = programs.Task(hf_models.builder("llama"), _weighted, steps=STEPS, loss=weighted_loss)
    ours = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, f"{plan} precision=fp64")[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def test_weights_are_shifted_with_their_labels() -> None:
    batch = {"labels": torch.tensor([[4, 5, -100, 7]]), "loss_weights": torch.tensor([[1.0, 2.0, 0.0, 3.0]])}
    shifted = shift_labels(batch)
    assert shifted["labels"].tolist() == [[5, -100, 7, -100]]
    assert shifted["loss_weights"].tolist() == [[2, 0, 3, 0]]


def _evaluated(plan: str) -> list[float]:
    """Mean losses of the same documents in full rows, in padded micro-batches and alone."""
    engine = plait.parallelize(hf_models.model_of("llama"), f"{plan} precision=fp64")
    rows = document_rows.bins(VOCABULARY, 2)
    means = []
    for batches in (rows, [b for step in document_rows.alone(rows) for b in step]):
        own = [programs.share_of(b, engine) if b["labels"].shape[0] > 1 else b for b in batches]
        results = [engine.evaluate(batch) for batch in own]
        means.append(sum(r.loss_sum for r in results) / sum(r.num_tokens for r in results))
    return means


@pytest.mark.parametrize("plan", ["dp=2", "cp=2"])
def test_an_evaluation_of_full_rows_is_that_of_their_documents(pool: Pool, plan: str) -> None:
    for packed, alone in pool.run(_evaluated, 2, plan):
        assert packed == pytest.approx(alone, rel=1e-12)
