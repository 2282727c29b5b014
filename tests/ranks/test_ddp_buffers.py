"""DistributedDataParallel: buffers are rank 0's before a forward, or what a hook makes of them."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from support.ddp import (
    Layers,
    assert_gradients,
    assert_same,
    init_gloo,
    loss_of,
    mean_gradients,
    over_both,
    rows,
    wrapped,
)
from support.pool import Pool


class Counting(nn.Module):
    """Buffers of three dtypes, which the forward shows as it finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.full((4,), float(dist.get_rank())))
        self.register_buffer("count", torch.tensor(10 * dist.get_rank()))
        self.register_buffer("flags", torch.tensor([dist.get_rank() == 0, True]), persistent=False)
        self.seen: list[tuple[float, int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.mean[0].item(), int(self.count), bool(self.flags[0])))
        out: Tensor = self.layer(x)
        return out

    def change(self) -> None:
        """Other values on every rank."""
        rank = dist.get_rank()
        with torch.no_grad():
            self.mean += 1 + rank
            self.count += 5 * rank + 1
            self.flags[0] = rank == 0


def _step(ddp: nn.Module, step: int = 0) -> None:
    loss_of(ddp, dist.get_rank(), step).backward()


def _broadcast(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Counting(), transport)
    model = ddp.module
    for _ in range(3):
        _step(ddp)
        model.change()
    assert model.seen == [(0.0, 0, True), (1.0, 1, True), (2.0, 2, True)]
    with torch.no_grad():
        ddp(rows(0))  # follows a step that synchronised
        assert model.seen[-1] == (3.0, 3, True)
        model.change()
        own = (model.mean[0].item(), int(model.count), bool(model.flags[0]))
        ddp(rows(0))  # and this one does not
        assert model.seen[-1] == own
    _step(ddp)
    assert model.seen[-1] == own  # as torch: it follows a forward without gradient
    _step(ddp)
    assert model.seen[-1] == (4.0, 4, True)


@over_both
def test_buffers_are_rank_0s_in_a_forward_that_follows_one_that_synchronises(
    pool: Pool, transport: str
) -> None:
    pool.run(_broadcast, 2, transport)


def _not_under_no_sync(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Counting(), transport)
    model, rank = ddp.module, dist.get_rank()
    _step(ddp)
    model.change()
    with ddp.no_sync():
        _step(ddp)
        assert model.seen[-1] == (1.0, 1, True)  # what came before was synchronised
        model.change()
        own = (model.mean[0].item(), int(model.count), bool(model.flags[0]))
        _step(ddp)
        assert model.seen[-1] == own
        assert own == ((2.0, 2, True) if rank == 0 else (3.0, 7, False))
        assert not ddp.require_forward_param_sync
        assert not ddp.will_sync_module_buffers()
    _step(ddp)
    assert model.seen[-1] == own
    _step(ddp)
    assert model.seen[-1] == (2.0, 2, True)


@over_both
def test_buffers_are_not_broadcast_under_no_sync(pool: Pool, transport: str) -> None:
    pool.run(_not_under_no_sync, 2, transport)


def _version_kept(transport: str) -> None:
    """BatchNorm's buffers are saved for backward: two forwards before one backward must not spoil them."""
    init_gloo()
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    ddp = wrapped(model, transport)
    _step(ddp)
    before = model[1].running_mean._version
    ddp.eval()
    first, second = ddp(rows(dist.get_rank())), ddp(rows(dist.get_rank(), 1))
    assert model[1].running_mean._version == before
    (first.square().mean() + second.square().mean()).backward()
    for parameter in model.parameters():
        assert_same(parameter.grad)
    ddp.train()
    for step in range(3):
        _step(ddp, step)
    ddp.eval()
    ddp(rows(0))
    for buffer in model.buffers():
        assert_same(buffer)


@over_both
def test_a_broadcast_leaves_the_version_counters_of_buffers(pool: Pool, transport: str) -> None:
    pool.run(_version_kept, 2, transport)


