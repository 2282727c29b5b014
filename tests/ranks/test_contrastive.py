"""A loss over the samples of all data ranks, such as CLIP's, is that of one process on the global batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait import all_gather
from plait.comm import Group, connect
from plait.errors import CommError
from support.pool import Pool, RankError

STEPS, SAMPLES = 3, 16
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
Outputs = tuple[Tensor, Tensor, Tensor]
Loss = Callable[[Outputs, Group], tuple[Tensor, int]]
Found = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]  # losses, gradients, last weights


class Towers(nn.Module):
    """Features of images and of texts, and the logits' scale."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(10, 10) for _ in range(3)])
        self.text = nn.Linear(6, 10)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> Outputs:
        for block in self.blocks:
            image = image + torch.tanh(block(image))
        return F.normalize(image, dim=-1), F.normalize(self.text(text), dim=-1), self.log_scale.exp()


def towers() -> Towers:
    torch.manual_seed(1)
    return Towers().double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)

    def normal(width: int) -> Tensor:
        return torch.randn(SAMPLES, width, dtype=torch.float64, generator=generator)

    return [{"image": normal(10), "text": normal(6)} for _ in range(STEPS)]


def whole_loss(outputs: Outputs, group: Group) -> tuple[Tensor, int]:
    """Every rank computes the loss of all samples."""
    images, texts, scale = outputs
    images, texts = all_gather(images, group), all_gather(texts, group)
    logits, targets = scale * images @ texts.T, torch.arange(len(images))
    both = (
        F.cross_entropy(logits, targets, reduction="sum"),
        F.cross_entropy(logits.T, targets, reduction="sum"),
    )
    return sum(both) / 2, len(images)


def own_loss(outputs: Outputs, group: Group) -> tuple[Tensor, int]:
    """Every rank computes the loss of its own samples, among those of all ranks."""
    images, texts, scale = outputs
    targets = torch.arange(len(images)) + group.rank * len(images)
    to_texts = scale * images @ all_gather(texts, group).T
    to_images = scale * texts @ all_gather(images, group).T
    both = (F.cross_entropy(logits, targets, reduction="sum") for logits in (to_texts, to_images))
    return sum(both) / 2, len(images)


def trained(plan: str, loss: Loss, shares: Sequence[int]) -> Found:
    """`shares`: samples of each data rank."""
    engine = plait.parallelize(
        towers(),
        f"{plan} precision=fp64",
        loss=lambda outputs, _: loss(outputs, engine.data_group),
        optimizer_args=ADAMW,
        example_batch=batches()[0],
    )
    losses, gradients = [], []
    for batch in batches():
        share = {key: value.split(shares)[engine.data_rank] for key, value in batch.items()}
        result = engine.step(share)
        losses.append(result.loss)
        gradients.append(engine.full_gradients())
        assert engine.evaluate(share).num_tokens == result.num_tokens
    return losses, gradients, engine.full_parameters()


