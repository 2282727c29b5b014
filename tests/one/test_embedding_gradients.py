"""Gradients of embeddings, which units add row by row on a CPU: those of plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.parallel.zero.grad_buffer import GradBuffer

VOCABULARY, WIDTH, MICROS = 11, 4, 3
IDS = torch.tensor([[1, 1, 0, 7], [2, 1, 7, 7], [0, 0, 9, 1]])  # repeated ones, and padding: 0


class Tables(nn.Module):
    """Reads one table twice, another once, and a third that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.by_frequency = nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True)
        self.tied = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.twice(input_ids) + self.twice(input_ids.flip(1)) + self.by_frequency(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x + self.tied(input_ids)))
        return x @ self.tied.weight.mT


def squares(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), 1


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=1 zero=3", "dp=1 zero=2 accumulate=sharded", "pp=1 chunks=2 schedule=interleaved"]
)
def test_gradients_of_embeddings_are_those_of_one_process(
    plan: str, in_float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    are_sparse, add = list[bool](), GradBuffer.add

    def watched(self: GradBuffer, index: int, gradient: Any) -> None:
        are_sparse.append(isinstance(gradient, Tensor) and gradient.is_sparse)
        add(self, index, gradient)

    monkeypatch.setattr(GradBuffer, "add", watched)
    model, plain = Tables(), Tables()
    plain.load_state_dict(model.state_dict())
    engine = plait.parallelize(model, f"{plan} micro={MICROS} precision=fp64", loss=squares)
    engine.step({"input_ids": IDS})
    assert sum(are_sparse) >= MICROS
    for row in IDS:
        squares(plain(row[None]), None)[0].backward()
    found = engine.full_gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(MICROS * found[name], parameter.grad, rtol=1e-12, atol=1e-12)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert not any(table.sparse for table in tables)


def test_a_hook_gets_the_dense_gradient_of_an_embedding(in_float64: None) -> None:
    model, seen = Tables(), list[bool]()
    model.twice.weight.register_hook(lambda gradient: seen.append(gradient.is_sparse))
    engine = plait.parallelize(model, f"dp=1 micro={MICROS} precision=fp64", loss=squares)
    engine.step({"input_ids": IDS})
    assert seen == [False] * MICROS
