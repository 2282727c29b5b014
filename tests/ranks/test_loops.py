"""Training loops of other shapes than one model and one loss: weights of one process, in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from support.pool import Pool

STEPS, SAMPLES, WIDTH = 3, 8, 6
SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1, "momentum": 0.9}}
Weights = dict[str, Tensor]


def net(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)).double()


def numbers(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Plain:
    """An engine's methods on one process: gradients of sums, divided once."""

    data_rank, data_ranks = 0, 1

    def __init__(self, model: nn.Module) -> None:
        self.model, self._targets = model, 0
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, loss: Tensor, targets: int) -> None:
        (loss / targets).backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def full_parameters(self) -> Weights:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def engine_of(model: nn.Module, plan: str | None) -> Any:
    """`plan`: None for plain torch."""
    if plan is None:
        return Plain(model)
    example = {"input": torch.ones(2, WIDTH).double()} if "tp" in plan else None
    return plait.parallelize(model, f"{plan} precision=fp64", example_batch=example, **SGD)


def share(engine: Any, batch: Tensor) -> Tensor:
    return batch.chunk(engine.data_ranks)[engine.data_rank]


def distilled(plan: str | None) -> list[Weights]:
    """A student learns from the outputs of a larger teacher, and from targets."""
    torch.manual_seed(0)
    teacher_model, student = net(3 * WIDTH), engine_of(net(), plan)
    teacher_model.requires_grad_(False)
    teacher = teacher_model if plan is None else engine_of(teacher_model, plan).model
    for step in range(STEPS):
        x, y = (share(student, each) for each in numbers(step, 2, SAMPLES, WIDTH))
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(-1)
        out = student.model(x)
        loss = F.kl_div((out / 2).log_softmax(-1), soft, reduction="sum") + 0.5 * (out - y).square().sum()
        student.backward(loss, len(x))
        student.update()
    return [student.full_parameters()]


def penalized(plan: str | None) -> list[Weights]:
    """A critic with the gradient penalty of WGAN-GP: the second derivative of its outputs."""
    torch.manual_seed(0)
    critic = engine_of(net(), plan)
    for step in range(STEPS):
        real, fake = (share(critic, each) for each in numbers(step, 2, SAMPLES, WIDTH))
        mixed = ((real + fake) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(critic.model(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().sum()
        scores = critic.model(torch.cat([real, fake])).mean(-1)
        critic.backward(scores[len(real) :].sum() - scores[: len(real)].sum() + 10 * penalty, len(real))
        critic.update()
    return [critic.full_parameters()]


class Translator(nn.Module):
    """A sequence-to-sequence model of LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, (hidden, cell) = self.encoder(self.embedding(source))
        out, _ = self.decoder(self.embedding(target), (hidden[-1:], cell[-1:]))
        return self.head(out)


def translated(plan: str | None) -> list[Weights]:
    torch.manual_seed(0)
    engine = engine_of(Translator().double(), plan)
    for step in range(STEPS):
        ids = (numbers(step, SAMPLES, 9).abs() * 5).long() % 11
        source, target = (share(engine, each) for each in ids.split((4, 5), dim=1))
        logits = engine.model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), reduction="sum")
        engine.backward(loss, target[:, 1:].numel())
        engine.update()
    return [engine.full_parameters()]


LOOPS: list[Callable[[str | None], list[Weights]]] = [distilled, penalized, translated]


CASES = [(loop, plan) for loop in LOOPS for plan in ("dp=2", "dp=2 zero=3")]


@pytest.mark.parametrize(("loop", "plan"), [*CASES, (distilled, "tp=2")])
def test_a_loop_of_the_users_own_trains_as_in_one_process(pool: Pool, loop: Any, plan: str) -> None:
    expected = loop(None)
    actual = pool.over("gloo" if "zero" in plan else "host").run(loop, 2, plan)[0]
    for of_model, want in zip(actual, expected, strict=True):
        for name, tensor in want.items():
            torch.testing.assert_close(of_model[name], tensor, rtol=1e-9, atol=1e-12)
