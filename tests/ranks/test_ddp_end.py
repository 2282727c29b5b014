"""DistributedDataParallel: what is left of it when it is let go, and what a profile shows."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ddp import Layers, assert_gradients, init_gloo, loss_of, mean_gradients, over_both, wrapped
from support.pool import Pool

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def _let_go(transport: str, arguments: dict[str, Any]) -> None:
    """Its module goes on by itself: rank 0 takes a step that the others do not."""
    init_gloo()
    model = Layers()
    ddp = wrapped(model, transport, **arguments)
    for step in range(3):
        loss_of(ddp, dist.get_rank(), step).backward()
    alive = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert alive() is None
    local = mean_gradients(model, lambda it, _: loss_of(it, dist.get_rank()), 1)
    if dist.get_rank() == 0:
        model.zero_grad()
        loss_of(model, 0).backward()
        assert_gradients(model, local)


@over_both
@pytest.mark.parametrize("way", ARGUMENTS)
def test_a_module_is_free_again_when_its_wrapper_is_deleted(pool: Pool, way: str, transport: str) -> None:
    pool.run(_let_go, 2, transport, ARGUMENTS[way])


def _many(transport: str) -> None:
    """Wrapper after wrapper around one module: of those before, nothing is left to wait for."""
    init_gloo()
    model = Layers()
    for step in range(12):
        ddp = wrapped(model, transport)
        model.zero_grad()
        expected = mean_gradients(model, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(model, expected)
        del ddp
        gc.collect()


@over_both
def test_one_module_has_many_wrappers_one_after_another(pool: Pool, transport: str) -> None:
    pool.run(_many, 2, transport)


def _without_hooks(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport)
    loss_of(ddp, dist.get_rank()).backward()
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    local = mean_gradients(ddp.module, lambda it, _: loss_of(it, dist.get_rank()), 1)
    loss_of(ddp.module, dist.get_rank()).backward()
    assert_gradients(ddp.module, local)


@over_both
def test_hooks_are_removed_on_request(pool: Pool, transport: str) -> None:
    pool.run(_without_hooks, 2, transport)


def _profiled() -> None:
    init_gloo()
    ddp = wrapped(Layers())
    with torch.autograd.profiler.profile() as profile:
        loss_of(ddp, dist.get_rank()).backward()
    assert "DistributedDataParallel.forward" in {event.name for event in profile.function_events}


def test_the_forward_is_a_range_of_the_profile(pool: Pool) -> None:
    pool.run(_profiled, 2)
