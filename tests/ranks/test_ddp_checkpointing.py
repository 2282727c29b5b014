"""DistributedDataParallel: activation checkpointing, reentrant or not, of one layer several times."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.ddp import (
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

both_kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copied", "views"])


class Model(nn.Module):
    """Layers, of which the middle one is checkpointed `times` times. `shared`: the last has its weights."""

    def __init__(self, times: int, reentrant: bool, shared: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(5, 5) for _ in range(3))
        if shared:
            self.last.weight = self.middle.weight
        if spare:
            self.spare = nn.Linear(5, 5)
        self.times, self.reentrant = times, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self._block, x, use_reentrant=self.reentrant)
        out: Tensor = self.last(x)
        return out

    def _block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(x))


def _parity(transport: str, model: Model, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(model, transport, **arguments)
    assert_steps(ddp, 4)


@over_both
@VIEWS
@both_kinds
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_layer_checkpointed_once(
    pool: Pool, static: bool, reentrant: bool, views: bool, transport: str
) -> None:
    arguments = {"static_graph": static, "gradient_as_bucket_view": views}
    pool.run(_parity, 2, transport, Model(1, reentrant).double(), arguments)


@over_both
@VIEWS
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    ("reentrant", "static"), [(False, False), (False, True), (True, True)], ids=["non", "static", "reentrant"]
)
def test_a_layer_checkpointed_several_times(
    pool: Pool, reentrant: bool, static: bool, shared: bool, views: bool, transport: str
) -> None:
    """Reentrant: its gradients come in parts, which needs a static graph."""
    arguments = {"static_graph": static, "gradient_as_bucket_view": views}
    pool.run(_parity, 2, transport, Model(3, reentrant, shared).double(), arguments)


@over_both
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("way", ["unused", "static", "static reentrant"])
def test_activation_checkpoints_with_unused_parameters(
    pool: Pool, way: str, shared: bool, transport: str
) -> None:
    arguments = {"find_unused_parameters": True} if way == "unused" else {"static_graph": True}
    model = Model(2, way == "static reentrant", shared, spare=True).double()
    pool.run(_parity, 2, transport, model, arguments)


def _small_buckets(transport: str, model: Model) -> None:
    _parity(transport, model, {"bucket_cap_mb": 0.0001, "static_graph": model.reentrant})


@over_both
@both_kinds
def test_checkpoints_in_small_buckets(pool: Pool, reentrant: bool, transport: str) -> None:
    pool.run(_small_buckets, 2, transport, Model(2, reentrant).double())


def _sharing_refused(model: Model, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(model, **arguments)
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        loss_of(ddp, dist.get_rank()).backward()


@pytest.mark.parametrize("way", ["shared", "twice", "unused"])
def test_a_reentrant_checkpoint_whose_gradients_come_in_parts_is_refused(pool: Pool, way: str) -> None:
    model = Model(2 if way == "twice" else 1, reentrant=True, shared=way == "shared", spare=way == "unused")
    pool.run(_sharing_refused, 2, model.double(), {"find_unused_parameters": way == "unused"})


class Dynamic(nn.Module):
    """The number of times that a layer is checkpointed changes from step to step, and by rank."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(5, 5) for _ in range(3))
        if shared:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        for _ in range(times):
            x = torch.tanh(checkpoint(self.second, x, use_reentrant=False))
        out: Tensor = self.last(x)
        return out


def _dynamic(transport: str, shared: bool) -> None:
    init_gloo()
    ddp = wrapped(Dynamic(shared), transport, find_unused_parameters=True)
    for step in range(5):
        ddp.zero_grad()

        def loss(model: nn.Module, rank: int, step: int = step) -> Tensor:
            return model(rows(rank, step), (step + rank) % 3 if step else 0).square().mean()

        expected = mean_gradients(ddp.module, loss)
        loss(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)


@over_both
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_checkpoints_that_change_from_step_to_step(pool: Pool, shared: bool, transport: str) -> None:
    pool.run(_dynamic, 2, transport, shared)


def _accumulated(transport: str, model: Model) -> None:
    init_gloo()
    ddp = wrapped(model, transport, static_graph=model.reentrant)
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(model, lambda it, r: loss_of(it, r, 0) + loss_of(it, r, 1))
        if step:
            with ddp.no_sync():
                loss_of(ddp, dist.get_rank(), 0).backward()
        else:
            expected = mean_gradients(model, lambda it, r: loss_of(it, r, 1))
        loss_of(ddp, dist.get_rank(), 1).backward()
        assert_gradients(model, expected)


@over_both
@both_kinds
def test_checkpoints_accumulate(pool: Pool, reentrant: bool, transport: str) -> None:
    pool.run(_accumulated, 2, transport, Model(1 + reentrant, reentrant).double())
