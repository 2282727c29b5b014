"""DistributedDataParallel: what it refuses, and in which words, which programs match."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.errors import DDPError
from support.ddp import (
    PLAIT_ONLY,
    Layers,
    assert_gradients,
    init_gloo,
    loss_of,
    mean_gradients,
    rows,
    wrapped,
)
from support.pool import Pool


def _refused() -> None:
    init_gloo()
    frozen = Layers().requires_grad_(False)
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed when a module doesn't"):
        wrapped(frozen)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        lazy = nn.Sequential(nn.LazyLinear(3))
    text = "Modules with uninitialized parameters can't be used with `DistributedDataParallel`"
    with pytest.raises(RuntimeError, match=text):
        wrapped(lazy)
    with pytest.raises(ValueError, match="device_ids can only be None or contain a single element"):
        wrapped(Layers(), device_ids=[0, 1])
    with pytest.raises(ValueError, match="device_ids and output_device arguments only work with"):
        wrapped(Layers(), device_ids=[0])
    with pytest.raises(ValueError, match="need to be set at the same time"):
        wrapped(model := Layers(), param_to_hook_all_reduce=model.last.weight)
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        wrapped(nn.Sequential(Layers(), nn.SyncBatchNorm(3)))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        wrapped(Layers(), bucket_cap=3)
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrapped(Layers(), check_reduction=True)


def test_the_constructor_refuses_invalid_arguments(pool: Pool) -> None:
    pool.run(_refused, 2)


def _initialised() -> None:
    init_gloo()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        lazy = nn.Sequential(nn.LazyLinear(3))
    lazy(rows(0))
    ddp = wrapped(lazy)
    expected = mean_gradients(lazy)
    loss_of(ddp, dist.get_rank()).backward()
    assert_gradients(lazy, expected)


def test_a_lazy_module_that_has_run_is_wrapped(pool: Pool) -> None:
    pool.run(_initialised, 2)


class Sized(nn.Module):
    def __init__(self, size: int, strides: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.odd = nn.ParameterList([torch.zeros(size, 2, 3, 3).to(memory_format=strides)])


def _mismatched(kind: str) -> None:
    init_gloo()
    rank = dist.get_rank()
    if kind == "sizes":
        model: nn.Module = Sized(2 + rank)
    elif kind == "strides":
        model = Sized(2, torch.channels_last if rank else torch.contiguous_format)
    else:
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(1 + rank)))
    # In torch rank 0, which the others are held to, learns of it by waiting in vain.
    group = dist.new_group(timeout=timedelta(seconds=1))
    odd = r"params\[2\] in this process with sizes " + (r"\[3, 2, 3, 3\]" if kind == "sizes" else "")
    text = (
        "expects same model across all ranks" if kind == "number" else f"{odd}.*appears not to match {kind}"
    )
    text = text if rank or kind == "number" else "DDP expects same model across all ranks"
    with pytest.raises(DDPError, match=text):
        wrapped(model, process_group=group)


@pytest.mark.parametrize("kind", ["sizes", "strides", "number"])
def test_models_that_differ_between_ranks_are_refused(pool: Pool, kind: str) -> None:
    pool.run(_mismatched, 2, kind, timeout_s=20)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        x = self.used(x)
        return self.spare(x) if both else x


@contextmanager
def debugging(level: dist.DebugLevel) -> Iterator[None]:
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def _unfinished() -> None:
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Heads())
    ddp._check_reducer_finalized()
    ddp(rows(rank)).sum().backward()  # says nothing yet
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp._check_reducer_finalized()
    with torch.no_grad():
        ddp(rows(rank))
    text = (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "(.|\n)*find_unused_parameters=True"
        f"(.|\n)*Parameter indices which did not receive grad for rank {rank}: 2 3"
    )
    with pytest.raises(RuntimeError, match=text):
        ddp(rows(rank))


def test_the_forward_after_an_unfinished_reduction_names_the_parameters(pool: Pool) -> None:
    pool.run(_unfinished, 2)


def _unfinished_by_name() -> None:
    init_gloo()
    with debugging(dist.DebugLevel.INFO):
        ddp = wrapped(Heads())
        ddp(rows(dist.get_rank())).sum().backward()
        with pytest.raises(RuntimeError, match=r"spare\.weight.*spare\.bias|spare\.bias.*spare\.weight"):
            ddp(rows(dist.get_rank()))


def test_names_are_in_the_error_when_debugging(pool: Pool) -> None:
    pool.run(_unfinished_by_name, 2)


def _all_reduced_again() -> None:
    """The reduction that lacked parameters is finished by a later backward of the same forward."""
    init_gloo()
    ddp = wrapped(Heads())

    def losses(model: Any, rank: int) -> list[Tensor]:
        return [model(rows(rank)).sum(), getattr(model, "module", model).spare(rows(rank)).sum()]

    expected = mean_gradients(ddp.module, lambda it, rank: sum(losses(it, rank)))
    for loss in losses(ddp, dist.get_rank()):
        loss.backward()
    ddp._check_reducer_finalized()
    assert_gradients(ddp.module, expected)
    ddp(rows(dist.get_rank()), both=True).sum().backward()


def test_a_later_backward_finishes_the_reduction(pool: Pool) -> None:
    pool.run(_all_reduced_again, 2)


class Twice(nn.Module):
    """A layer that is checkpointed twice, reentrantly: its gradients come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def _ready_twice(arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Twice(), **arguments)
    text = r"Expected to mark a variable ready only once(.|\n)*[Pp]arameter at index [23]"
    with pytest.raises(RuntimeError, match=text):
        loss_of(ddp, dist.get_rank()).backward()


