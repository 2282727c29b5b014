"""Weight gradients that products add to a unit's gradients themselves: those of one process."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.parallel.zero.flat_param import FlatParam

WIDTH, MICROS, BLOCKS = 6, 3, 4
STAGES = f"pp=1 chunks=2 schedule=interleaved micro={MICROS} precision=fp64"  # two stages on one rank

pytestmark = pytest.mark.usefixtures("in_float64")


class Block(nn.Module):
    """Layers that are used once, twice, with another operation, under a hook, or for a gradient of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.tied, self.hooked, self.energy = (
            nn.Linear(WIDTH, WIDTH, bias=index % 2 == 0) for index in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.twice(torch.tanh(self.twice(self.once(x)))))
        x = x + torch.tanh(self.tied(x) @ self.tied.weight) + self.hooked(x)
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = torch.tanh(self.energy(inner)).sum()
        [force] = torch.autograd.grad(energy, inner, create_graph=True)
        return x + 0.1 * force + 0.01 * torch.tanh(self.energy(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squares(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), 1


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By weight, the number of products that a unit has taken."""
    found, add_product = Counter[str](), FlatParam.add_product

    def counted(self: FlatParam, parameter: Tensor, *rest: Any) -> bool:
        is_added = add_product(self, parameter, *rest)
        names = {id(value): name for name, value in self.parameters.items()}
        found[names[id(parameter)]] += is_added
        return is_added

    monkeypatch.setattr(FlatParam, "add_product", counted)
    return found


@pytest.mark.parametrize("words", ["", "recompute=full", "zero=2 accumulate=sharded", "zero=3"])
def test_products_add_the_gradients_of_one_process(words: str, added: Counter[str]) -> None:
    torch.manual_seed(0)
    model, plain = Blocks(), Blocks()
    for each in (model, plain):
        for block in each.blocks:
            block.hooked.weight.register_hook(lambda gradient: 2 * gradient)
    x = torch.randn(MICROS, 2, WIDTH)
    engine = plait.parallelize(model, f"{STAGES} {words}", loss=squares, example_batch={"x": x})
    for _ in range(2):
        plain.load_state_dict(engine.full_parameters())
        engine.step({"x": x})
        found = engine.full_gradients()
        plain.zero_grad()
        for row in x:
            squares(plain(row[None]), None)[0].backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(MICROS * found[name], parameter.grad, rtol=1e-9, atol=1e-11)
    calls = 2 * MICROS
    assert {added[f"blocks.{n}.once.weight"] for n in range(BLOCKS)} == {calls}
    assert {added[f"blocks.{n}.twice.weight"] for n in range(BLOCKS)} == {2 * calls}
    assert {added[f"blocks.{n}.tied.weight"] for n in range(BLOCKS)} == {calls}
    assert not any(added[f"blocks.{n}.hooked.weight"] for n in range(BLOCKS))


def test_a_loss_may_ask_for_the_gradient_of_a_weight() -> None:
    """As a result of `torch.autograd.grad`, which is not to be added to the weight's gradients."""
    torch.manual_seed(0)
    model, x, found = Blocks(), torch.randn(MICROS, 2, WIDTH), list[Tensor]()
    plain = copy.deepcopy(model)

    def loss(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
        found.extend(torch.autograd.grad(outputs.sum(), model.blocks[-1].once.weight, retain_graph=True))
        return outputs.square().sum(), 1

    engine = plait.parallelize(model, STAGES, loss=loss, example_batch={"x": x})
    found.clear()
    engine.step({"x": x})
    gradients = engine.full_gradients()
    for row, gradient in zip(x, found, strict=True):
        outputs = plain(row[None])
        [expected] = torch.autograd.grad(outputs.sum(), plain.blocks[-1].once.weight, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
        outputs.square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(MICROS * gradients[name], parameter.grad, rtol=1e-9, atol=1e-11)


def test_layers_of_a_bfloat16_plan_keep_torchs_backward(added: Counter[str]) -> None:
    plan = STAGES.replace("fp64", "bf16")
    x = torch.randn(MICROS, 2, WIDTH).float()
    engine = plait.parallelize(Blocks(), plan, loss=squares, example_batch={"x": x})
    engine.step({"x": x})
    assert not added
