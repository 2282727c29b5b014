"""Every element of every tensor is in exactly one place of its unit's storage; bytes follow from that."""

import math
from itertools import product
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from plait.plan import (
    Box,
    Boxes,
    Layout,
    ParamInfo,
    ParamShard,
    ParamSharding,
    Plan,
    TPCoord,
    TPPlan,
    UnitInfo,
    UnitLayout,
    model_state_bytes,
)
from plait.plan.layout import ALIGNMENT, RANGE_ALIGNMENT
from plait.plan.sharding import DimSharding

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
groups = st.sampled_from([0, 1, 2])
units = st.lists(st.tuples(shapes, groups), min_size=1, max_size=8).map(
    lambda facts: UnitInfo("u", tuple(ParamInfo(f"t{i}", s, g) for i, (s, g) in enumerate(facts)))
)
shards = st.sampled_from([1, 2, 3, 8])
boxes = st.integers(0, 3).flatmap(
    lambda n: st.tuples(*[st.lists(st.tuples(*[st.integers(0, 6)] * 2), min_size=n, max_size=n)] * 2)
)


@given(units, shards)
def test_pieces_are_aligned_do_not_overlap_and_hold_every_tensor_whole(fact: UnitInfo, ranks: int) -> None:
    layout = UnitLayout.build(fact, ranks)
    end = 0
    for piece in layout.params:
        assert piece.start % ALIGNMENT == 0
        assert end <= piece.start < end + ALIGNMENT
        assert piece.boxes == Boxes.full(piece.full_shape)
        end = piece.stop
    assert end <= layout.numel < end + ALIGNMENT + ranks * RANGE_ALIGNMENT
    assert {p.name: p.full_shape for p in layout.params} == {t.name: t.shape for t in fact.tensors}
    held = [range(p.start, p.stop) for p in layout.params]
    assert sorted(i for r in (*held, *(range(*gap) for gap in layout.gaps)) for i in r) == list(
        range(layout.numel)
    )


@given(units, shards)
def test_a_group_holds_just_the_pieces_of_its_kind(fact: UnitInfo, ranks: int) -> None:
    layout = UnitLayout.build(fact, ranks)
    kinds = {tensor.name: tensor.group for tensor in fact.tensors}
    covered = 0
    for group, start, stop in layout.groups:
        assert start == covered
        covered = stop
        inside = [piece for piece in layout.params if start <= piece.start < stop]
        assert inside
        assert all(kinds[piece.name] == group and piece.stop <= stop for piece in inside)
    assert layout.params[-1].stop <= covered <= layout.numel


@given(units, shards)
def test_every_element_is_owned_once_and_in_its_group(fact: UnitInfo, ranks: int) -> None:
    layout = UnitLayout.build(fact, ranks)
    owned: dict[int, int] = {}
    for rank in range(ranks):
        low, high = layout.owned_range(rank)
        assert high - low == layout.range_numel
        assert low % RANGE_ALIGNMENT == 0
        for group, start, stop in layout.owned_groups(rank):
            for element in range(low + start, low + stop):
                assert owned.setdefault(element, group) == group
        for lap in layout.overlaps(low, high):
            assert lap.shard.start + lap.start == low + lap.at
    assert owned == {e: group for group, start, stop in layout.groups for e in range(start, stop)}
    laps = [lap for rank in range(ranks) for lap in layout.overlaps(*layout.owned_range(rank))]
    assert sum(lap.stop - lap.start for lap in laps) == sum(piece.boxes.numel for piece in layout.params)


def test_frozen_tensors_are_a_unit_of_their_own() -> None:
    facts = UnitInfo("block", (ParamInfo("a", (4,), 0), ParamInfo("w", (64, 64), None)))
    layout = Layout.build([facts], num_shards=2)
    assert [(u.name, u.block, u.trains) for u in layout.units] == [
        ("block", "block", True),
        ("block (frozen)", "block", False),
    ]
    assert layout.num_parameters == 4
    assert layout.trained_numel == 2 * RANGE_ALIGNMENT


@given(boxes)
def test_the_intersection_of_boxes_holds_the_points_of_both(pair: tuple[list, list]) -> None:
    a, b = (Box(tuple(min(p) for p in ranges), tuple(max(p) for p in ranges)) for ranges in pair)
    both = a & b
    inside = [
        range(max(x, y), min(u, v)) for x, y, u, v in zip(a.start, b.start, a.stop, b.stop, strict=True)
    ]
    assert both.numel == math.prod(map(len, inside))
    assert both.numel == (b & a).numel
    if both.numel:
        assert (a & both, b & both) == (both, both)


