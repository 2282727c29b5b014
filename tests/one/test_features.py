"""Features of sharded layers are found again after views: of shards as of the full tensor."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.models.sharding.features import Features, follow, regrouped
from plait.models.tensors import tensors_in
from plait.models.trace.modes import Operators

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


TABLE, BIAS, WEIGHT = torch.randn(12, 5), torch.randn(5), torch.randn(3, 5)

# Functions of a tensor (4, 6, 3) with features in its first dim, or in the second of one with six.
FUNCTIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "rows of a product with a bias": (0, lambda x: torch.addmm(BIAS, x.flatten(0, 1), WEIGHT)),
    "rows of products": (1, lambda x: x @ torch.ones(4, 3, 2)),
    "columns of products": (1, lambda x: torch.ones(4, 2, 3).bmm(x.mT)),
    "a lookup": (1, lambda x: torch.embedding(TABLE, x.argmax(-1))),
    "an index": (1, lambda x: TABLE[x.argmax(-1)]),
    "an index of other dims": (1, lambda x: x[torch.tensor([2, 0])]),
    "places of each": (1, lambda x: x.gather(2, x.topk(2).indices)),
    "a table's places": (1, lambda x: TABLE.mT[:4].gather(1, x.argmax(-1))),
    "a scatter": (1, lambda x: x.scatter(2, x.topk(2).indices, 1.0)),
    "a sort": (1, lambda x: x.sort(-1).values),
    "copies of others": (1, lambda x: x.repeat(2, 1, 3)),
    "copies": (0, lambda x: x.repeat(2, 1, 1)),
    "a mask": (1, lambda x: x.clone().index_put_([x > 0], torch.tensor(1.0))),
    "padding": (1, lambda x: torch.constant_pad_nd(x, [1, 0])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operator_of_a_shard_gives_the_shard_of_its_result(name: str) -> None:
    dim, function = FUNCTIONS[name]
    full = torch.randn(4, 6, 3)
    found = {id(full): Features(frozenset({("layer", 1)}), dim, full.shape[dim])}
    kept: list[Any] = []  # so that no address is reused

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        kept.append(result)
        if any(id(tensor) in found for tensor in tensors_in((args, kwargs))):
            followed = follow(func, args, kwargs, result, lambda tensor: found.get(id(tensor)))
            assert followed is not None, func
            found.update({id(tensor): features for tensor, features in followed})
        return result

    with Operators(run):
        result = function(full)
    for col in range(COLS):
        own = shard(full, Features(frozenset(), dim, full.shape[dim]), col)
        assert torch.allclose(function(own), shard(result, found[id(result)], col))
