"""DistributedDataParallel, gradients compressed by its communication hook: what arrives and what is lost."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.parallel.ddp import Compression, compression_hook
from support.ddp import init_gloo, over_both, rows
from support.ddp_compression import KINDS, compressed, loss32, mean_by_one, model_of_blocks, worst_error
from support.pool import Pool

EXACT = 1e-4  # of the largest, as far as float32 goes
of_ranks = pytest.mark.parametrize("ranks", [2, 3])


# --- what the mean is


def _near(kind: str, transport: str, low: float, high: float) -> None:
    """In the first buckets, and in those that are rebuilt."""
    init_gloo()
    for arguments in ({}, {"bucket_cap_mb": 0.0004}):
        ddp = compressed(model_of_blocks(), kind, transport, **arguments)
        for step in range(4):
            ddp.zero_grad()
            expected = mean_by_one(ddp.module, step)
            loss32(ddp, dist.get_rank(), step).backward()
            assert low < worst_error(ddp.module, expected) <= high
        assert ddp.reducer.has_rebuilt
        assert len(ddp.reducer.buckets) == (3 if arguments else 1)


@over_both
@of_ranks
@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("bf16", 1e-5, 2**-8), ("fp16", 1e-6, 2**-10), ("int8", 1e-4, 0.05), ("powersgd:1", 1e-3, 1.0)],
)
def test_the_mean_is_as_precise_as_its_messages(
    pool: Pool, kind: str, low: float, high: float, ranks: int, transport: str
) -> None:
    pool.run(_near, ranks, kind, transport, low, high)


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_bf16_is_near_where_contributions_are_not_sent_to_all(pool: Pool, transport: str) -> None:
    """On four ranks over Gloo, five that share memory: the sum is rounded too."""
    pool.run(_near, 5, "bf16", transport, 1e-5, 2**-7)


def _added_wide(transport: str) -> None:
    """1 and 2^-9 are bfloat16; their sum is not."""
    init_gloo()
    ddp = compressed(nn.Linear(4, 4, bias=False).float(), "bf16", transport)
    x = torch.full((1, 4), 1.0 if dist.get_rank() == 0 else 2.0**-9).float()
    ddp(x).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((4, 4), (1 + 2.0**-9) / 2).float())


@over_both
def test_bf16_contributions_are_added_up_in_float32(pool: Pool, transport: str) -> None:
    pool.run(_added_wide, 2, transport)


def _exact(transport: str, arguments: dict[str, Any]) -> None:
    """A rank's gradient of a linear layer has as many directions as rows: 4 here, 12 on 3 ranks."""
    init_gloo()
    ddp = compressed(nn.Linear(40, 30).float(), "powersgd:12", transport, **arguments)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = model(rows(rank, step, (4, 40)).float())
        return out.square().mean()

    for step in range(3):
        ddp.zero_grad()
        expected = mean_by_one(ddp.module, step, loss)
        loss(ddp, dist.get_rank(), step).backward()
        worst = worst_error(ddp.module, expected)
        assert worst < EXACT, worst


@over_both
@of_ranks
@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 0.0001}], ids=["one bucket", "bias alone"])
def test_powersgd_of_as_many_directions_as_there_are_is_exact(
    pool: Pool, arguments: dict[str, Any], ranks: int, transport: str
) -> None:
    pool.run(_exact, ranks, transport, arguments)


