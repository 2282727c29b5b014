"""Products in float8 have the bits of torchao's layer. `make test` runs this with torchao in PYTHONPATH; in
any other run it is skipped, because transformers takes longer to import where torchao is installed."""

import dataclasses
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from plait.parallel.linear_products import RECIPES, Float8Forward, Float8Products
from support.float8 import outcome

RECIPE_NAMES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}


@pytest.fixture(scope="module")
def torchao() -> Any:
    return pytest.importorskip("torchao.float8.float8_linear", reason="torchao is not installed")


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("tokens", [24, 21])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_the_bits_of_torchaos(torchao: Any, precision: str, tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias).bfloat16()
    x, dy = torch.randn(2, tokens, 64).bfloat16(), torch.randn(2, tokens, 48).bfloat16()
    config = dataclasses.replace(
        torchao.Float8LinearConfig.from_recipe_name(RECIPE_NAMES[precision]),
        emulate=True,
        round_scales_to_power_of_2=False,
    )
    expected = outcome(torchao.Float8Linear.from_float(layer, config), x, dy)
    assert not torch.equal(expected[0], outcome(layer, x, dy)[0])
    layer.forward = MethodType(Float8Forward(Float8Products(RECIPES[precision])), layer)  # type: ignore[method-assign]
    assert all(map(torch.equal, outcome(layer, x, dy), expected))
