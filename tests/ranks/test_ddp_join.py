"""DistributedDataParallel: join, for ranks that run out of data before others."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

from support.ddp import Layers, assert_same, init_gloo, loss_of, over_both, rows, wrapped
from support.ddp_optim import ZeroRedundancyOptimizer
from support.pool import Pool

BATCHES = (2, 5, 3)  # of each rank


def _alone(model: nn.Module, by_initial: bool, ranks: int) -> list[Tensor]:
    """One process: the sum of the losses of those that still have data, over all ranks or over those."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(BATCHES[:ranks])):
        active = [rank for rank in range(ranks) if step < BATCHES[rank]]
        losses = torch.stack([loss_of(model, rank, step) for rank in active])
        optimizer.zero_grad()
        (losses.sum() / (ranks if by_initial else len(active))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _close(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-9, atol=1e-12)
        assert_same(parameter)


def _uneven(transport: str, by_initial: bool, arguments: dict[str, Any], hooked: bool = False) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    if hooked:  # which has the initial number of ranks in it
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    expected = _alone(copy.deepcopy(ddp.module), by_initial, dist.get_world_size())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(BATCHES[dist.get_rank()]):
            optimizer.zero_grad()
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
    _close(ddp.module, expected)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
}


@over_both
@pytest.mark.parametrize("way", ARGUMENTS)
@pytest.mark.parametrize("by_initial", [True, False], ids=["by all", "by active"])
def test_ranks_with_data_go_on_when_others_have_none(
    pool: Pool, by_initial: bool, way: str, transport: str
) -> None:
    pool.run(_uneven, 3, transport, by_initial, ARGUMENTS[way])


@over_both
def test_a_hook_communicates_for_ranks_that_have_joined(pool: Pool, transport: str) -> None:
    pool.run(_uneven, 3, transport, True, {}, hooked=True)


