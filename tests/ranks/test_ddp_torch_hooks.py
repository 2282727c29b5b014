"""DistributedDataParallel: torch's own communication hooks and optimizers run on it unchanged."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from support import torch_backend
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
from support.ddp_optim import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    post_localSGD_hook,
)
from support.pool import Pool


def _bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Under another name: torch refuses to register it where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _bf16_wrapped(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)


HOOKS: dict[str, tuple[Callable[..., Any], float]] = {
    "allreduce": (default_hooks.allreduce_hook, 1e-9),
    "fp16": (default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (_bf16, 2e-2),
    "fp16 wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-3),
    "bf16 wrapper": (_bf16_wrapped, 2e-2),
}


def _compressed(transport: str, name: str, arguments: dict[str, Any]) -> None:
    group = init_gloo()
    hook, near = HOOKS[name]
    ddp = wrapped(Layers(), transport, **arguments)
    ddp.register_comm_hook(group, hook)
    for step in range(4):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        for key, parameter in ddp.module.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[key], rtol=near, atol=near * 0.1)
            assert_same(parameter.grad)


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
@pytest.mark.parametrize("name", HOOKS)
def test_compressing_hooks_give_the_mean_as_far_as_their_bits_go(
    pool: Pool, name: str, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_compressed, 2, transport, name, arguments)


def _nothing(arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), **arguments)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp, dist.get_rank()).backward()
        assert_gradients(
            ddp.module, mean_gradients(ddp.module, lambda it, _: loss_of(it, dist.get_rank()), 1)
        )


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_the_hook_that_does_nothing_leaves_local_gradients(pool: Pool, arguments: dict[str, Any]) -> None:
    pool.run(_nothing, 2, arguments)


# The batched hook of torch 2.13 asserts three dimensions of a matrix: only its first steps run.
POWER: dict[str, tuple[Callable[..., Any], int]] = {
    "PowerSGD": (powerSGD_hook.powerSGD_hook, 2),
    "batched PowerSGD": (powerSGD_hook.batched_powerSGD_hook, 7),
}


def _power(transport: str, name: str) -> None:
    """At full rank the factors lose nothing; before they begin, it is an all-reduce."""
    group = init_gloo()
    ddp = wrapped(nn.Linear(6, 6, bias=False), transport)
    hook, start = POWER[name]
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=6,
        start_powerSGD_iter=start,
        min_compression_rate=0.1,
        orthogonalization_epsilon=1e-12,
        use_error_feedback=True,
    )
    ddp.register_comm_hook(state, hook)

    def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
        return model(rows(rank, step, (8, 6))).square().mean()

    for step in range(6):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss(it, rank, step))
        loss(ddp, dist.get_rank(), step).backward()
        near = 1e-9 if step < start else 1e-6
        torch.testing.assert_close(ddp.module.weight.grad, expected["weight"], rtol=near, atol=near)
        assert_same(ddp.module.weight.grad)
    assert state.iter == 6


@over_both
@pytest.mark.parametrize("name", POWER)
def test_power_sgd_of_full_rank_gives_the_mean(pool: Pool, name: str, transport: str) -> None:
    pool.run(_power, 2, transport, name)


def _close(model: nn.Module, alone: nn.Module) -> None:
    for ours, one in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-9, atol=1e-12)
        assert_same(ours)


def _train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ranks = range(dist.get_world_size())
        torch.stack([loss_of(model, rank, step) for rank in ranks]).mean().backward()
        optimizer.step()


def _local_sgd(transport: str) -> None:
    """Two steps of means, then steps of each rank by itself with weights averaged every second step."""
    group = init_gloo()
    ddp = wrapped(Layers(), transport)
    copies = [copy.deepcopy(ddp.module) for _ in range(2)]
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=group,
        subgroup=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        start_localSGD_iter=2,
        post_local_gradient_allreduce=False,
    )
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
        optimizer.step()
        gradients = [
            torch.autograd.grad(loss_of(it, r, step), [*it.parameters()]) for r, it in enumerate(copies)
        ]
        means = [sum(parts) / 2 for parts in zip(*gradients, strict=True)]
        with torch.no_grad():
            for r, it in enumerate(copies):
                for parameter, gradient in zip(
                    it.parameters(), means if step < 2 else gradients[r], strict=True
                ):
                    parameter -= 0.1 * gradient
            if step >= 2 and (step - 2) % 2 == 0:
                for pair in zip(*(it.parameters() for it in copies), strict=True):
                    mean = (pair[0] + pair[1]) / 2
                    for parameter in pair:
                        parameter.copy_(mean)
        for ours, one in zip(ddp.parameters(), copies[dist.get_rank()].parameters(), strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-9, atol=1e-12)


@over_both
def test_post_local_sgd(pool: Pool, transport: str) -> None:
    pool.run(_local_sgd, 2, transport)


ZERO_HOOKS = {"at the end": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


def _zero_hook(transport: str, name: str, sharded: bool) -> None:
    """Over plait's backend: torch refuses Gloo. The first two steps, as documented, change no weight."""
    torch.set_default_dtype(torch.float64)
    group = torch_backend.join()
    torch.manual_seed(dist.get_rank())
    ddp = wrapped(Layers(), transport, process_group=group, gradient_as_bucket_view=True)
    alone = copy.deepcopy(ddp.module)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    hook = ZERO_HOOKS[name](default_hooks.allreduce_hook, ddp, optimizer, shard_buckets=sharded)
    ddp.register_comm_hook(None, hook)
    for step in range(6):
        ddp.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
    _train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(2, 6))
    _close(ddp.module, alone)


