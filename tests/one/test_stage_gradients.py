"""Gradients that a forward or a loss takes: right within a stage, refused through blocks of several."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError

WIDTH = 6
STAGES = "schedule=interleaved chunks=2 micro=2 precision=fp64"  # two stages on one rank
REFUSED = "passes through blocks of several stages"

pytestmark = pytest.mark.usefixtures("in_float64")


class Forces(nn.Module):
    """Returns the gradient of an energy, as models of molecules do."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.context = context

    def forward(self, positions: Tensor) -> Tensor:
        with self.context():
            positions = positions.detach().requires_grad_()
            x = torch.tanh(self.embed(positions))
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            (forces,) = torch.autograd.grad(self.read(x).sum(), positions, create_graph=True)
        return forces


class Descent(nn.Module):
    """A block that moves its input down the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = (x @ self.memory.mT).logsumexp(-1).sum()
            return x + 0.1 * torch.autograd.grad(energy, x, create_graph=True)[0]


def squares(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.numel()


def train(model: nn.Module, plan: str, batch: dict[str, Tensor], loss: Any = squares) -> dict[str, Tensor]:
    engine = plait.parallelize(model, plan, loss=loss, example_batch=batch, optimizer_args={"lr": 1e-2})
    for _ in range(2):
        engine.step(batch)
    return engine.full_parameters()


@pytest.mark.parametrize("context", [torch.enable_grad, nullcontext])
def test_a_forward_that_differentiates_through_the_blocks_of_two_stages_is_refused(
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    with pytest.raises(ModelError, match=REFUSED) as error:
        train(Forces(context), STAGES, {"positions": torch.randn(4, 3)})
    assert "blocks 0 to 3; stages of blocks 0 to 1, 2 to 3" in str(error.value)


def test_a_loss_that_differentiates_through_the_blocks_of_two_stages_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def penalty(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        (slope,) = torch.autograd.grad(outputs.sum(), batch["input"], create_graph=True)
        return slope.square().sum(), len(slope)

    with pytest.raises(ModelError, match=REFUSED):
        train(model, STAGES, {"input": torch.randn(4, WIDTH)}, penalty)


def test_a_gradient_within_each_block_trains_the_same_on_two_stages() -> None:
    model, batch = nn.Sequential(*(Descent() for _ in range(4))), {"input": torch.randn(4, WIDTH)}
    expected = train(copy.deepcopy(model), "micro=2 precision=fp64", batch)
    found = train(model, STAGES, batch)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=0) for name in expected)
