"""DistributedDataParallel: parameters that a step does not use, on one rank or on all; static graphs."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.ddp import (
    Layers,
    assert_gradients,
    assert_steps,
    init_gloo,
    loss_of,
    mean_gradients,
    over_both,
    rows,
    wrapped,
)
from support.pool import Pool

ARGUMENTS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "views": {"gradient_as_bucket_view": True},
    "small views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    "batched": {"batched_grad_copy": True},
}
in_all_ways = pytest.mark.parametrize("way", ARGUMENTS)


class Branches(nn.Module):
    """A trunk and branches, of which each step uses the given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        x = self.trunk(x)
        for number in used:
            x = torch.tanh(self.branches[number](x))
        return x


def of_branches(model: nn.Module, rank: int, used: tuple[int, ...], step: int = 0) -> Tensor:
    return model(rows(rank, step), used).square().mean()


# By step, then by rank, the branches that are used. No rank uses 3; the last step has all but it.
STEPS = [
    [(0,), (0,), (0,)],
    [(0,), (1,), (2,)],
    [(0, 1), (1,), ()],
    [(), (), ()],
    [(2, 0), (0, 2), (1,)],
    [(0, 1, 2), (2, 1, 0), (1, 2)],
]


def _branches(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Branches(), transport, find_unused_parameters=True, **arguments)
    for step, used in enumerate(STEPS):
        ddp.zero_grad()
        expected = mean_gradients(
            ddp.module, lambda it, rank, step=step, used=used: of_branches(it, rank, used[rank], step)
        )
        assert expected["branches.3.weight"] is None
        of_branches(ddp, dist.get_rank(), used[dist.get_rank()], step).backward()
        assert_gradients(ddp.module, expected)  # None where no rank has used it


@over_both
@in_all_ways
@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_used_by_no_rank_have_no_gradient_and_those_used_by_one_the_mean(
    pool: Pool, ranks: int, way: str, transport: str
) -> None:
    pool.run(_branches, ranks, transport, ARGUMENTS[way])


def _left_untouched(transport: str, arguments: dict[str, Any]) -> None:
    """An existing gradient is kept where no rank uses the parameter, and else averaged."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Branches(), transport, find_unused_parameters=True, **arguments)
    expected = mean_gradients(ddp.module, lambda it, r: of_branches(it, r, ((0,), (1,))[r]))
    for _ in range(3):
        for parameter in ddp.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        of_branches(ddp, rank, ((0,), (1,))[rank]).backward()
        for name, parameter in ddp.module.named_parameters():
            wanted = 1.0 + rank if expected[name] is None else 1.5 + expected[name]
            wanted = torch.as_tensor(wanted).expand_as(parameter)
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12, msg=name)


@over_both
@pytest.mark.parametrize("way", ["one bucket", "small buckets", "batched"])
def test_a_gradient_that_no_rank_adds_to_is_left_as_it_was(pool: Pool, way: str, transport: str) -> None:
    pool.run(_left_untouched, 2, transport, ARGUMENTS[way])


def _accumulated(transport: str, arguments: dict[str, Any]) -> None:
    """Parameters used under no_sync alone count as used in the step that synchronises."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Branches(), transport, find_unused_parameters=True, **arguments)
    steps = [((0,), (1,)), ((2,), (2,))]
    for _ in range(3):
        ddp.zero_grad()

        def both(model: nn.Module, rank: int) -> Tensor:
            return of_branches(model, rank, steps[0][rank], 0) + of_branches(model, rank, steps[1][rank], 1)

        expected = mean_gradients(ddp.module, both)
        with ddp.no_sync():
            of_branches(ddp, rank, steps[0][rank], 0).backward()
        of_branches(ddp, rank, steps[1][rank], 1).backward()
        assert_gradients(ddp.module, expected)


@over_both
@pytest.mark.parametrize("way", ["one bucket", "small buckets"])
def test_parameters_used_under_no_sync_count_as_used(pool: Pool, way: str, transport: str) -> None:
    pool.run(_accumulated, 2, transport, ARGUMENTS[way])


