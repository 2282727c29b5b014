"""Tokens over ranks, and blocks of masks, compared with the definition of each mask, pair by pair."""

from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import Plan, context
from plait.plan.context import (
    Interval,
    Segment,
    TokenOrder,
    Visible,
    blocks_of,
    divided,
    first_heads,
    num_pairs,
    ulysses_kv_heads,
)


@st.composite
def segments(draw: st.DrawFn, num_tokens: int) -> list[Segment]:
    """Documents of a row; or all of it, with keys that are no padding; perhaps in chunks."""
    if draw(st.booleans()):
        first = draw(st.integers(0, num_tokens))
        keys = first, draw(st.integers(first, num_tokens))
        return divided([((0, num_tokens), keys)], draw(st.none() | st.integers(1, 9)))
    borders = sorted(draw(st.sets(st.integers(1, num_tokens - 1), max_size=4)) if num_tokens > 1 else ())
    documents = list(pairwise([0, *borders, num_tokens]))
    return divided([(each, each) for each in documents], draw(st.none() | st.integers(1, 9)))


@given(st.data())
def test_blocks_have_the_pairs_of_the_mask_once(data: st.DataObject) -> None:
    num_tokens, tile = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 8))
    parts = data.draw(segments(num_tokens))
    before = data.draw(st.none() | st.integers(1, 20))
    after = data.draw(st.none() | st.integers(0, 3))
    start = data.draw(st.integers(0, num_tokens - 1))
    stop = data.draw(st.integers(start + 1, num_tokens))

    def sees(query: int, key: int) -> bool:
        near = (before is None or query - key < before) and (after is None or key - query <= after)
        return near and any(a <= query < b and c <= key < d for (a, b), (c, d) in parts)

    found: list[Interval] = []
    with mock.patch.object(context, "TILE", tile):
        for block in blocks_of((start, stop), parts, before, after):
            assert block.visible is not Visible.CAUSAL or block.queries[1] - block.queries[0] == (
                block.keys[1] - block.keys[0]
            )
            for query in range(*block.queries):
                for key in range(*block.keys):
                    is_under = key - block.keys[0] <= query - block.queries[0]
                    visible = {Visible.FULL: True, Visible.CAUSAL: is_under, Visible.MASKED: sees(query, key)}
                    found += [(query, key)] if visible[block.visible] else []
    expected = [(q, k) for q in range(start, stop) for k in range(num_tokens) if sees(q, k)]
    assert sorted(found) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_have_equal_work_under_a_causal_mask(num_ranks: int) -> None:
    order = TokenOrder(64 * num_ranks, num_ranks, 2)
    row = [((0, order.padded), (0, order.padded))]
    work = [
        num_pairs([b for at in order.starts(rank) for b in blocks_of((at, at + order.chunk), row, None, 0)])
        for rank in range(num_ranks)
    ]
    assert len(set(work)) == 1
    assert sum(work) == order.padded * (order.padded + 1) // 2


@given(st.integers(1, 50), st.integers(1, 6), st.sampled_from([1, 2]), st.integers(1, 3))
def test_every_token_is_on_one_rank(num_tokens: int, outer: int, chunks: int, inner: int) -> None:
    num_ranks = outer * inner
    order = TokenOrder(num_tokens, num_ranks, chunks, inner)
    starts = [at for rank in range(num_ranks) for at in order.starts(rank)]
    assert sorted(starts) == list(range(0, order.padded, order.chunk))
    assert [starts[index] for index in order.in_row] == sorted(starts)
    assert 0 <= order.num_filled < num_ranks * chunks


def test_ulysses_copies_kv_heads_that_are_fewer_than_ranks() -> None:
    assert [ulysses_kv_heads(8, kv, 4) for kv in (8, 4, 2, 1)] == [8, 4, 4, 4]
    assert ulysses_kv_heads(6, 3, 2) == 6
    assert ulysses_kv_heads(6, 6, 4) is None


def test_heads_of_a_column_are_numbered_as_in_the_model() -> None:
    assert [first_heads([(4, 2)], 2, column) for column in (0, 1)] == [{4: 0, 2: 0}, {4: 0, 2: 2}]
    assert first_heads([(5, 5)], 2, 1) == {5: 0, 2: 3}
    assert first_heads([(1, 1), (8, 8)], 4, 3) == {1: 0, 8: 0, 2: 6}


def test_ranks_of_cp_multiply_those_of_data() -> None:
    plan = Plan.parse("dp=4 cp=2 tp=2 zero=1 shard=2")
    assert (plan.num_ranks, plan.shard_degree, plan.reduced_ranks) == (16, 4, 8)
    assert Plan.parse("dp=2 cp=3").shard_degree == 1
    assert str(Plan.parse("dp=auto cp=2 tp=2").resolved(8)) == "dp=2 tp=2 cp=2"
    with pytest.raises(PlanError, match="parameter servers cannot be combined"):
        Plan.parse("dp=2 cp=2 servers=1")
    with pytest.raises(PlanError, match="cannot be compiled next to attention"):
        Plan.parse("cp=2 compile=true recompute=selective")
    with pytest.raises(PlanError, match="cp_method has an effect"):
        Plan.parse("cp_method=ulysses")
    with pytest.raises(PlanError) as caught:
        Plan.parse("cp=4 tp=2").check_ranks(2)
    assert '"dp=1 cp=2"' in str(caught.value)
