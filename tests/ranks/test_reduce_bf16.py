"""Gradients that travel in bf16: what is rounded, and how little that changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from support import programs
from support.pool import Pool
from support.trainings import assert_near, differing, engine_of, train, trained


@pytest.mark.parametrize(
    "words",
    [
        "dp=2 zero=0",
        "dp=2 zero=0 micro=3",
        "dp=4 zero=0 micro=3",
        "dp=2 zero=1",
        "dp=2 zero=1 micro=3",
        "dp=4 zero=2",
        "dp=2 zero=2 micro=3",
        "dp=2 zero=3 micro=3 accumulate=unsharded",
        "dp=4 zero=3",
        "dp=4 zero=3 shard=2 micro=3",
        "dp=2 zero=3 offload=cpu",
    ],
)
def test_gradients_that_travel_in_bf16_train_nearly_the_same(
    pool: Pool, words: str, wide: Any, start: Any
) -> None:
    found = pool.run(trained, int(words[3]), f"{words} reduce=bf16")[0]
    assert_near(found, wide, start, weights=0.03, losses=1e-3)


@pytest.mark.parametrize("words", ["dp=1", "dp=1 micro=3", "dp=1 zero=3"])
def test_nothing_is_rounded_that_travels_nowhere(pool: Pool, words: str) -> None:
    narrow, exact = (pool.run(trained, 1, plan)[0] for plan in (f"{words} reduce=bf16", words))
    assert narrow[0] == exact[0]
    assert differing(narrow[2], exact[2]) == []


def _buffers(plan: str) -> Any:
    engine = engine_of(plan, programs.wide_llama)
    shape = programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH
    estimated = engine.estimated_memory(shape).buffers
    train(engine, last=1)
    return estimated, engine.memory().buffers, engine.num_parameters


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize(
    ("words", "least"),  # bytes per element that copies in bf16 take, here or at a peer's
    [
        ("dp=2 zero=0", 2),
        ("dp=2 zero=0 micro=3", 2),
        ("dp=4 zero=0", 2),
        ("dp=2 zero=1 micro=3", 3),
        ("dp=4 zero=1 shard=2 micro=3", 3),
        ("dp=4 zero=2 shard=2", 1),
        ("dp=4 zero=3 shard=2", 1),
        ("dp=2 zero=3 micro=3 accumulate=unsharded", 3),
    ],
)
def test_copies_that_are_rounded_to_travel_are_estimated(
    pool: Pool, words: str, least: int, offload: str
) -> None:
    for estimated, held, numel in pool.over("gloo").run(
        _buffers, int(words[3]), f"{words} reduce=bf16 offload={offload}"
    ):
        assert held >= 0.98 * least * numel
        assert 0.95 * estimated <= held <= estimated


class Powers(nn.Module):
    """A small model; its steps have 128 targets, so that the mean divides exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def _powers() -> nn.Module:
    torch.manual_seed(0)
    return Powers()


def _ids() -> Tensor:
    return torch.arange(8 * 17).reshape(8, 17) * 7 % programs.VOCABULARY


def _gradients(plan: str) -> Any:
    engine = engine_of(plan, _powers, clip_norm=None, optimizer=torch.optim.SGD, optimizer_args={"lr": 0.1})
    ids = _ids().chunk(engine.data_ranks)[engine.data_rank]
    result = engine.step({"input_ids": ids, "labels": ids})
    assert result.num_tokens == 128
    return engine.full_gradients()


def _by_hand(ranks: int, micros: int, dtype: torch.dtype, *, sizes: bool = False) -> dict[str, Tensor]:
    """Each rank's gradient, added over micro-batches in fp32, rounded to `dtype`; their fp32 sum's mean. With
    `sizes`, that of their absolute values."""
    total: dict[str, Tensor] = {}
    for share in _ids().chunk(ranks):
        model = _powers()
        sums: dict[str, Tensor] = {}
        for ids in share.chunk(micros):
            model.zero_grad()
            programs.summed_loss(model(ids), {"labels": ids})[0].backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
        for name, gradient in sums.items():
            wide = (gradient.abs() if sizes else gradient).to(dtype).float()
            total[name] = total[name] + wide if name in total else wide
    return {name: gradient / 128 for name, gradient in total.items()}


@pytest.mark.parametrize(
    ("words", "micros"),
    [
        ("dp=2 zero=0", 1),
        ("dp=2 zero=1", 1),
        ("dp=2 zero=1 micro=2", 2),
        ("dp=2 zero=2", 1),
        ("dp=2 zero=3 micro=2 accumulate=unsharded", 2),
        ("dp=4 zero=2", 1),
        ("dp=4 zero=3", 1),
    ],
)
def test_gradients_are_rounded_once_and_summed_in_fp32(pool: Pool, words: str, micros: int) -> None:
    ranks = int(words[3])
    narrow = pool.run(_gradients, ranks, f"{words} reduce=bf16")[0]
    exact = pool.run(_gradients, ranks, words)[0]
    assert differing(narrow, _by_hand(ranks, micros, torch.bfloat16)) == []
    assert differing(exact, _by_hand(ranks, micros, torch.float32)) == []
    assert len(differing(narrow, exact)) == len(exact)


@pytest.mark.parametrize(
    ("words", "micros"),
    [("dp=2 zero=0 micro=2", 2), ("dp=4 zero=0", 1), ("dp=4 zero=1 shard=2", 1), ("dp=4 zero=3 shard=2", 1)],
)
def test_sums_that_travel_between_replicas_are_rounded_to_bf16_too(
    pool: Pool, words: str, micros: int
) -> None:
    """At most once more for every replica, each time by 2^-8 of what is added up."""
    ranks = int(words[3])
    narrow = pool.over("gloo").run(_gradients, ranks, f"{words} reduce=bf16")[0]
    exact = _by_hand(ranks, micros, torch.float32)
    replicas = ranks // plait.Plan.parse(words).shard_degree
    for name, gradient in narrow.items():
        assert torch.equal((gradient * 128).bfloat16().float(), gradient * 128), (
            "the sum did not travel in bf16"
        )
        bound = (1 + replicas) * 2.0**-8 * _by_hand(ranks, micros, torch.float32, sizes=True)[name]
        assert ((gradient - exact[name]).abs() <= bound * 1.01).all(), name
