"""Every element of every tensor lies in exactly one place of its unit's storage; bytes follow from that."""

import math

from hypothesis import given
from hypothesis import strategies as st

from plait.plan import Box, Layout, Plan, TensorFact, UnitFact, UnitLayout, model_state_bytes
from plait.plan.layout import ALIGNMENT

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
units = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=8).map(
    lambda facts: UnitFact("u", tuple(TensorFact(f"t{i}", s, d) for i, (s, d) in enumerate(facts)))
)
boxes = st.integers(0, 3).flatmap(
    lambda n: st.tuples(*[st.lists(st.tuples(*[st.integers(0, 6)] * 2), min_size=n, max_size=n)] * 2)
)


@given(units)
def test_pieces_are_aligned_do_not_overlap_and_hold_every_tensor_whole(fact: UnitFact) -> None:
    layout = UnitLayout.of(fact)
    end = 0
    for piece in layout.pieces:
        assert piece.start % ALIGNMENT == 0
        assert end <= piece.start < end + ALIGNMENT
        assert piece.box == Box.whole(piece.whole_shape)
        end = piece.stop
    assert end <= layout.numel < end + ALIGNMENT
    assert {p.name: p.whole_shape for p in layout.pieces} == {t.name: t.shape for t in fact.tensors}


@given(units)
def test_a_group_holds_just_the_pieces_of_its_kind(fact: UnitFact) -> None:
    layout = UnitLayout.of(fact)
    decays = {tensor.name: tensor.decay for tensor in fact.tensors}
    covered = 0
    for decay, start, stop in layout.groups:
        assert start == covered
        covered = stop
        inside = [piece for piece in layout.pieces if start <= piece.start < stop]
        assert inside
        assert all(decays[piece.name] == decay and piece.stop <= stop for piece in inside)
    assert covered == layout.numel


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


def test_bytes_of_adam_in_mixed_precision_are_zeros_table() -> None:
    layout = Layout.of([UnitFact("u", (TensorFact("w", (64, 128), True),))])
    assert layout.num_parameters == layout.numel == 8192
    use = model_state_bytes(layout, Plan(precision="bf16"), states_per_element=2)
    assert (use.parameters, use.gradients, use.master, use.optimizer) == (
        2 * 8192,
        4 * 8192,
        4 * 8192,
        8 * 8192,
    )
    use = model_state_bytes(layout, Plan(precision="fp32"), states_per_element=1, activation_bytes=7)
    assert (use.parameters, use.gradients, use.master, use.optimizer) == (4 * 8192, 4 * 8192, 0, 4 * 8192)
    assert use.total == 12 * 8192 + 7