def reference(micros: Sequence[Sequence[int]]) -> Found:
    """Plain torch. `micros`: the samples of each micro-batch of all ranks, in the order of ranks."""
    model = towers()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1]},
        {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    losses, gradients = [], []
    for batch in batches():
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for samples in micros:
            images, texts, scale = model(batch["image"][samples], batch["text"][samples])
            logits, targets = scale * images @ texts.T, torch.arange(len(samples))
            mean = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
            total = total + mean * len(samples) / SAMPLES
        total.backward()
        losses.append(total.item())
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        optimizer.step()
    return losses, gradients, {name: p.detach() for name, p in named.items()}


def assert_same(found: Found, expected: Found) -> None:
    steps = [("gradient", *pair) for pair in zip(found[1], expected[1], strict=True)]
    for what, ours, theirs in (*steps, ("weight", found[2], expected[2])):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (ours[name] - value).abs().max() < 1e-9, f"{what} of {name}"
    assert found[0] == pytest.approx(expected[0], rel=1e-9)


@pytest.mark.parametrize("loss", [whole_loss, own_loss])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.quick), 4])
def test_a_contrastive_loss_is_that_of_the_global_batch(pool: Pool, dp: int, zero: int, loss: Loss) -> None:
    found = pool.run(trained, dp, f"dp={dp} zero={zero}", loss, [SAMPLES // dp] * dp)[0]
    assert_same(found, reference([range(SAMPLES)]))


@pytest.mark.parametrize(
    ("plan", "ranks", "loss"),
    [("pp=2 dp=2 zero=1", 4, own_loss), ("pp=2 schedule=zb-h1", 2, whole_loss)],
)
def test_the_last_pipeline_rank_computes_it(pool: Pool, plan: str, ranks: int, loss: Loss) -> None:
    """The loss refers to the engine, which does not exist when the model is split."""
    found = pool.run(trained, ranks, plan, loss, [SAMPLES * 2 // ranks] * (ranks // 2))[0]
    assert_same(found, reference([range(SAMPLES)]))


def test_ranks_may_have_different_numbers_of_samples(pool: Pool) -> None:
    found = pool.run(trained, 3, "dp=3 zero=3", whole_loss, [5, 10, 1])[0]
    assert_same(found, reference([range(SAMPLES)]))


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_each_micro_batch_has_negatives_of_its_own(pool: Pool, transport: str) -> None:
    found = pool.over(transport).run(trained, 2, "dp=2 zero=2 micro=2", whole_loss, [8, 8])[0]
    assert_same(found, reference([[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]))


def without_gradients_of_others(outputs: Outputs, group: Group) -> tuple[Tensor, int]:
    """The usual mistake: an all-gather that passes no gradient to other ranks."""

    def gathered(own: Tensor) -> Tensor:
        parts = [*all_gather(own.detach(), group).chunk(group.size)]
        parts[group.rank] = own
        return torch.cat(parts)

    images, texts, scale = outputs
    return whole_loss((gathered(images), gathered(texts), scale), Group((0,), 0, None))


def test_without_the_gradient_of_other_ranks_parity_fails(pool: Pool) -> None:
    found = pool.run(trained, 2, "dp=2", without_gradients_of_others, [8, 8])[0]
    with pytest.raises(AssertionError, match="gradient of blocks"):
        assert_same(found, reference([range(SAMPLES)]))


def gathered_tensors() -> list[Any]:
    group = connect().group
    strided = torch.arange(6.0).view(2, 3).t() + group.rank
    whole = all_gather(strided.requires_grad_(), group)
    weights = torch.arange(1.0, 1 + len(whole))[:, None] * (1 + group.rank)
    [gradient] = torch.autograd.grad((whole * weights).sum(), strided)
    labels = all_gather(torch.full((group.rank,), group.rank), group)
    return [whole.detach(), gradient, labels]


def test_tensors_are_concatenated_in_order_of_ranks_and_gradients_summed(pool: Pool) -> None:
    base = torch.arange(6.0).view(2, 3).t()
    expected = torch.cat([base + rank for rank in range(3)])
    weights = (torch.arange(1.0, 10) * (1 + 2 + 3))[:, None].expand(9, 2)
    for rank, (whole, gradient, labels) in enumerate(pool.run(gathered_tensors, 3)):
        assert torch.equal(whole, expected)
        assert torch.equal(gradient, weights[3 * rank : 3 * rank + 3])
        assert labels.tolist() == [1, 2, 2]


def gathered_unlike() -> None:
    group = connect().group
    all_gather(torch.ones(2, 3 + group.rank), group)


def test_shapes_that_differ_beyond_the_first_dim_are_an_error_on_every_rank(pool: Pool) -> None:
    with pytest.raises(RankError, match="differ between ranks") as caught:
        pool.run(gathered_unlike, 2)
    assert all(isinstance(failure.exception, CommError) for failure in caught.value.failures)
    assert len(caught.value.failures) == 2
