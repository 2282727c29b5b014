"""Features of sharded layers are found again after views: of shards as of the full tensor."""

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.models.sharding.features import Features, regrouped

COLS = 2
FACTORS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5)


def shard(full: Tensor, features: Features, col: int) -> Tensor:
    """A column's part of a tensor with features."""
    before, after = full.shape[: features.dim], full.shape[features.dim + 1 :]
    units = full.reshape(*before, features.outer, features.units, -1, *after)
    own = units.chunk(COLS, len(before) + 1)[col]
    return own.reshape(*before, full.shape[features.dim] // COLS, *after)


def grouped(factors: Sequence[int], borders: set[int]) -> list[int]:
    """A shape: products of neighbours, divided after the positions of `borders`."""
    shape = [1]
    for position, factor in enumerate(factors):
        shape[-1] *= factor
        if position in borders and position + 1 < len(factors):
            shape.append(1)
    return shape


@given(st.data())
def test_a_view_of_a_shard_is_the_shard_of_the_view(data: st.DataObject) -> None:
    """A tensor has random factors, of which one or several neighbours are the units."""
    outside, units, inside = (data.draw(FACTORS) for _ in range(3))
    units = [COLS, *units]
    factors = [*outside, *units, *inside]
    positions = st.sets(st.integers(0, len(factors) - 1))
    first, second = (grouped(factors, data.draw(positions)) for _ in range(2))
    start, places = math.prod(outside), [math.prod(first[:i]) for i in range(len(first))]
    dim = next(i for i, place in enumerate(places) if place <= start < place * first[i])
    outer = start // places[dim]
    own = first[dim] // outer if first[dim] % outer == 0 else 0
    count = math.prod(units)
    if own % count:  # the units are in more than one dim
        return
    features = Features(frozenset({("layer", 1)}), dim, count, outer)
    found = regrouped(features, first, second)
    full = torch.arange(math.prod(factors)).view(first)
    if found is None or found.units % COLS:
        return
    for col in range(COLS):
        viewed = shard(full, features, col).reshape(found.shard(second, COLS))
        assert torch.equal(viewed, shard(full.view(second), found, col))


def test_heads_are_found_in_a_view_and_joined_again() -> None:
    features = Features(frozenset({("layer", 1)}), 2, 24)
    of_heads = regrouped(features, (2, 8, 24), (2, 8, 6, 4))
    assert of_heads is not None
    assert (of_heads.dim, of_heads.units) == (2, 6)
    swapped = Features(of_heads.sources, 1, 6)  # (2, 6, 8, 4)
    batched = regrouped(swapped, (2, 6, 8, 4), (12, 8, 4))
    assert batched is not None
    assert (batched.dim, batched.units, batched.outer) == (0, 6, 2)
    assert regrouped(batched, (12, 8, 4), (2, 6, 8, 4)) == swapped
    assert regrouped(of_heads, (2, 8, 6, 4), (2, 8, 24)) == Features(of_heads.sources, 2, 6)