class Transposed(nn.Module):
    """A weight whose memory is that of its transpose, and a convolution's with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 40).T)
        self.convolution = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """(images, 8, 5, 5) -> (images, 6, 3, 3) and (40, 30)"""
        return self.convolution(x).square().mean() + (x.flatten()[:40] @ self.weight).square().mean()


def _strided(transport: str) -> None:
    init_gloo()
    ddp = compressed(Transposed().float(), "powersgd:2", transport)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1, 8, 5, 5, generator=generator, dtype=torch.float32)
    ddp(x).backward()
    mine = torch.zeros(40, 30)
    mine.copy_(torch.autograd.grad(ddp.module(x), ddp.module.weight)[0])
    dist.all_reduce(mine)
    # Two ranks' gradients of this weight have one direction each.
    worst = (ddp.module.weight.grad - mine / 2).abs().max() / mine.abs().max()
    assert float(worst) < EXACT


@over_both
def test_a_matrix_is_factored_by_its_memory_layout(pool: Pool, transport: str) -> None:
    pool.run(_strided, 2, transport)


# --- what is lost


def _constant(kind: str, transport: str, forgets: bool) -> tuple[float, float]:
    """Many steps of one gradient: the errors of the first one, and of the mean of all."""
    init_gloo()
    ddp = plait.DistributedDataParallel(model_of_blocks(), transport=transport, bucket_cap_mb=0.0004)
    state = Compression(ddp, kind)
    ddp.register_comm_hook(state, compression_hook)
    expected = torch.cat([gradient.flatten() for gradient in mean_by_one(ddp.module).values()])
    found = []
    for _ in range(40):
        ddp.zero_grad()
        loss32(ddp, dist.get_rank()).backward()
        found.append(torch.cat([p.grad.flatten() for p in ddp.module.parameters()]))
        if forgets:
            state.reset()
    once, mean = ((it - expected).norm() / expected.norm() for it in (found[0], torch.stack(found).mean(0)))
    return float(once), float(mean)


@over_both
@of_ranks
@pytest.mark.parametrize(("kind", "share"), [("int8", 0.1), ("powersgd:1", 0.25)])
def test_compression_errors_of_a_step_are_added_in_later_ones(
    pool: Pool, kind: str, share: float, ranks: int, transport: str
) -> None:
    for once, mean in pool.run(_constant, ranks, kind, transport, False):
        assert 0 < mean < share * once


def test_dropped_compression_errors_are_not_added(pool: Pool) -> None:
    for once, mean in pool.run(_constant, 2, "int8", "auto", True):
        assert mean > 0.5 * once


@over_both
@pytest.mark.parametrize("kind", ["int8", "powersgd:1"])
def test_rebuilt_buckets_keep_their_compression_errors(pool: Pool, kind: str, transport: str) -> None:
    pool.run(_taken_along, 2, kind, transport)


def _taken_along(kind: str, transport: str) -> None:
    init_gloo()
    ddp = plait.DistributedDataParallel(model_of_blocks(), transport=transport, bucket_cap_mb=0.0004)
    state = Compression(ddp, kind)
    ddp.register_comm_hook(state, compression_hook)
    loss32(ddp, dist.get_rank()).backward()
    before = {number: lost.clone() for number, lost in state._errors_by_param().items()}
    first = [bucket.param_indices for bucket in ddp.reducer.buckets]
    ddp(rows(dist.get_rank()).float())  # buckets are rebuilt
    assert [bucket.param_indices for bucket in ddp.reducer.buckets] != first
    state._begin()
    after = state._errors_by_param()
    assert before.keys() == after.keys() == {*range(6)}
    assert sum(bool(lost.any()) for lost in before.values()) >= 3
    assert all(torch.equal(lost, after[number]) for number, lost in before.items())


def _overflowed(kind: str, transport: str) -> None:
    """One rank's gradient of one step is not finite: all see it, and nothing of it is left in the next."""
    init_gloo()
    ddp = compressed(model_of_blocks(), kind, transport, bucket_cap_mb=0.0004)
    for step in range(4):
        ddp.zero_grad()
        expected = mean_by_one(ddp.module, step)
        loss = loss32(ddp, dist.get_rank(), step)
        (loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss).backward()
        bad = [not bool(p.grad.isfinite().all()) for p in ddp.module.parameters()]
        assert all(bad) if step == 1 else not any(bad)
        if step != 1:
            assert worst_error(ddp.module, expected) < 1.0


@over_both
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_leaves_no_compression_errors(
    pool: Pool, kind: str, transport: str
) -> None:
    pool.run(_overflowed, 2, kind, transport)
