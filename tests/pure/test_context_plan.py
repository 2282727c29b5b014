"""Tokens over ranks, and blocks of masks, compared with the definition of each mask, pair by pair."""

from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import Plan, context
from plait.plan.axes import SEQUENCE
from plait.plan.comm_log import CommCount, CommKey
from plait.plan.context import (
    Block,
    Interval,
    MethodChoice,
    Segment,
    TokenOrder,
    Visible,
    blocks_of,
    divided,
    first_heads,
    heads_degree,
    recomputed_share,
    sent_elements,
    ulysses_kv_heads,
)
from plait.plan.events import ring_bytes
from plait.plan.grid import Grid


def num_pairs(blocks: list[Block]) -> int:
    """Pairs of a query and a key that the kernels of these blocks compute: half of a triangle."""
    total = 0
    for block in blocks:
        queries, keys = block.queries[1] - block.queries[0], block.keys[1] - block.keys[0]
        total += queries * (queries + 1) // 2 if block.visible is Visible.CAUSAL else queries * keys
    return total


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
        num_pairs(
            [b for at in order.starts(rank) for b in blocks_of((at, at + order.run_length), row, None, 0)]
        )
        for rank in range(num_ranks)
    ]
    assert len(set(work)) == 1
    assert sum(work) == order.padded * (order.padded + 1) // 2


DOCUMENTS = (
    0,
    9000,
    9700,
    10100,
    17000,
    17900,
    30000,
    32768,
)  # starts in a row of 32,768 tokens, and its end


@pytest.mark.parametrize(("num_ranks", "method"), [(2, "allgather"), (4, "ring"), (4, "2x2")])
def test_ranks_have_nearly_equal_work_for_documents_of_a_row(num_ranks: int, method: str) -> None:
    """Counted block by block. One document needs no more runs, and no order has other numbers of tokens."""
    order = TokenOrder.of_method(method, 32768, num_ranks)
    documents = [*pairwise(DOCUMENTS)]
    balanced = order.balanced([documents])
    rows = [(each, each) for each in documents]

    def largest_over_mean(order: TokenOrder) -> float:
        order, work = order.of_heads, []
        for rank in range(order.num_ranks):
            runs = [(at, at + order.run_length) for at in order.starts(rank)]
            work.append(num_pairs([block for run in runs for block in blocks_of(run, rows, None, 0)]))
        return order.num_ranks * max(work) / sum(work)

    assert largest_over_mean(order) > 1.15
    assert largest_over_mean(balanced) < 1.05
    assert (balanced.padded, balanced.per_rank) == (order.padded, order.per_rank)
    assert order.balanced([[(0, 32768)]]) == order


def test_short_rows_and_complete_rows_of_heads_keep_their_runs() -> None:
    for order in (TokenOrder(1024, 4, 2), TokenOrder.of_method("ulysses", 32768, 4), TokenOrder(32760, 4, 2)):
        assert order.balanced([[(0, 700), (700, order.num_tokens)]]) == order


@given(st.integers(1, 50), st.integers(1, 6), st.sampled_from([1, 2, 4, 16]), st.integers(1, 3))
def test_every_token_is_on_one_rank(num_tokens: int, outer: int, chunks: int, inner: int) -> None:
    num_ranks = outer * inner
    order = TokenOrder(num_tokens, num_ranks, chunks, inner)
    starts = [at for rank in range(num_ranks) for at in order.starts(rank)]
    assert sorted(starts) == list(range(0, order.padded, order.run_length))
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
    assert first_heads([(2, 2), (8, 8)], 4, 3) == {8: 0}  # two heads: 0 and 1, or 6 and 7


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


# --- the method that `auto` takes


@pytest.mark.parametrize(
    ("on_host", "kv_heads", "method"),
    [
        # 16 ranks of 32 heads on one host, two and four: as received by a rank, or by its host from others
        (16, 1, "allgather"),
        (16, 2, "allgather"),
        (16, 8, "ulysses"),
        (16, 32, "ulysses"),
        (8, 1, "allgather"),
        (8, 2, "allgather"),
        (8, 8, "2x8"),
        (8, 32, "ulysses"),
        (4, 1, "allgather"),
        (4, 2, "allgather"),
        (4, 8, "ulysses"),
        (4, 32, "ulysses"),
        (1, 1, "allgather"),
        (1, 2, "allgather"),
        (1, 8, "ulysses"),
        (1, 32, "ulysses"),
    ],
)
def test_auto_takes_the_method_that_sends_least_between_hosts(
    on_host: int, kv_heads: int, method: str
) -> None:
    choice = MethodChoice.of("auto", [(32, kv_heads, 128)], 16, on_host)
    assert choice.method == method
    assert choice.across_hosts == (on_host < 16)
    assert choice == MethodChoice.of("auto", [(32, kv_heads, 128)], 16, on_host)
    many = MethodChoice.of("auto", [(32, kv_heads, 128)] * 33, 16, on_host)
    assert many.method == method  # of all layers, as the planner finds by one