class Shared(nn.Module):
    """A weight that two layers share, one of which is not used on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.other.weight = self.used.weight

    def forward(self, x: Tensor, with_other: bool) -> Tensor:
        x = self.used(x)
        return self.other(x) if with_other else x


def _shared(transport: str) -> None:
    init_gloo()
    for arguments in ({"find_unused_parameters": True}, {"static_graph": True}):
        ddp = wrapped(Shared(), transport, **arguments)
        for step in range(3):
            ddp.zero_grad()

            def loss(model: nn.Module, rank: int, step: int = step) -> Tensor:
                return model(rows(rank, step), rank == 0).square().mean()

            expected = mean_gradients(ddp.module, loss)
            loss(ddp, dist.get_rank()).backward()
            assert_gradients(ddp.module, expected)


@over_both
def test_a_shared_weight_is_used_where_any_of_its_layers_is(pool: Pool, transport: str) -> None:
    pool.run(_shared, 2, transport)


def _static(transport: str, arguments: dict[str, Any], used: list[tuple[int, ...]]) -> None:
    init_gloo()
    ddp = wrapped(Branches(), transport, static_graph=True, **arguments)
    own = used[dist.get_rank()]
    for step in range(5):
        ddp.zero_grad()
        expected = mean_gradients(
            ddp.module, lambda it, rank, step=step: of_branches(it, rank, used[rank], step)
        )
        of_branches(ddp, dist.get_rank(), own, step).backward()
        assert_gradients(ddp.module, expected)
    ddp.zero_grad()
    loss = of_branches(ddp, dist.get_rank(), own) + of_branches(ddp.module, dist.get_rank(), ())
    assert loss.requires_grad


@over_both
@in_all_ways
@pytest.mark.parametrize("used", [[(0, 1), (0, 1)], [(0,), (1, 2)]], ids=["same", "other"])
def test_a_static_graph_detects_unused_parameters(
    pool: Pool, used: list[tuple[int, ...]], way: str, transport: str
) -> None:
    pool.run(_static, 2, transport, ARGUMENTS[way], used)


class Repeated(nn.Module):
    """One layer three times, and a parameter that is used outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


def _outside(transport: str) -> None:
    init_gloo()

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        out = model(rows(rank, step))
        return (out * getattr(model, "module", model).scale).square().mean()

    ddp = wrapped(Repeated(), transport, static_graph=True)
    assert_steps(ddp, 4, loss=loss)


@over_both
def test_a_static_graph_may_use_parameters_outside_of_the_forward(pool: Pool, transport: str) -> None:
    pool.run(_outside, 2, transport)


def _static_accumulation(transport: str) -> None:
    """no_sync from the second step on, and several forwards for one backward."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Layers(), transport, static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, r: loss_of(it, r, 0) + loss_of(it, r, 1))
        if step == 0:
            expected = mean_gradients(ddp.module, lambda it, r: loss_of(it, r, 1))
        else:
            with ddp.no_sync():
                loss_of(ddp, rank, 0).backward()
        loss_of(ddp, rank, 1).backward()
        assert_gradients(ddp.module, expected)
    twice = wrapped(Layers(), transport, static_graph=True)
    for _ in range(4):
        twice.zero_grad()
        expected = mean_gradients(twice.module, lambda it, r: loss_of(it, r, 0) + loss_of(it, r, 1))
        (loss_of(twice, rank, 0) + loss_of(twice, rank, 1)).backward()
        assert_gradients(twice.module, expected)


@over_both
def test_a_static_graph_accumulates(pool: Pool, transport: str) -> None:
    pool.run(_static_accumulation, 2, transport)


def _declared_later() -> None:
    init_gloo()
    ddp = wrapped(Branches())
    ddp._set_static_graph()
    assert ddp.static_graph
    with pytest.warns(UserWarning, match="You've set static_graph to be True"):
        ddp._set_static_graph()
    with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
        both = wrapped(Branches(), static_graph=True, find_unused_parameters=True)
    for model in (ddp, both):
        for step in range(3):
            model.zero_grad()
            expected = mean_gradients(
                model.module, lambda it, rank, step=step: of_branches(it, rank, (1,), step)
            )
            of_branches(model, dist.get_rank(), (1,), step).backward()
            assert_gradients(model.module, expected)


def test_a_graph_may_be_declared_static_after_construction(pool: Pool) -> None:
    pool.run(_declared_later, 2)


def _all_used() -> None:
    """Nothing is unused although it is looked for: a line on stderr at most, and the means."""
    init_gloo()
    ddp = wrapped(Layers(), find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_steps(ddp)


def test_looking_for_unused_parameters_where_there_are_none_is_no_error(pool: Pool) -> None:
    pool.run(_all_used, 2)


def _skipped(transport: str) -> None:
    """Ranks agree on what is unused: its buckets are not reduced."""
    init_gloo()
    num_reduced = []
    for skips in (False, True):
        ddp = wrapped(
            Branches(),
            transport,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skips,
            bucket_cap_mb=0.0001,
        )
        for step in range(3):
            ddp.zero_grad()
            expected = mean_gradients(
                ddp.module, lambda it, rank, step=step: of_branches(it, rank, (1,), step)
            )
            of_branches(ddp, dist.get_rank(), (1,), step).backward()
            assert_gradients(ddp.module, expected)
        num_reduced.append(ddp._get_ddp_logging_data()["num_buckets_reduced"])
    assert 0 < num_reduced[1] < num_reduced[0]


@over_both
def test_buckets_of_unused_parameters_are_skipped_when_asked_for(pool: Pool, transport: str) -> None:
    pool.run(_skipped, 2, transport)
