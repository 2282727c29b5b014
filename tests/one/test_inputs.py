"""The entries of a batch, how they are divided, and where labels are shifted."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.engine.inputs import divide, prepared, shift_labels, shifts_labels
from plait.engine.loss import choose_loss
from plait.models import token_batch
from plait.plan.grid import share
from support import programs

IDS = torch.arange(12).reshape(2, 6)
BATCH = {"input_ids": IDS, "labels": IDS, "pixel_values": torch.ones(2, 3, 4, 4)}


def test_a_part_of_a_batch_has_its_samples_of_every_entry() -> None:
    first, second = divide(BATCH, 2)
    assert torch.equal(first["input_ids"], IDS[:1])
    assert torch.equal(second["labels"], IDS[1:])
    assert first["pixel_values"].shape[0] == second["pixel_values"].shape[0] == 1


@pytest.mark.parametrize(
    ("size", "ranks", "unit"), [(12, 4, 1), (12, 5, 1), (12, 4, 3), (10, 3, 2), (2, 4, 1)]
)
def test_shares_cover_a_batch_once_and_differ_by_at_most_a_unit(size: int, ranks: int, unit: int) -> None:
    parts = [range(size)[share(size, rank, ranks, unit)] for rank in range(ranks)]
    assert [index for part in parts for index in part] == [*range(size)]
    assert max(map(len, parts)) - min(map(len, parts)) <= unit
    assert not any(len(part) % unit for part in parts)


def test_a_position_keeps_its_target_when_shifted_rows_are_divided() -> None:
    logits = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")
    parts = zip(logits.chunk(3, 1), shift_labels(BATCH)["labels"].chunk(3, 1), strict=True)
    losses = [F.cross_entropy(own.flatten(0, 1), labels.flatten(), reduction="sum") for own, labels in parts]
    assert torch.stack(losses).sum().item() == pytest.approx(expected.item(), rel=1e-6)


def test_labels_are_shifted_for_built_in_losses_of_causal_models_alone() -> None:
    llama = programs.llama()
    assert shifts_labels(llama, None)
    assert not shifts_labels(llama, lambda *_: (0, 1))
    assert not shifts_labels(torch.nn.Linear(2, 2), None)
    assert prepared(token_batch(2, 6), llama, None)["labels"].shape == (2, 6)


def test_a_users_loss_receives_the_labels_of_the_data() -> None:
    batch, seen = programs.batches(1)[0], []

    def loss(outputs: Any, micro: dict[str, Tensor]) -> tuple[Tensor, int]:
        seen.append(micro["labels"])
        return outputs.logits.sum(), 1

    plait.parallelize(programs.llama(), "dp=1", loss=loss, optimizer_args=programs.ADAMW).step(batch)
    assert torch.equal(seen[0], batch["labels"])


def test_a_loss_of_the_data_and_one_of_prepared_micro_batches_have_the_same_bits() -> None:
    model = programs.llama()
    logits = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0))

    class Outputs:
        def __init__(self) -> None:
            self.logits = logits.clone().requires_grad_()

    results = []
    for loss, batch in (
        (choose_loss(model, None), BATCH),
        (choose_loss(model, None, of_inputs=True), shift_labels(BATCH)),
    ):
        outputs = Outputs()
        total, count = loss(outputs, batch)
        total.backward()
        results.append((total.detach(), torch.as_tensor(count), outputs.logits.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_task_that_changes_later_changes_the_labels_and_the_loss_alike() -> None:
    model = programs.llama()
    engine = plait.parallelize(model, "dp=1", optimizer_args=programs.ADAMW)
    batch = programs.batches(1)[0]
    shifted = engine.evaluate(batch)
    model.loss_type = "ForTokenClassification"
    aligned = engine.evaluate(batch)
    assert shifted.num_tokens == (batch["labels"][:, 1:] != -100).sum() < aligned.num_tokens
    expected = choose_loss(model, None)(engine.outputs(batch), batch)
    assert (aligned.loss_sum, aligned.num_tokens) == (expected[0].item(), int(expected[1]))
