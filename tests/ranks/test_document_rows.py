"""Rows of complete documents and micro-batches by a budget of tokens train as their documents alone do, and
evaluate to the same loss, however ranks share them."""

import functools
from dataclasses import replace
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
    """The weighted loss of targets that the batch has shifted, and the sum of their weights."""
    targets, weights = batch["labels"], batch.get("loss_weights", torch.ones(()))  # cp tries it without
    losses = F.cross_entropy(outputs.logits.mT, targets, reduction="none")  # 0 at -100
    return (losses * weights).sum(), ((targets != -100) * weights).sum(dtype=torch.float64)


def _weighted(steps: int, *, micros: bool, shifted: bool) -> Any:
    """Rows, or micro-batches, whose weights are real numbers in float32. `shifted`: as the engine shifts
    them, with their labels, for its own loss."""
    data = document_rows.budgeted if micros else document_rows.bins
    change = (lambda batch: dict(shift_labels(batch))) if shifted else dict
    found: Any = data(VOCABULARY, steps, 0.1, 0.37, 1.3)
    return [[change(b) for b in batch] if micros else change(batch) for batch in found]


@pytest.mark.parametrize(
    ("plan", "own_loss"),
    [
        ("cp=2", True),
        ("dp=2 micro=2 zero=3", True),
        ("pp=2 micro=2", True),
        ("tp=2 sp=true", True),
        ("cp=2 cp_method=ring", False),
        ("tp=2", False),
        ("dp=2 micro=2", "micros"),
        ("cp=2 micro=4", "micros"),
    ],
)
def test_weights_of_data_train_as_in_one_process(pool: Pool, plan: str, own_loss: bool | str) -> None:
    task = programs.Task(
        hf_models.builder("llama"),
        functools.partial(_weighted, micros=own_loss == "micros", shifted=not own_loss),
        steps=STEPS,
        loss=weighted_loss,
        own_loss=bool(own_loss),
    )
    ours = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, f"{plan} precision=fp64")[0]
    shifted = replace(task, data=functools.partial(_weighted, micros=own_loss == "micros", shifted=True))
    programs.assert_same(ours, programs.one_process_task(shifted, ours.first_weights, 1))


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
