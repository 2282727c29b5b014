"""Digests of weights: what they tell apart, and that digests of parts add up."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from plait.parallel.zero.replica_check import Digest

NUMEL = 3 * 2**16 + 8  # several blocks and a part of one
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _weights(dtype: torch.dtype) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(dtype)


def _digest(flat: Tensor, start: int = 0) -> int:
    return int(Digest().compute(flat, start))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_one_bit_changes_the_digest(dtype: torch.dtype) -> None:
    weights = _weights(dtype)
    whole = _digest(weights)
    bits = weights.view(BITS[weights.itemsize])
    for place in (0, 1, 5, 2**15, 2**17 + 3, NUMEL - 1):
        for bit in (0, 7, 8 * weights.itemsize - 1):
            mask = (
                -(2**bit) if bit == 8 * weights.itemsize - 1 else 2**bit
            )  # the sign's fits in no positive one
            bits[place] ^= mask
            assert _digest(weights) != whole
            bits[place] ^= mask
    assert _digest(weights) == whole


def test_the_same_numbers_in_another_order_have_another_digest() -> None:
    weights = _weights(torch.float32)
    rows = weights[: 2**16].view(256, 256)
    assert _digest(rows.flatten()) != _digest(rows[torch.arange(255, -1, -1)].flatten())
    swapped = weights.clone()
    swapped[[8, 2**17]] = weights[[2**17, 8]]
    assert _digest(swapped) != _digest(weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_of_parts_add_up_to_the_wholes(dtype: torch.dtype) -> None:
    weights = _weights(dtype)
    edges = (0, 256, 2**15 + 512, 2**17, 2**17, NUMEL)
    parts = [_digest(weights[a:b], a) for a, b in pairwise(edges)]
    assert (sum(parts) - _digest(weights)) % 2**64 == 0


def test_a_digest_is_the_sum_of_bits_times_odd_factors() -> None:
    zeros = torch.zeros(2**17, dtype=torch.float64)
    factors = []
    for place in (0, 1, 2**15 - 1, 2**15, 2**16 + 1):
        bits = zeros.clone()
        bits.view(torch.int64)[place] = 1
        factors.append(_digest(bits))
    assert _digest(zeros) == 0
    assert len(set(factors)) == len(factors)
    assert all(factor % 2 for factor in factors)
