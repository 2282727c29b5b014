"""Formats of compressed gradients, by arithmetic alone."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.plan import Layout, ParamInfo, Plan, UnitInfo, model_state_bytes
from plait.plan.compression import (
    BLOCK,
    Factors,
    blocks_per_rank,
    compresses,
    reduces_over_all,
    reductions_of,
)

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=4).map(tuple), min_size=1, max_size=6)


def _layout(shapes: list[tuple[int, ...]], shards: int = 1) -> Layout:
    tensors = tuple(ParamInfo(f"tensor{i}", shape, 0) for i, shape in enumerate(shapes))
    return Layout.build([UnitInfo("unit", tensors)], shards)


@pytest.mark.parametrize(
    ("words", "rank"),
    [("powersgd", 4), ("powersgd:1", 1), ("powersgd:12", 12), ("int8", None), ("fp32", None)],
)
def test_powersgd_takes_its_rank_from_the_plan(words: str, rank: int | None) -> None:
    assert Plan.parse(f"dp=2 reduce={words}").powersgd_rank == rank


@given(SHAPES, st.integers(1, 9))
def test_pieces_travel_as_factors_where_those_are_smaller(shapes: list[tuple[int, ...]], rank: int) -> None:
    unit = _layout(shapes).units[0]
    found = {matrix.start: matrix for matrix in Factors.of_unit(unit, rank).matrices}
    for piece in unit.params:
        shape = piece.boxes.shape
        rows, rest = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        assert (piece.start in found) == (rank * (rows + rest) < rows * rest)
        if piece.start in found:
            matrix = found[piece.start]
            assert (matrix.rows, matrix.columns, matrix.stop) == (rows, rest, piece.stop)
            assert rank < min(rows, rest)


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_every_block_has_an_owner(blocks: int, ranks: int) -> None:
    each = blocks_per_rank(blocks * BLOCK, ranks)
    assert each * ranks >= blocks > (each - 1) * ranks


@pytest.mark.parametrize(
    ("words", "at_once", "sums"),
    [
        ("dp=4 reduce=int8", True, ((4, 1),)),
        ("dp=4 zero=1 reduce=fp16", False, ((4, 1),)),
        ("dp=4 zero=2 shard=2 reduce=int8", False, ((2, 1), (2, 2))),
        ("dp=4 zero=3 shard=1 offload=cpu reduce=int8", False, ((4, 1),)),
        ("dp=4 zero=3 shard=2 reduce=powersgd", True, ((4, 1),)),
    ],
)
def test_a_unit_goes_through_one_sum_or_through_one_per_axis(
    words: str, at_once: bool, sums: tuple[tuple[int, int], ...]
) -> None:
    plan = Plan.parse(words)
    assert compresses(plan)
    assert reduces_over_all(plan) == at_once
    assert reductions_of(plan) == sums


@pytest.mark.parametrize("reduce", ["fp32", "bf16", "fp16", "int8", "powersgd"])
def test_a_single_rank_keeps_no_compression_state(reduce: str) -> None:
    plan = Plan.parse(f"dp=1 reduce={reduce}")
    assert not compresses(plan)
    layout = _layout([(64, 64)])
    found, plain = (
        model_state_bytes(layout, p, states_per_element=2, grad_itemsize=4) for p in (plan, Plan())
    )
    assert found == plain


def test_compression_errors_are_kept_in_full_precision() -> None:
    """4 bytes per element for residuals; with factors of rank 4, 16 per column of each matrix more."""
    layout = _layout([(64, 64), (64,)])
    plain, int8, powersgd, fp16 = (
        model_state_bytes(
            layout, Plan.parse(f"dp=2 reduce={way}"), states_per_element=2, grad_itemsize=4
        ).gradients
        for way in ("fp32", "int8", "powersgd", "fp16")
    )
    assert fp16 == plain
    assert int8 - plain == 4 * layout.numel
    assert powersgd - int8 == 4 * 4 * 64
