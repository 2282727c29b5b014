"""The norm of a flat gradient, however it is cut, and clipping by value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.optim.clip import NORM_BLOCK, block_square_sums, clip_values, squared_norm


@given(
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    rest=st.integers(0, NORM_BLOCK - 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_runs_of_a_norm_are_the_same_bits_however_the_gradient_is_cut(
    cuts: list[int], rest: int, dtype: torch.dtype, seed: int
) -> None:
    lengths = [NORM_BLOCK * cut for cut in cuts]
    lengths[-1] += rest
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(lengths), generator=generator).exp().to(dtype)
    parts = [block_square_sums(part) for part in flat.split(lengths)]
    assert torch.equal(torch.cat(parts), block_square_sums(flat))
    total = sum(squared_norm(part).item() for part in flat.split(lengths))
    assert total == pytest.approx(squared_norm(flat).item(), rel=1e-13)


def test_a_norm_of_millions_of_elements_keeps_its_digits() -> None:
    flat = torch.rand(3_000_001, generator=torch.Generator().manual_seed(0)) + 100.0
    exact = flat.double().square().sum().item()
    assert squared_norm(flat).item() == pytest.approx(exact, rel=1e-8)
    assert squared_norm(torch.empty(0)).item() == 0.0


@pytest.mark.parametrize("factor", [1.0, 0.125])
def test_values_are_scaled_before_they_are_clamped(factor: float) -> None:
    flats = [torch.randn(300_000, generator=torch.Generator().manual_seed(n)) * 9 for n in range(2)]
    flats[1][7] = torch.nan
    expected = [(flat * factor).clamp(-0.5, 0.5) for flat in flats]
    clip_values(flats, factor, 0.5)
    for flat, right in zip(flats, expected, strict=True):
        torch.testing.assert_close(flat, right, rtol=0, atol=0, equal_nan=True)