@over_both
@pytest.mark.parametrize("sharded", [False, True], ids=["whole buckets", "sharded"])
@pytest.mark.parametrize("name", ZERO_HOOKS)
def test_a_zero_optimizer_steps_in_a_hook(pool: Pool, name: str, sharded: bool, transport: str) -> None:
    pool.run(_zero_hook, 2, transport, name, sharded)


def _zero(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    alone = copy.deepcopy(ddp.module)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, lr=0.1, parameters_as_bucket_view=bool(arguments)
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
        optimizer.step()
    _train_alone(alone, torch.optim.Adam(alone.parameters(), lr=0.1), range(4))
    _close(ddp.module, alone)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 4


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_a_zero_optimizer_with_a_wrapped_module(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_zero, 2, transport, arguments)


def _in_backward(transport: str, views: bool, before: bool) -> None:
    init_gloo()
    model = Layers()
    alone = Layers()
    if before:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = wrapped(model, transport, gradient_as_bucket_view=views)
    alone.load_state_dict(model.state_dict())
    if not before:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    assert len(_get_in_backward_optimizers(model)) == 4
    for step in range(4):
        loss_of(ddp, dist.get_rank(), step).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    _train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(4))
    _close(model, alone)


@PLAIT_ONLY  # torch's hook for it asks for an accelerator's stream
@over_both
@pytest.mark.parametrize("views", [False, True], ids=["copied", "views"])
@pytest.mark.parametrize("before", [False, True], ids=["wrapped before", "wrapped after"])
def test_an_optimizer_applied_in_backward(pool: Pool, before: bool, views: bool, transport: str) -> None:
    pool.run(_in_backward, 2, transport, views, before)


def _fused(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport)
    alone = copy.deepcopy(ddp.module)
    ddp._register_fused_optim(torch.optim.SGD, 0.1)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
    _train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(4))
    _close(ddp.module, alone)


@over_both
def test_a_fused_optimizer_steps_when_a_bucket_is_reduced(pool: Pool, transport: str) -> None:
    pool.run(_fused, 2, transport)


def _delayed(transport: str) -> None:
    """Some parameters are reduced in a message of their own, which one parameter's gradient starts.

    No rank waits for that message.
    """
    init_gloo()
    model = Layers()
    names = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("last")]
    ddp = wrapped(
        model, transport, delay_all_reduce_named_params=names, param_to_hook_all_reduce=model.first.weight
    )
    assert isinstance(ddp, DistributedDataParallel)
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(model, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        until_s = time.monotonic() + 10
        while not torch.allclose(model.last.weight.grad, expected["last.weight"]):
            assert time.monotonic() < until_s
        assert_gradients(model, expected)


@over_both
def test_a_delayed_message_for_some_parameters(pool: Pool, transport: str) -> None:
    pool.run(_delayed, 2, transport)
