"""How widths and heads are divided, which pieces a rank has, and what a block costs."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan.sharding import DimSharding, ParamSharding, Range, split, split_heads, split_width
from support.tensor_cost import (
    Activations,
    BlockWidths,
    Message,
    Verb,
    axonn_volume,
    block_messages,
    gpt2_activation_bytes,
    gpt_activation_bytes,
    llama_activation_bytes,
    ring_bytes,
)

sizes = st.integers(1, 5000)
parts = st.integers(1, 17)


def assert_covers(ranges: Sequence[Range], size: int) -> None:
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == size
    assert all(start < stop for start, stop in ranges)


@given(size=sizes, parts=parts, unit=st.integers(1, 40))
def test_a_split_covers_its_size_in_whole_units_as_evenly_as_they_allow(
    size: int, parts: int, unit: int
) -> None:
    if size // unit < parts:
        with pytest.raises(PlanError, match="cannot split"):
            split(size, parts, unit)
        return
    ranges = split(size, parts, unit)
    assert_covers(ranges, size)
    assert all(start % unit == 0 for start, _ in ranges)
    units = [(stop - start) // unit for start, stop in ranges]
    assert max(units) - min(units) <= 1
    assert sum(units) == size // unit


@given(size=sizes, parts=parts)
def test_a_wide_dim_is_cut_at_multiples_of_eight(size: int, parts: int) -> None:
    if size < parts:
        return
    ranges = split_width(size, parts)
    assert_covers(ranges, size)
    if size >= 64 * parts:
        assert all(start % 8 == 0 for start, _ in ranges)
        assert max(stop - start for start, stop in ranges) - min(stop - start for start, stop in ranges) <= 15
    else:
        assert max(stop - start for start, stop in ranges) - min(stop - start for start, stop in ranges) <= 1


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 8), parts=parts)
def test_a_rank_has_whole_groups_of_heads_or_a_part_of_one(kv_heads: int, group: int, parts: int) -> None:
    heads = kv_heads * group
    if heads < parts:
        with pytest.raises(PlanError, match="heads"):
            split_heads(heads, kv_heads, parts)
        return
    cut = split_heads(heads, kv_heads, parts)
    assert_covers(cut.queries, heads)
    assert {head for start, stop in cut.keys for head in range(start, stop)} == set(range(kv_heads))
    for (q, q_stop), (k, k_stop), local in zip(cut.queries, cut.keys, cut.groups, strict=True):
        # The rule by which attention finds a key for each of its query heads gives, on the rank's own heads,
        # the key that it gives in the whole model.
        assert (q_stop - q) == local * (k_stop - k)
        assert all(k + mine // local == (q + mine) // group for mine in range(q_stop - q))
        assert local == group or k_stop - k == 1
    counts = [stop - start for start, stop in cut.queries]
    assert max(counts) - min(counts) <= (group if parts <= kv_heads else group - 1)


def test_fewer_heads_than_columns_are_refused_with_grids_that_would_work() -> None:
    with pytest.raises(PlanError) as raised:
        split_heads(6, 2, 8, of="blocks.0.attn")
    assert "heads of blocks.0.attn" in str(raised.value)
    assert "heads=6 kv heads=2 columns=8" in str(raised.value)
    assert "tp=1x6 or tp=1x3" in str(raised.value)


def test_kv_heads_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(PlanError) as raised:
        split_heads(6, 4, 2, rows=2, of="blocks.0.attn")
    assert str(raised.value).startswith(
        "cannot shard the heads of blocks.0.attn: num_heads is not a multiple"
    )
    assert "num_heads divisible by num_kv_heads" in str(raised.value)
    assert "tp=2x1, or a tensor_plan that replicates blocks.0.attn" in str(raised.value)


@given(heads=st.integers(1, 24), kv_heads=st.integers(1, 12), parts=parts, rows=st.integers(1, 4))
def test_grids_suggested_by_an_error_about_heads_keep_the_rows_and_work(
    heads: int, kv_heads: int, parts: int, rows: int
) -> None:
    try:
        split_heads(heads, kv_heads, parts, rows=rows)
    except PlanError as error:
        tried = re.findall(r"tp=(\d+)(?:x(\d+))?", str(error.hint))
        assert tried
        for left, right in tried:
            assert int(left) == rows
            assert len(split_heads(heads, kv_heads, int(right or 1), rows=rows).queries) < parts


def over_col(*ranges: Range) -> DimSharding:
    return DimSharding("col", tuple((found,) for found in ranges))


def test_columns_that_share_a_piece_sum_its_gradient_and_one_of_them_counts_it() -> None:
    shared = ParamSharding(
        "k", (over_col((0, 4), (0, 4), (4, 8)), DimSharding("row", (((0, 3),), ((3, 5),))))
    )
    assert [shared.sharers(3, col) for col in range(3)] == [(0, 1), (0, 1), ()]
    assert [[shared.is_first(row, col) for col in range(3)] for row in range(2)] == [[True, False, True]] * 2
    assert shared.ranges((8, 5), 1, 2) == (((4, 8),), ((3, 5),))
    whole, part = ParamSharding("w", (None,)), ParamSharding("w", (None,), partial=True)
    assert (whole.sharers(2, 1), part.sharers(2, 1), part.sharers(1, 0)) == ((), (0, 1), ())
    assert [whole.is_first(row, col) for row in range(2) for col in range(2)] == [True, False, False, False]


GPT = BlockWidths(hidden=64, inputs=2, columns=(3 * 64, 4 * 64), rows=(64, 4 * 64), norms=2)


def sent(rows: int, cols: int, *, sequence: bool = False, statistics: bool = False) -> float:
    messages = block_messages(GPT, 10, rows, cols, sequence=sequence)
    return ring_bytes([m for m in messages if m.is_statistic == statistics], rows, cols, 2)


@given(rows=st.integers(1, 12), cols=st.integers(1, 12))
def test_a_gpt_block_sends_what_axonn_derived(rows: int, cols: int) -> None:
    assert sent(rows, cols) == pytest.approx(axonn_volume(rows, cols) * 10 * 64 * 2)


def test_axonns_table_of_best_grids() -> None:
    best = {
        p: min((axonn_volume(rows, p // rows), rows) for rows in range(1, p + 1) if p % rows == 0)
        for p in (2, 8, 64)
    }
    assert best == {2: (4.0, 1), 8: (6.0, 2), 64: (3.0, 4)}
    assert axonn_volume(2, 2) == 8.0


def test_one_row_has_megatrons_two_and_two_all_reduces_and_no_others() -> None:
    forward, backward = block_messages(GPT, 10, 1, 4)
    assert forward == Message(Verb.ALL_REDUCE, "col", False, 640, 2)
    assert backward == Message(Verb.ALL_REDUCE, "col", True, 640, 2)
    assert block_messages(GPT, 10, 1, 1) == ()


def test_side_by_side_attention_and_mlp_read_one_tensor() -> None:
    parallel = BlockWidths(64, 1, GPT.columns, GPT.rows, norms=1)
    assert [m.count for m in block_messages(parallel, 10, 1, 2)] == [2, 1]


def test_sequence_parallelism_has_twice_the_messages_and_gathers_its_inputs_once_more() -> None:
    assert sent(1, 4, sequence=True) == sent(1, 4) * 10 / 8
    verbs = [(m.verb, m.count) for m in block_messages(GPT, 10, 1, 4, sequence=True)]
    assert (
        sorted(verb.value for verb, count in verbs for _ in range(count))
        == ["all-gather"] * 6 + ["reduce-scatter"] * 4
    )


def test_norms_over_rows_send_a_few_numbers_a_token_in_four_bytes() -> None:
    # Two norms, forward and backward, one number each for 10 tokens; a ring of two sends half of it twice.
    assert sent(2, 3, statistics=True) == 2 * 2 * 10 * 4
    assert sent(2, 2, sequence=True, statistics=True) == 2 * 2 * 10 * 4 / 2
    assert sent(1, 3, statistics=True) == 0
    centred = [m for m in block_messages(replace(GPT, centred=True), 10, 2, 3) if m.is_statistic]
    assert [(m.verb, m.elements) for m in centred] == [(Verb.ALL_GATHER, 40), (Verb.ALL_REDUCE, 20)]


def test_activation_bytes_of_korthikantis_table() -> None:
    size = {"tokens": 1, "hidden": 1000, "heads": 10, "sequence_length": 1000}

    def per_hidden(**options: int | bool) -> float:
        return gpt_activation_bytes(Activations(**size, **options)) / 1000  # type: ignore[arg-type]

    assert per_hidden() == 34 + 5 * 10
    assert per_hidden(tensor=4) == 10 + 24 / 4 + 50 / 4
    assert per_hidden(tensor=4, sequence=True) == (34 + 50) / 4
    assert per_hidden(tensor=4, selective=True) == 10 + 24 / 4
    assert per_hidden(tensor=4, sequence=True, flash=True) == 34 / 4


def test_activation_bytes_of_a_gpt2_block_are_korthikantis_with_its_operators() -> None:
    for options in ({}, {"tensor": 4}, {"tensor": 4, "sequence": True}):
        of = Activations(2, 1000, 10, 1000, flash=True, **options)  # type: ignore[arg-type]
        spread = of.tensor if of.sequence else 1
        small = 2 * (8 / spread + 4 * 10 / of.tensor)  # the norms' and the kernel's numbers
        fused = gpt2_activation_bytes(of, gelu_tensors=1)
        assert fused == pytest.approx(gpt_activation_bytes(of) + small)
        assert gpt2_activation_bytes(of) == pytest.approx(fused + 2 * 3 * 8 * 1000 / of.tensor)
        wide = gpt2_activation_bytes(of, mask_bytes=2, gelu_tensors=1)
        assert wide == pytest.approx(fused + 2 * 2 * 1000 / spread)


def test_activation_bytes_of_a_llama_block() -> None:
    def of(**options: int | bool) -> float:
        sizes = Activations(2, 64, 8, 16, flash=True, **options)  # type: ignore[arg-type]
        return llama_activation_bytes(sizes, kv_heads=2, head_dim=8, ffn=96)

    # Of norms a float and two halves of each feature; q and attention's output, k and v, the feed-forward.
    norms, small = 2 * (4 + 2 + 2) * 64, 2 * 4
    assert of() == 2 * (norms + small + 2 * (2 * 64 + 2 * 16 + 4 * 96) + 4 * 8)
    assert of(tensor=4) == 2 * (norms + small + 2 * (2 * 16 + 2 * 8 + 96) + 4 * 2)  # a key head on every rank
    assert of(tensor=2, sequence=True) == of() / 2
    kept = llama_activation_bytes(
        Activations(2, 64, 8, 16, tensor=2, sequence=True), kv_heads=2, head_dim=8, ffn=96, regathers=False
    )
    assert kept == of() / 2 + 2 * 2 * 64 + 2 * (2 * 8 * 16 - 4 * 8) / 2
