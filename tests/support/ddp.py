"""Helpers of the DistributedDataParallel tests: the class under test, ranks over Gloo, data, the reference.

DDP_UNDER_TEST=torch tests torch's own class: the tests state torch's contract, so all of them pass on it,
except those marked PLAIT_ONLY.
"""

import copy
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import plait

TRANSPORTS = ("auto", "group")
over_both = pytest.mark.parametrize("transport", TRANSPORTS)
PLAIT_ONLY = pytest.mark.skipif(os.environ.get("DDP_UNDER_TEST") == "torch", reason="torch's class differs")

Loss = Callable[[nn.Module, int], Tensor]  # of a model on a rank's rows


def init_gloo() -> dist.ProcessGroup:
    """Initialize the default process group over Gloo, set float64, and seed by rank."""
    torch.set_default_dtype(torch.float64)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['PLAIT_RENDEZVOUS_FILE']}-ddp", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(rank)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def wrapped(module: nn.Module, transport: str = "auto", **arguments: object) -> DistributedDataParallel:
    """Wrap a module in the class under test."""
    if os.environ.get("DDP_UNDER_TEST") == "torch":
        return DistributedDataParallel(module, **arguments)
    return plait.DistributedDataParallel(module, transport=transport, **arguments)


class Layers(nn.Module):
    """5 -> 7 -> 3, registered in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def rows(rank: int, step: int = 0, shape: tuple[int, ...] = (4, 5)) -> Tensor:
    """A rank's rows of a step, different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = model(rows(rank, step))
    return out.square().mean()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the parameters' gradients, or None."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


def mean_gradients(
    module: nn.Module, loss: Loss = loss_of, ranks: int | None = None
) -> dict[str, Tensor | None]:
    """Gradients of the mean over ranks of their losses, computed on a copy of the module."""
    copied = copy.deepcopy(module)
    copied.zero_grad()
    ranks = ranks or dist.get_world_size()
    torch.stack([loss(copied, rank) for rank in range(ranks)]).mean().backward()
    return gradients(copied)


def assert_gradients(module: nn.Module, expected: dict[str, Tensor | None]) -> None:
    """Check the module's gradients; None where None is expected."""
    found = gradients(module)
    assert [*found] == [*expected]
    for name, gradient in expected.items():
        if gradient is None or found[name] is None:
            assert found[name] is gradient, f"{name}: {found[name]} where {gradient} is expected"
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=_named(name))


def assert_steps(
    ddp: DistributedDataParallel, steps: int = 3, loss: Callable[[nn.Module, int, int], Tensor] = loss_of
) -> None:
    """Check gradients against one process in each step. `loss`: of a model, a rank and a step."""
    for step in range(steps):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss(it, rank, step))
        loss(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)


def _named(name: str) -> Callable[[str], str]:
    return lambda text: f"gradient of {name}: {text}"


def assert_same(tensor: Tensor) -> None:
    """Check that a tensor has the same bits on all ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.detach().contiguous())
    assert all(torch.equal(other, tensor) for other in gathered), "ranks differ"
