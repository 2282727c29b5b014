"""Rows of complete documents and micro-batches by a budget of tokens train as their documents alone do, and
evaluate to the same loss, however ranks share them."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
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
        own = {**batch, "input_ids": ids}
        return engine.outputs(own, lambda outputs: outputs.logits)  # type: ignore[no-any-return]

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
