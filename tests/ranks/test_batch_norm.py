"""BatchNorm under data parallelism: with the statistics of all ranks, or with a warning."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from support.pool import Pool

STEPS = 3


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
            for momentum in (0.1, None)  # None: a mean over all steps
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 3, 4, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (12,), generator=generator)}


def cross_entropy(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def _train(plan: str, shares: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor], float, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sgd: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1, "momentum": 0.9}}
        engine = plait.parallelize(ConvNet().double(), f"{plan} precision=fp64", **sgd, loss=cross_entropy)
    losses = []
    for step in range(STEPS):
        parts = {key: value.split(list(shares)) for key, value in batch_of(step).items()}
        losses.append(engine.step({key: part[engine.data_rank] for key, part in parts.items()}).loss)
    evaluated = engine.evaluate({key: v[:4] for key, v in batch_of(9).items()})
    state = engine.full_parameters() | engine.full_buffers()
    return losses, state, evaluated.loss_sum / evaluated.num_tokens, [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ("dp=2", (6, 6)),
        ("dp=2 zero=3 recompute=full", (5, 7)),
        ("dp=3 zero=1 recompute=selective", (3, 4, 5)),
    ],
)
def test_synchronized_statistics_are_those_of_the_global_batch(
    pool: Pool, plan: str, shares: tuple[int, ...]
) -> None:
    [(losses, expected, evaluated, _)] = pool.run(_train, 1, "dp=1", (12,))
    found = pool.run(_train, len(shares), f"{plan} sync_batchnorm=true", shares)[0]
    assert found[0] == pytest.approx(losses, rel=1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-8, atol=1e-10, msg=name)
    assert found[2] == pytest.approx(evaluated, rel=1e-8)
    assert found[3] == []


@pytest.mark.parametrize(
    ("plan", "parts", "way"),
    [
        ("dp=2", 2, "sync_batchnorm=true, or GroupNorm"),
        ("dp=2 micro=3", 6, "sync_batchnorm=true, micro=1, or GroupNorm"),
        ("dp=2 micro=3 sync_batchnorm=true", 3, "micro=1, or GroupNorm"),
    ],
)
def test_statistics_of_parts_of_the_batch_are_warned_of(pool: Pool, plan: str, parts: int, way: str) -> None:
    first, other = (found[3] for found in pool.run(_train, 2, plan, (6, 6)))
    assert len(first) == 1
    assert (
        f"blocks.0.1 and 2 other modules: BatchNorm computes with the statistics of one of {parts} parts"
        in (first[0])
    )
    assert first[0].endswith(f"Try {way}")
    assert other == []
