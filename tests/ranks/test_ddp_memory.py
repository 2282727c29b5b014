"""DistributedDataParallel: the memory of gradients, when it is reused, and when it is free."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from support.ddp import PLAIT_ONLY, assert_gradients, init_gloo, mean_gradients, over_both, rows, wrapped
from support.pool import Pool

WIDE = 200  # a weight of 320 KB: large enough to change hands early


class Mixed(nn.Module):
    """Large parameters and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.wide, self.out = nn.Linear(5, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.wide(torch.tanh(self.into(x)))))
        return out


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = model(rows(rank, step))
    return out.square().mean()


def _kept(transport: str) -> None:
    """A program holds on to gradients, to a part of one and to a detached one, and goes on."""
    init_gloo()
    ddp = wrapped(Mixed(), transport)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(4):
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: _loss(it, rank, step))
        _loss(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)
        first, *others = [parameter.grad for parameter in ddp.parameters()]
        kept += [(it, it.clone()) for it in (first, others[1][3:5], others[2].detach())]
        for parameter in ddp.parameters():
            parameter.grad = None
    for found, before in kept:
        assert torch.equal(found, before)


@over_both
def test_a_gradient_that_the_program_keeps_is_not_written_again(pool: Pool, transport: str) -> None:
    pool.run(_kept, 2, transport)


def _in_place(transport: str, to_none: bool) -> None:
    init_gloo()
    ddp = wrapped(Mixed(), transport)
    before: set[int] = set()
    for step in range(5):
        ddp.zero_grad(set_to_none=to_none)
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: _loss(it, rank, step))
        _loss(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)
        places = {parameter.grad.data_ptr() for parameter in ddp.parameters() if parameter.numel() > 30_000}
        if step > 1:  # buckets are rebuilt before the second
            assert places == before, "a step takes new memory"
        before = places


@PLAIT_ONLY
@over_both
@pytest.mark.parametrize("to_none", [True, False])
def test_large_gradients_keep_their_memory_step_after_step(pool: Pool, to_none: bool, transport: str) -> None:
    pool.run(_in_place, 2, transport, to_none)


def _let_go(transport: str) -> None:
    init_gloo()
    gc.collect()
    gc.disable()
    try:
        module = Mixed()
        ddp = wrapped(module, transport)
        for step in range(3):
            _loss(ddp, dist.get_rank(), step).backward()
            module.zero_grad()
        parts = [weakref.ref(it) for it in (ddp.reducer, ddp.logger, *ddp.reducer.buckets)]
        del ddp
        assert all(part() is None for part in parts), "the collector has to find it"
    finally:
        gc.enable()


@PLAIT_ONLY
@over_both
def test_the_memory_of_buckets_is_free_as_soon_as_the_wrapper_is(pool: Pool, transport: str) -> None:
    pool.run(_let_go, 2, transport)


def _first_step(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Mixed(), transport, bucket_cap_mb=0.001)
    events: list[str] = []

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        events.append(f"bucket {bucket.index()}")
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    ddp.module.into.weight.register_hook(lambda _: events.append("the first layer"))
    _loss(ddp, dist.get_rank()).backward()
    assert events.index("bucket 0") < events.index("the first layer")


@PLAIT_ONLY
@over_both
def test_buckets_are_reduced_while_the_first_backward_runs(pool: Pool, transport: str) -> None:
    pool.run(_first_step, 2, transport)


def _looked_at(transport: str) -> None:
    """Optimizers and hooks that read `.grad` after backward find the mean, in whatever memory it is."""
    init_gloo()
    ddp = wrapped(Mixed(), transport)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: _loss(it, rank, step))
        _loss(ddp, dist.get_rank(), step).backward()
        total = nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        wanted = torch.stack([it.norm() for it in expected.values() if it is not None]).norm()
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-12)
        optimizer.step()


@over_both
def test_gradients_are_clipped_and_stepped_with(pool: Pool, transport: str) -> None:
    pool.run(_looked_at, 2, transport)