@pytest.mark.parametrize("arguments", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_a_gradient_that_comes_twice_is_refused(pool: Pool, arguments: dict[str, Any]) -> None:
    pool.run(_ready_twice, 2, arguments)


def _ready_twice_by_name() -> None:
    init_gloo()
    with debugging(dist.DebugLevel.INFO):
        ddp = wrapped(Twice())
        with pytest.raises(RuntimeError, match=r"ready only once(.|\n)*layer\.(weight|bias)"):
            loss_of(ddp, dist.get_rank()).backward()


def test_a_gradient_that_comes_twice_is_named_when_debugging(pool: Pool) -> None:
    pool.run(_ready_twice_by_name, 2)


def _changed_graph(more: bool) -> None:
    init_gloo()
    ddp = wrapped(Heads(), static_graph=True)
    rank = dist.get_rank()
    ddp(rows(rank), both=not more).sum().backward()
    if more:
        text = "Your training graph has changed in this iteration.*unused in first iteration"
        with pytest.raises(RuntimeError, match=text):
            ddp(rows(rank), both=True).sum().backward()
    else:
        ddp(rows(rank)).sum().backward()
        text = (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            "This error indicates that your training graph has changed in this iteration.*"
            "not compatible with static_graph set to True.\n"
            "Parameter indices which did not receive grad for"
        )
        with pytest.raises(RuntimeError, match=text):
            ddp(rows(rank))
    logged = ddp._get_ddp_logging_data()
    assert logged["has_error"]
    assert "graph has changed" in logged["error"] or "finished reduction" in logged["error"]


@pytest.mark.parametrize("more", [True, False], ids=["more", "fewer"])
def test_a_static_graph_that_changes_is_refused(pool: Pool, more: bool) -> None:
    pool.run(_changed_graph, 2, more)


@PLAIT_ONLY
def test_an_unknown_transport_is_refused(pool: Pool) -> None:
    pool.run(_unknown_transport, 2)


def _unknown_transport() -> None:
    init_gloo()
    with pytest.raises(Exception, match="pigeon"):
        wrapped(Layers(), "pigeon")


def _logged() -> None:
    """An error of the constructor raises as it is; one of a step is in the logging data."""
    init_gloo()
    ddp = wrapped(Heads())
    assert not ddp._get_ddp_logging_data().get("has_error")
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    logged = ddp._get_ddp_logging_data()
    assert logged["has_error"]
    assert "sample rate" in logged["error"]


def test_errors_are_in_the_logging_data(pool: Pool) -> None:
    pool.run(_logged, 2)
