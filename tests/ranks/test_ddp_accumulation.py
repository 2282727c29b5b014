"""DistributedDataParallel: no_sync, several forwards and backwards, evaluation, failures."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.ddp import (
    PLAIT_ONLY,
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

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "batched": {"batched_grad_copy": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
}
in_all_ways = pytest.mark.parametrize("way", ARGUMENTS)


def of_step(step: int) -> Callable[[nn.Module, int], Tensor]:
    return lambda model, rank: loss_of(model, rank, step)


def of_steps(steps: list[int]) -> Callable[[nn.Module, int], Tensor]:
    return lambda model, rank: torch.stack([loss_of(model, rank, step) for step in steps]).sum()


def _without_sync(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    rank = dist.get_rank()
    for first in (0, 10, 20):
        ddp.zero_grad()
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
            for step in (first, first + 1):
                loss_of(ddp, rank, step).backward()
        assert ddp.require_backward_grad_sync
        local = mean_gradients(ddp.module, lambda it, _, f=first: of_steps([f, f + 1])(it, rank), 1)
        assert_gradients(ddp.module, local)
        loss_of(ddp, rank, first + 2).backward()
        assert_gradients(ddp.module, mean_gradients(ddp.module, of_steps([first, first + 1, first + 2])))


@over_both
@in_all_ways
def test_gradients_stay_local_under_no_sync_and_the_next_backward_averages_their_sum(
    pool: Pool, way: str, transport: str
) -> None:
    pool.run(_without_sync, 2, transport, ARGUMENTS[way])


def _sync_is_of_the_forward() -> None:
    init_gloo()
    ddp = wrapped(Layers())
    expected, rank = mean_gradients(ddp.module), dist.get_rank()
    loss = loss_of(ddp, rank)
    with ddp.no_sync():
        loss.backward()
    assert_gradients(ddp.module, expected)  # the forward was outside: it is synchronised
    ddp.zero_grad()
    with ddp.no_sync():
        loss = loss_of(ddp, rank)
    loss.backward()
    assert_gradients(ddp.module, mean_gradients(ddp.module, lambda it, _: loss_of(it, rank), 1))
    ddp.zero_grad()
    loss_of(ddp.module, rank).backward()  # past the wrapper
    assert_gradients(ddp.module, mean_gradients(ddp.module, lambda it, _: loss_of(it, rank), 1))
    with pytest.raises(ZeroDivisionError), ddp.no_sync():
        raise ZeroDivisionError
    assert ddp.require_backward_grad_sync
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync


def test_it_is_the_forward_that_decides_whether_a_backward_synchronises(pool: Pool) -> None:
    pool.run(_sync_is_of_the_forward, 2)


def _forwards(transport: str, arguments: dict[str, Any]) -> None:
    """Two forwards, whose losses have one backward."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, of_steps([step, step + 5]))
        of_steps([step, step + 5])(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)


@over_both
@in_all_ways
def test_two_forwards_have_one_backward(pool: Pool, way: str, transport: str) -> None:
    pool.run(_forwards, 2, transport, ARGUMENTS[way])


def _backwards(transport: str, arguments: dict[str, Any]) -> None:
    """The same graph twice. The forward's reduction is over after the first backward; the second is local."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    expected = mean_gradients(ddp.module)
    local = mean_gradients(ddp.module, lambda it, _: loss_of(it, dist.get_rank()), 1)
    for _ in range(3):
        ddp.zero_grad()
        loss = loss_of(ddp, dist.get_rank())
        loss.backward(retain_graph=True)
        assert_gradients(ddp.module, expected)
        loss.backward()
        assert_gradients(ddp.module, {name: expected[name] + local[name] for name in local})


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "small buckets"])
def test_a_second_backward_of_one_forward_adds_local_gradients(pool: Pool, way: str, transport: str) -> None:
    pool.run(_backwards, 2, transport, ARGUMENTS[way])


class Halves(nn.Module):
    """Two outputs that share no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def _losses(model: nn.Module, rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    left, right = model(rows(rank, step))
    return left.square().mean(), right.square().mean()


def _by_halves(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Halves(), transport, **arguments)
    for step in range(4):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: sum(_losses(it, rank, step)))
        losses = _losses(ddp, dist.get_rank(), step)
        for loss in losses if step % 2 else losses[::-1]:
            loss.backward()
        assert_gradients(ddp.module, expected)


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "small buckets"])
def test_a_reduction_may_take_several_backwards(pool: Pool, way: str, transport: str) -> None:
    pool.run(_by_halves, 2, transport, ARGUMENTS[way])


def _backward_left_out(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    for step in range(4):
        ddp.zero_grad()
        for _ in range(step % 3):
            ddp(rows(7))  # with gradients on, but no backward follows
        expected = mean_gradients(ddp.module, of_step(step))
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)


