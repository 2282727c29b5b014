"""Codes of a quantized base are those of torchao. `make test` runs this with torchao in PYTHONPATH; in any
other run it is skipped, because transformers takes longer to import where torchao is installed."""

from typing import Any

import pytest
import torch

from plait.parallel.zero.block_codes import dequantize, quantize
from plait.plan.quantized import BLOCK, FORMATS


@pytest.fixture(scope="module")
def nf4() -> Any:
    name = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    return pytest.importorskip(name, reason="torchao is not installed")


def codes_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = quantize(weight.flatten(), "nf4").view(-1, FORMATS["nf4"].block_bytes)
    codes, absmax = blocks[:, : BLOCK // 2], blocks[:, BLOCK // 2 :].contiguous().view(torch.float32)
    return codes.flatten(), absmax.flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_absmax_are_those_of_torchao(nf4: Any, dtype: torch.dtype) -> None:
    """For the levels of the paper: it has them too, rounded to four digits."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 256).to(dtype).float()
    codes, absmax = codes_of(weight)
    levels, number = torch.tensor(FORMATS["nf4"].levels), weight.numel() // BLOCK
    theirs = nf4.NF4Tensor.convert_to_norm_float_weight(weight, number, BLOCK, levels)
    assert torch.equal(codes, theirs)
    assert torch.equal(absmax, nf4.get_block_absmax(weight.flatten(), BLOCK))
    rounded = nf4.NF4Tensor.from_tensor(weight, BLOCK, 256)
    assert torch.equal(levels.mul(1e4).round().div(1e4), rounded.nf4)
    assert (codes != rounded.quantized_data.flatten()).float().mean() < 1e-3


def test_values_are_those_of_torchao_but_for_the_digits_of_its_levels_and_absmax(nf4: Any) -> None:
    """It stores absmax in 8 bits, of which it restores other values."""
    torch.manual_seed(1)
    weight = torch.randn(128, 256)
    theirs = nf4.NF4Tensor.from_tensor(weight, BLOCK, 256)
    ours = torch.empty(weight.numel())
    dequantize(quantize(weight.flatten(), "nf4"), "nf4", ours)
    restored = theirs.dequantize_scalers(
        theirs.quantized_scalers, theirs.quantization_factor, theirs.scaler_block_size
    )
    scaled = ours.view(-1, BLOCK) / codes_of(weight)[1][:, None] * restored[:, None]
    differs = (scaled.view_as(weight) - theirs.get_original_weight()).abs() > 5e-4
    assert differs.float().mean() < 1e-3  # those of other codes