def _between(method: str, num_ranks: int, on_host: int, heads: int, kv_heads: int) -> float:
    """Elements that the first host receives, message by message, for each of a rank's tokens (width 1)."""
    hosts = [rank // on_host for rank in range(num_ranks)]
    if method == "allgather":  # a ring: the first rank passes on what the last one has, of all others
        return 3.0 * (num_ranks - 1) * kv_heads
    inner = heads_degree(method, num_ranks)
    copies = ulysses_kv_heads(heads, kv_heads, inner)
    assert copies is not None
    total = 0.0
    for to in range(num_ranks):
        for source in range(num_ranks):
            if hosts[to] == 0 and hosts[source] != 0:
                total += 2 * (heads + copies) / inner * (to // inner == source // inner)
                total += 3 * copies * (to % inner == source % inner) * (to != source)
    return total


@pytest.mark.parametrize("method", ["allgather", "ulysses", "4x4", "2x8"])
@pytest.mark.parametrize("on_host", [4, 8])
def test_elements_between_hosts_are_those_of_each_pair_of_ranks(method: str, on_host: int) -> None:
    if method == "2x8" and on_host == 4:
        return  # not compared: neighbours that exchange heads are on one host
    sent = sent_elements(method, 32, 8, 1, 16, on_host)
    assert sent is not None
    if method != "4x4" or on_host == 4:
        assert sent.between_hosts == pytest.approx(_between(method, 16, on_host, 32, 8))


@pytest.mark.parametrize(
    ("words", "host_size", "on_host"),
    [
        ("cp=4", None, 4),
        ("cp=4", 8, 4),
        ("cp=3", 8, 3),
        ("cp=4", 2, 2),
        ("cp=4 tp=2", 4, 2),
        ("cp=4 tp=2", 8, 4),
        ("dp=2 cp=4 tp=2", 8, 4),
        ("dp=4 cp=3", 4, 1),
        ("dp=2 cp=6", 4, 2),
        ("cp=2 tp=4", 2, 1),
        ("pp=2 cp=4", 4, 4),
    ],
)
def test_neighbours_of_cp_on_a_host_are_those_of_every_group(
    words: str, host_size: int | None, on_host: int
) -> None:
    plan = Plan.parse(words)
    assert plan.cp_on_host(host_size) == on_host
    grid, size = Grid.from_plan(plan), host_size or plan.num_ranks
    for first in range(plan.num_ranks):
        ranks = grid.group(first, "cp")
        for start in range(0, len(ranks), on_host):
            assert len({rank // size for rank in ranks[start : start + on_host]}) == 1


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses", "2x4", "4x2"])
def test_bytes_that_leave_a_rank_are_those_that_it_receives(method: str) -> None:
    plan, heads, width = Plan.parse(f"cp=8 cp_method={method}"), (32, 8), 256
    traffic = {}
    for at, each in enumerate(context.attention_messages(method, *heads, width, 8)):
        calls = each.forward + each.backward
        traffic[CommKey(SEQUENCE, str(at), each.op)] = CommCount(calls, round(calls * each.elements))
    expected = sent_elements(method, *heads, width, 8, 8)
    assert expected is not None
    assert ring_bytes(traffic, Grid.from_plan(plan)) == expected.received


@pytest.mark.parametrize(
    ("recompute", "method"), [("none", "ulysses"), ("every=4", "ulysses"), ("full", "allgather")]
)
def test_auto_counts_exchanges_that_recomputed_blocks_repeat(recompute: str, method: str) -> None:
    """Attention with 32 heads and 8 kv heads over 4 ranks; a recomputation gathers no keys again."""
    recomputed = recomputed_share(recompute)
    assert MethodChoice.of("auto", [(32, 8, 256)], 4, recomputed=recomputed).method == method