@over_both
@in_all_ways
def test_a_forward_without_backward_leaves_the_next_step_as_it_was(
    pool: Pool, way: str, transport: str
) -> None:
    pool.run(_backward_left_out, 2, transport, ARGUMENTS[way])


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def _evaluated(transport: str, mode: str, arguments: dict[str, Any]) -> None:
    """Ranks evaluate different numbers of batches between steps: nothing is communicated."""
    init_gloo()
    ddp = wrapped(nn.Sequential(Layers(), nn.Dropout(0.5)), transport, **arguments)
    for step in range(3):
        ddp.eval()
        with MODES[mode]():
            for _ in range(dist.get_rank() * step):
                out = ddp(rows(7))
                assert torch.equal(out, ddp.module(rows(7)))
                assert not out.requires_grad
                assert out.is_inference() == (mode == "inference")
        ddp.module[0].train()
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, of_step(step))
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "unused"])
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_between_steps_communicates_nothing(
    pool: Pool, mode: str, way: str, transport: str
) -> None:
    pool.run(_evaluated, 2, transport, mode, ARGUMENTS[way])


def _penalty(model: nn.Module, rank: int) -> Tensor:
    """A loss with the norm of a gradient by the input: its backward differentiates twice."""
    x = rows(rank).requires_grad_()
    loss: Tensor = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def _double_backward(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    expected = mean_gradients(ddp.module, _penalty)
    for _ in range(3):
        ddp.zero_grad()
        _penalty(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "small buckets"])
def test_a_penalty_on_the_input_gradient_is_averaged_too(pool: Pool, way: str, transport: str) -> None:
    pool.run(_double_backward, 2, transport, ARGUMENTS[way])


def _create_graph(transport: str, model: nn.Module, arguments: dict[str, Any]) -> None:
    """backward(create_graph=True): gradients are means, with a graph of this rank's own computation."""
    init_gloo()
    ddp = wrapped(model, transport, **arguments)
    expected = mean_gradients(ddp.module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using .* with create_graph=True", UserWarning)
        warnings.filterwarnings("ignore", ".*an autograd kernel was not registered", UserWarning)
        for step in range(3):
            loss_of(ddp, dist.get_rank()).backward(create_graph=True)
            assert_gradients(ddp.module, expected)
            assert all(parameter.grad.requires_grad for parameter in ddp.parameters())
            if step == 0:  # torch's bucket keeps its graph from step to step
                weight = next(ddp.parameters())
                assert torch.autograd.grad(weight.grad.square().sum(), weight)[0].any()
            ddp.zero_grad()
    loss_of(ddp, dist.get_rank()).backward()
    assert_gradients(ddp.module, expected)
    assert not any(parameter.grad.requires_grad for parameter in ddp.parameters())


@over_both
def test_a_backward_may_create_a_graph(pool: Pool, transport: str) -> None:
    pool.run(_create_graph, 2, transport, nn.Linear(5, 3, bias=False, dtype=torch.float64), {})


@PLAIT_ONLY  # torch's class writes several gradients into one bucket in place, and fails
@over_both
@pytest.mark.parametrize("way", ["plain", "small buckets"])
def test_a_backward_of_several_parameters_may_create_a_graph(pool: Pool, way: str, transport: str) -> None:
    pool.run(_create_graph, 2, transport, Layers().double(), ARGUMENTS[way])


class Failing(torch.autograd.Function):
    """Passes its input on; its backward raises."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, fails: str = "") -> Tensor:
        if fails == "forward":
            raise ZeroDivisionError("on purpose")
        x = self.first(x)
        out: Tensor = self.last(Failing.apply(x) if fails == "backward" else x)
        return out


def _recovered(transport: str, arguments: dict[str, Any]) -> None:
    """An error in a forward does no harm. After one in a backward the module is wrapped again."""
    init_gloo()
    model = Careless()
    ddp = wrapped(model, transport, **arguments)
    for step in range(2):
        ddp.zero_grad()
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            ddp(rows(0), fails="forward")
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(model, mean_gradients(model, of_step(step)))
    ddp.zero_grad()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        ddp(rows(dist.get_rank()), fails="backward").sum().backward()
    ddp._remove_autograd_hooks()
    again = wrapped(model, transport, **arguments)
    for step in range(3):
        again.zero_grad()
        loss_of(again, dist.get_rank(), step).backward()
        assert_gradients(model, mean_gradients(model, of_step(step)))


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "unused"])
def test_a_module_is_wrapped_again_after_a_backward_that_failed(pool: Pool, way: str, transport: str) -> None:
    pool.run(_recovered, 2, transport, ARGUMENTS[way])


def _several_wrappers(transport: str) -> None:
    """Two models with a wrapper each, whose steps are interleaved, and one that both wrappers are around."""
    init_gloo()
    first, second = (wrapped(Layers(), transport) for _ in range(2))
    for step in range(3):
        for ddp in (first, second):
            ddp.zero_grad()
        expected = [mean_gradients(ddp.module, of_step(step)) for ddp in (first, second)]
        losses = [loss_of(ddp, dist.get_rank(), step) for ddp in (first, second)]
        torch.stack(losses).sum().backward()
        assert_gradients(first.module, expected[0])
        assert_gradients(second.module, expected[1])
    both = wrapped(nn.Sequential(wrapped(nn.Linear(5, 5), transport), nn.Linear(5, 3)), transport)
    loss_of(both, dist.get_rank()).backward()
    for parameter in both.parameters():
        assert_same(parameter.grad)


@over_both
def test_several_wrappers_live_side_by_side(pool: Pool, transport: str) -> None:
    pool.run(_several_wrappers, 2, transport)