def _batch_norm(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    ddp = wrapped(model, transport, **arguments)
    for step in range(4):
        ddp.zero_grad()
        for buffer in model.buffers():  # as the forward will find them; the oracle's copy has them too
            dist.broadcast(buffer, 0)
        expected = mean_gradients(model, lambda it, rank, step=step: loss_of(it, rank, step))
        _step(ddp, step)
        assert_gradients(model, expected)


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_batch_norm_trains_with_each_rank_s_own_statistics(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_batch_norm, 2, transport, arguments)


def _reassigned() -> None:
    init_gloo()
    ddp = wrapped(Counting())
    _step(ddp)
    ddp.module.mean = torch.full((4,), 100.0 + dist.get_rank())
    _step(ddp)
    assert ddp.module.seen[-1][0] == 100.0
    assert ddp.modules_buffers[0] is ddp.module.mean


def test_a_buffer_that_was_replaced_is_broadcast_all_the_same(pool: Pool) -> None:
    pool.run(_reassigned, 2)


def _ignored() -> None:
    init_gloo()
    model = Counting()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["count"])
    ddp = wrapped(model)
    _step(ddp)
    assert model.seen[-1] == (0.0, 10 * dist.get_rank(), True)
    model.change()
    _step(ddp)
    assert model.seen[-1] == (1.0, 15 * dist.get_rank() + 1, True)


def test_an_ignored_buffer_is_each_rank_s_own(pool: Pool) -> None:
    pool.run(_ignored, 2)


def _left_alone() -> None:
    """forward_sync_buffers=False: at the start. The deprecated broadcast_buffers=False: not even then."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Counting(), forward_sync_buffers=False)
    assert not ddp.broadcast_buffers
    assert not ddp.will_sync_module_buffers()
    for _ in range(2):
        _step(ddp)
        ddp.module.change()
    assert ddp.module.seen == [(0.0, 0, True), (1.0 + rank, 5 * rank + 1, rank == 0)]
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        ddp = wrapped(Counting(), broadcast_buffers=False)
    _step(ddp)
    _step(ddp)
    assert ddp.module.seen == [(float(rank), 10 * rank, rank == 0)] * 2
    with pytest.warns(FutureWarning, match="its value is ignored"):
        ddp = wrapped(Counting(), broadcast_buffers=False, forward_sync_buffers=True)
    assert ddp.forward_sync_buffers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(Counting(), forward_sync_buffers=True)


def test_buffers_are_not_broadcast_when_disabled(pool: Pool) -> None:
    pool.run(_left_alone, 2)


def _summed(calls: list[str], buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
    """A buffer hook: the sum over ranks; futures, which the end of backward waits for."""
    calls.append(",".join(buffers))
    works = [dist.all_reduce(buffers[name], async_op=True) for name in ("mean", "count")]
    return [work.get_future() for work in works]


def _summed_at_once(calls: list[str], buffers: dict[str, Tensor]) -> None:
    calls.append(",".join(buffers))
    for name in ("mean", "count"):
        dist.all_reduce(buffers[name])


def _hooked(before: bool) -> None:
    init_gloo()
    ddp = wrapped(Counting())
    calls: list[str] = []
    if before:
        place = _BufferCommHookLocation.PRE_FORWARD
        ddp._register_buffer_comm_hook(calls, _summed_at_once, place)
    else:
        ddp._register_buffer_comm_hook(calls, _summed)
    model = ddp.module
    with torch.no_grad():
        model.mean.fill_(1.0 + dist.get_rank())
        model.count.fill_(1)
    expected = mean_gradients(model)
    _step(ddp)
    assert calls == ["mean,count,flags"]
    assert_gradients(model, expected)
    if before:
        assert model.seen[-1][:2] == (3.0, 2)
    else:
        assert model.seen[-1][:2] == (1.0 + dist.get_rank(), 1)
    assert (model.mean[0].item(), int(model.count)) == (3.0, 2)  # backward has waited for it
    _step(ddp)
    assert (model.mean[0].item(), int(model.count)) == (6.0, 4)
    with ddp.no_sync():
        _step(ddp)
        _step(ddp)
    assert len(calls) == 3  # the first of the two follows a forward that synchronises
    with pytest.raises(AssertionError, match="hook must be callable"):
        ddp._register_buffer_comm_hook(None, 3)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_hook_combines_buffers_before_or_after_the_forward(pool: Pool, before: bool) -> None:
    pool.run(_hooked, 2, before)


def _large() -> None:
    """Buffers of more than one message, none of them trained."""
    init_gloo()
    model = Layers()
    for number in range(3):
        model.register_buffer(f"table_{number}", torch.randn(300_000) + dist.get_rank())
    ddp = wrapped(model)
    for _ in range(2):
        for buffer in model.buffers():
            buffer += dist.get_rank()
        _step(ddp)
    for buffer in model.buffers():
        assert_same(buffer)


def test_large_buffers_are_broadcast_whole(pool: Pool) -> None:
    pool.run(_large, 2)