def _bytes(plan: str, grad_itemsize: int, states: int = 2) -> tuple[int, ...]:
    """Bytes per element of parameters, gradients, master weights and optimizer states."""
    parsed = Plan.parse(plan)
    layout = Layout.build([UnitInfo("u", (ParamInfo("w", (128, 128), 0),))], parsed.shard_degree)
    assert layout.num_parameters == layout.numel == 128 * 128
    use = model_state_bytes(layout, parsed, states_per_element=states, grad_itemsize=grad_itemsize)
    assert use.total == use.parameters + use.gradients + use.master + use.optimizer + use.buffers
    parts = (use.parameters, use.gradients, use.master, use.optimizer)
    assert not any(part % (128 * 128 // 4) for part in parts)
    return tuple(part // (128 * 128 // 4) for part in parts)  # quarters of a byte


def test_bytes_of_adam_are_zeros_table() -> None:
    """2 + 2 + 12 bytes, cut as the stage says; sums of gradients are fp32."""
    assert _bytes("dp=4 precision=bf16", 4) == (8, 16, 16, 32)
    assert _bytes("dp=4 precision=bf16", 2) == (8, 8 + 16, 16, 32)
    assert _bytes("dp=4 zero=1 precision=bf16", 2) == (8, 8 + 4, 4, 8)
    assert _bytes("dp=4 zero=1 precision=bf16", 4) == (8, 16, 4, 8)
    assert _bytes("dp=4 zero=2 precision=bf16", 2) == (8, 4, 4, 8)
    assert _bytes("dp=4 zero=3 precision=bf16", 2) == (2, 4, 4, 8)
    assert _bytes("dp=4 zero=3 shard=2 precision=bf16", 2) == (4, 8, 8, 16)
    assert _bytes("dp=4 zero=3 micro=2 accumulate=unsharded precision=bf16", 4) == (2, 16, 4, 8)
    assert _bytes("dp=4 zero=3 optim_dtype=bf16 precision=bf16", 2) == (2, 4, 4, 4)
    assert _bytes("dp=1 precision=fp32", 4, states=1) == (16, 16, 0, 16)
    assert _bytes("dp=4 zero=3 precision=fp32", 4, states=1) == (4, 4, 0, 4)


# --- on a grid


AXES_OF_DIMS = [(), ("row",), ("col",), ("row", "col"), ("col", "row"), (None, "col")]


@st.composite
def tensor_plans(draw: Any) -> tuple[UnitInfo, TPPlan]:
    """Parameters that are cut over an axis or both, in one or several ranges, some shared by neighbours."""
    rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    facts, cuts = [], []
    for number in range(draw(st.integers(1, 5))):
        axes = draw(st.sampled_from([(), ("row",), ("col",), ("row", "col"), ("col", "row"), (None, "col")]))
        dims = [
            None if axis is None else draw(dim_cuts(axis, {"row": rows, "col": cols}[axis])) for axis in axes
        ]
        shape = tuple(draw(st.integers(1, 4)) if dim is None else _size(dim) for dim in dims)
        facts.append(ParamInfo(f"t{number}", shape, draw(st.sampled_from([None, 0, 1]))))
        if draw(st.booleans()) or any(dims):
            cuts.append(ParamSharding(f"t{number}", tuple(dims), partial=draw(st.booleans())))
    return UnitInfo("u", tuple(facts)), TPPlan(rows, cols, parameters=tuple(cuts))


@st.composite
def dim_cuts(draw: Any, axis: str, degree: int) -> DimSharding:
    parts = draw(st.integers(1, 2))  # of a packed projection
    pieces = draw(st.integers(1, degree)) if axis == "col" else degree  # the last may be held several times
    edges = [0]
    for _ in range(parts * pieces):
        edges.append(edges[-1] + draw(st.integers(1, 3)))
    held = [
        tuple((edges[part * pieces + piece], edges[part * pieces + piece + 1]) for part in range(parts))
        for piece in range(pieces)
    ]
    return DimSharding(axis, tuple(held[min(coord, pieces - 1)] for coord in range(degree)))


def _size(cut: DimSharding) -> int:
    return max(stop for ranges in cut.ranges for _, stop in ranges)


@given(tensor_plans(), shards)
def test_on_a_grid_every_element_is_counted_once(given_: tuple[UnitInfo, TPPlan], ranks: int) -> None:
    fact, plan = given_
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    for place in TPCoord.all_coords(plan):
        for unit in Layout.build([fact], ranks, place).units:
            repeated = {start for start, _ in unit.repeated}
            for piece in unit.params:
                assert piece.stop - piece.start == piece.boxes.numel == sum(box.numel for box in piece.boxes)
                assert (piece.start in repeated) == (not piece.counted)
                for box in piece.boxes:
                    for element in product(*map(range, box.start, box.stop)):
                        seen[piece.name, element] = seen.get((piece.name, element), 0) + piece.counted
    whole = {(t.name, e) for t in fact.tensors for e in product(*map(range, t.shape))}
    assert seen.keys() == whole
    assert set(seen.values()) == {1}


def _interposed() -> tuple[UnitInfo, TPPlan]:
    """Columns 1 and 2 share a piece, which follows the two that all columns share on these columns alone."""
    col = DimSharding("col", (((0, 1),), ((1, 2),), ((1, 2),)))
    row = DimSharding("row", (((0, 1),), ((1, 2),)))
    cuts = (
        ParamSharding("norm", (None,), partial=True),
        ParamSharding("keys", (col,)),
        ParamSharding("stream", (row,), partial=True),
    )
    shapes = {"norm": (3,), "keys": (2,), "stream": (2,)}
    facts = tuple(ParamInfo(name, shape, 0) for name, shape in shapes.items())
    return UnitInfo("u", facts), TPPlan(2, 3, parameters=cuts)


@given(tensor_plans())
@example(_interposed())
def test_columns_that_share_a_piece_agree_on_its_columns_and_offset(
    given_: tuple[UnitInfo, TPPlan],
) -> None:
    fact, plan = given_
    cuts = {cut.name: cut for cut in plan.parameters}
    for row in range(plan.rows):
        layouts = [
            Layout.build([fact], coord=place) for place in TPCoord.all_coords(plan) if place.row == row
        ]
        for col, layout in enumerate(layouts):
            for piece in (piece for unit in layout.units for piece in unit.params):
                cut = cuts.get(piece.name)
                assert piece.sharers == (() if cut is None else cut.sharers(plan.cols, col))
                for other in piece.sharers:
                    assert _piece(layouts[other], piece.name).boxes == piece.boxes
                for theirs in (_piece(layout, piece.name) for layout in layouts if plan.rows == 1):
                    assert theirs.boxes != piece.boxes or theirs.start == piece.start
            for number, unit in enumerate(layout.units):
                in_runs = {
                    p.name for _, start, stop in unit.partial for p in unit.params if start <= p.start < stop
                }
                assert in_runs == {piece.name for piece in unit.params if piece.sharers}
                for sharers, _, _ in unit.partial:
                    theirs = [_lengths(layouts[other].units[number], sharers) for other in sharers]
                    assert theirs == [_lengths(unit, sharers)] * len(sharers)


def _lengths(unit: UnitLayout, wanted: tuple[int, ...]) -> list[int]:
    """Lengths of the messages that these columns sum."""
    return [stop - start for sharers, start, stop in unit.partial if sharers == wanted]


def _piece(layout: Layout, name: str) -> ParamShard:
    return next(piece for unit in layout.units for piece in unit.params if piece.name == name)


def test_a_gpu_holds_more_than_tensors_and_pins_powers_of_two() -> None:
    plan = Plan.parse("dp=2 zero=3 precision=bf16 offload=cpu")
    layout = Layout.build([UnitInfo("u", (ParamInfo("w", (3, 128, 128), 0),))], 2)
    cpu, gpu, with_more = (
        model_state_bytes(layout, plan, states_per_element=2, grad_itemsize=4, num_communicators=number)
        for number in (None, 0, 3)
    )
    assert (cpu.runtime, cpu.allocator) == (0, 0)
    assert gpu.runtime > 500 * 2**20
    assert with_more.runtime - gpu.runtime == 3 * 200 * 2**20
    owned = 3 * 128 * 128 // 2
    staged = 2 * 4 * owned  # gradient sums that are copied to the host
    assert gpu.buffers == cpu.buffers + staged
    assert gpu.allocator == gpu.temporary // 10
    assert gpu.total == cpu.total + staged + gpu.runtime + gpu.allocator
    rounded = {size: 1 << (size - 1).bit_length() for size in (4 * owned, 2 * owned)}
    assert gpu.host - cpu.host == 2 * (rounded[4 * owned] - 4 * owned) + rounded[2 * owned] - 2 * owned > 0
