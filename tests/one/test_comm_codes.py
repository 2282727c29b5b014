"""Codes against what they promise of every element."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.comm import CODECS
from plait.plan.compression import BLOCK

INT8, FP16, BF16 = CODECS["int8"], CODECS["fp16"], CODECS["bf16"]
FINITE = st.floats(-(2.0**127), 2.0**127, width=32)
BLOCKS = st.tuples(st.integers(0, 2**32), st.lists(FINITE, max_size=12), st.floats(1e-38, 1e37)).map(
    lambda drawn: _block(*drawn)
)


def _block(seed: int, chosen: list[float], size: float) -> Tensor:
    """A block of random numbers of some size, the first of them chosen."""
    block = torch.randn(1, BLOCK, generator=torch.Generator().manual_seed(seed)).clamp(-9, 9) * size
    block[0, : len(chosen)] = torch.tensor(chosen)
    return block


def _through(code: object, values: Tensor) -> Tensor:
    codes = torch.empty(len(values), code.block_bytes, dtype=torch.uint8)  # type: ignore[attr-defined]
    code.encode(values, codes)  # type: ignore[attr-defined]
    out = torch.empty_like(values)
    code.decode(codes, out)  # type: ignore[attr-defined]
    return out


@given(BLOCKS)
def test_int8_is_off_by_a_254th_of_its_blocks_largest_at_most(values: Tensor) -> None:
    largest = float(values.abs().max())
    lost = (values.double() - _through(INT8, values).double()).abs()
    assert float(lost.max()) <= largest / 254 * (1 + 1e-5) + 6e-39  # the least scale has the last word


@given(BLOCKS)
def test_int8_read_and_written_again_is_the_same(values: Tensor) -> None:
    once = _through(INT8, values)
    again = _through(INT8, once)
    assert torch.allclose(once, again, rtol=1e-6, atol=1e-37)


@given(BLOCKS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, BLOCK - 1))
def test_a_block_that_is_not_finite_is_nan_and_others_are_not(values: Tensor, bad: float, place: int) -> None:
    two = torch.cat([values, values])
    two[0, place] = bad
    read = _through(INT8, two)
    assert bool(read[0].isnan().all())
    assert bool(read[1].isfinite().all())
    assert torch.equal(read[1:], _through(INT8, values))


def test_halves_saturate_and_keep_what_is_not_finite() -> None:
    values = torch.zeros(1, BLOCK)
    values[0, :8] = torch.tensor([1e6, -1e6, 65519.0, math.inf, -math.inf, math.nan, 0.5, 3e38])
    read = _through(FP16, values)[0, :8].tolist()
    assert read[:5] == [65504.0, -65504.0, 65504.0, math.inf, -math.inf]
    assert math.isnan(read[5])
    assert read[6:] == [0.5, 65504.0]


@given(BLOCKS)
def test_halves_round_to_nearest(values: Tensor) -> None:
    expected = values.clamp(-65504, 65504).half().float()
    assert torch.equal(_through(FP16, values), expected)


@given(BLOCKS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, BLOCK - 1))
def test_bf16_rounds_to_nearest_and_keeps_what_is_not_finite(values: Tensor, bad: float, place: int) -> None:
    values[0, place] = bad
    assert torch.equal(_through(BF16, values).nan_to_num(7.0), values.bfloat16().float().nan_to_num(7.0))


@pytest.mark.parametrize(("code", "least"), [(FP16, 2.0), (BF16, 2.0), (INT8, 1.015625)])
def test_a_message_has_the_computed_length(code: object, least: float) -> None:
    assert code.block_bytes / BLOCK == least  # type: ignore[attr-defined]