def _static(transport: str) -> None:
    """A static graph, whose first steps all ranks have."""
    init_gloo()
    ddp = wrapped(Layers(), transport, static_graph=True)
    expected = _alone(copy.deepcopy(ddp.module), True, 2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(BATCHES[dist.get_rank()]):
            optimizer.zero_grad()
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
    _close(ddp.module, expected)


@over_both
def test_a_static_graph_joins(pool: Pool, transport: str) -> None:
    pool.run(_static, 2, transport)


def _accumulating(transport: str) -> None:
    """Pairs of batches, the first of each under no_sync."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Layers(), transport)
    alone = copy.deepcopy(ddp.module)
    for model in (ddp, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if model is alone:
            for pair in range(3):
                optimizer.zero_grad()
                for r in range(2):
                    if pair < 1 + 2 * r:
                        ((loss_of(alone, r, 2 * pair) + loss_of(alone, r, 2 * pair + 1)) / 2).backward()
                optimizer.step()
            continue
        with ddp.join():
            for pair in range(1 + 2 * rank):
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss_of(ddp, rank, 2 * pair).backward()
                loss_of(ddp, rank, 2 * pair + 1).backward()
                optimizer.step()
    _close(ddp.module, [parameter.detach() for parameter in alone.parameters()])


@over_both
def test_no_sync_inside_join(pool: Pool, transport: str) -> None:
    pool.run(_accumulating, 2, transport)


def _early(transport: str) -> None:
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Layers(), transport)
    steps = 0

    def train() -> None:
        nonlocal steps
        with ddp.join(throw_on_early_termination=True):
            for step in range(BATCHES[rank]):
                loss_of(ddp, rank, step).backward()
                steps += 1

    with pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"):
        train()
    assert steps == min(BATCHES[: dist.get_world_size()])
    for parameter in ddp.parameters():
        assert_same(parameter.grad)


@over_both
def test_all_ranks_end_when_one_has_no_more_data_if_so_asked(pool: Pool, transport: str) -> None:
    pool.run(_early, 3, transport)


def _disabled() -> None:
    init_gloo()
    ddp = wrapped(Layers())
    expected = _even(copy.deepcopy(ddp.module))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for enable in (False, True):
        with ddp.join(enable=enable):
            for step in range(2):
                optimizer.zero_grad()
                loss_of(ddp, dist.get_rank(), step).backward()
                optimizer.step()
    _close(ddp.module, expected)


def _even(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 1, 0, 1):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank, step) for rank in range(2)]).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_join_of_even_data_changes_nothing_enabled_or_not(pool: Pool) -> None:
    pool.run(_disabled, 2)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1 + dist.get_rank()
        out: Tensor = self.layer(x)
        return out


def _with_buffers(transport: str) -> None:
    """Buffers come from the last rank that has data; in the end all have its model."""
    init_gloo()
    ddp = wrapped(Counting(), transport)
    with ddp.join():
        for step in range(BATCHES[dist.get_rank()]):
            loss_of(ddp, dist.get_rank(), step).backward()
    assert_same(ddp.module.count)
    # Twice rank 2's, whose count is the one that is broadcast while it has data; then three times rank 1's.
    assert ddp.module.count.item() == 3 + 3 + 2 + 2 + 2


@over_both
def test_buffers_come_from_a_rank_that_has_data(pool: Pool, transport: str) -> None:
    pool.run(_with_buffers, 3, transport)


def _owned(model: nn.Module, owners: list[int]) -> list[Tensor]:
    """As `_alone`, but a rank without data updates its parameters by the last gradient it has had."""
    kept: dict[int, Tensor] = {}
    for step in range(max(BATCHES)):
        model.zero_grad()
        losses = [loss_of(model, rank, step) for rank in range(3) if step < BATCHES[rank]]
        (torch.stack(losses).sum() / 3).backward()
        with torch.no_grad():
            for number, (parameter, owner) in enumerate(zip(model.parameters(), owners, strict=True)):
                if step < BATCHES[owner]:
                    kept[number] = parameter.grad
                parameter -= 0.1 * kept[number]
    return [parameter.detach() for parameter in model.parameters()]


def _several(transport: str, arguments: dict[str, Any]) -> None:
    """DDP and a ZeroRedundancyOptimizer join together."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    owners = [optimizer._param_to_rank[parameter] for parameter in ddp.parameters()]
    assert {*owners} == {0, 1, 2}
    expected = _owned(copy.deepcopy(ddp.module), owners)
    with Join([ddp, optimizer]):
        for step in range(BATCHES[dist.get_rank()]):
            ddp.zero_grad()  # not by the optimizer, which knows its own parameters alone
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
    _close(ddp.module, expected)


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_a_zero_optimizer_joins_together_with_it(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_several, 3, transport, arguments)


def _two_models(transport: str) -> None:
    init_gloo()
    models = [wrapped(Layers(), transport) for _ in range(2)]
    expected = [_alone(copy.deepcopy(ddp.module), True, 2) for ddp in models]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in models]
    with Join(models):
        for step in range(BATCHES[dist.get_rank()]):
            for ddp, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(ddp, dist.get_rank(), step).backward()
                optimizer.step()
    for ddp, wanted in zip(models, expected, strict=True):
        _close(ddp.module, wanted)


@over_both
def test_two_models_join_together(pool: Pool, transport: str) -> None:
    pool.run(_two_models, 2, transport)


class Branches(nn.Module):
    """A rank uses its own branch; no rank uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, number: int) -> Tensor:
        out: Tensor = self.branches[number](torch.tanh(self.trunk(x)))
        return out


def _unused(transport: str) -> None:
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Branches(), transport, find_unused_parameters=True)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, alone)]
    for step in range(5):
        optimizers[1].zero_grad()
        losses = [alone(rows(r, step), r).square().mean() for r in range(2) if step < BATCHES[r]]
        (torch.stack(losses).sum() / 2).backward()
        optimizers[1].step()
    with ddp.join():
        for step in range(BATCHES[rank]):
            optimizers[0].zero_grad()
            ddp(rows(rank, step), rank).square().mean().backward()
            optimizers[0].step()
            assert ddp.module.branches[2].weight.grad is None
    _close(ddp.module, [parameter.detach() for parameter in alone.parameters()])


@over_both
def test_unused_parameters_inside_join(pool: Pool, transport: str) -> None:
    pool.run(_unused, 2, transport)


def _again(transport: str) -> None:
    """Evaluation and steps outside follow a join, and another join follows them."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Layers(), transport)
    for _ in range(2):
        with ddp.join():
            for step in range(BATCHES[rank]):
                ddp.zero_grad()
                loss_of(ddp, rank, step).backward()
        with torch.no_grad():
            ddp(rows(0))
        ddp.zero_grad()
        loss_of(ddp, rank).backward()
        for parameter in ddp.parameters():
            assert_same(parameter.grad)


@over_both
def test_join_is_over_at_its_end(pool: Pool, transport: str) -> None:
    pool.run(_again, 2, transport)
