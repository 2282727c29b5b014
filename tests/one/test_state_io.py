"""Boxes of a tensor are taken out of it and put together again."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.zero.state_io import slice_boxes, write_boxes
from plait.plan import Boxes

partitions = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=3)


def holders(lengths: list[int]) -> list[tuple[tuple[int, int], ...]]:
    """Two ranks' ranges of a dim: every other run, the rest."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    runs = list(pairwise(edges))
    return [tuple(ranges) for ranges in (runs[::2], runs[1::2]) if ranges]


@given(partitions)
def test_the_boxes_of_all_ranks_make_the_full_tensor(lengths: list[list[int]]) -> None:
    shape = [sum(dim) for dim in lengths]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = torch.full_like(whole, -1)
    grids = [Boxes(())]
    for dim in lengths:
        grids = [Boxes((*grid.ranges, ranges)) for grid in grids for ranges in holders(dim)]
    for boxes in grids:
        held = slice_boxes(whole, boxes)
        assert held.shape == boxes.shape
        index = torch.meshgrid(
            *(torch.tensor([i for run in ranges for i in range(*run)]) for ranges in boxes.ranges),
            indexing="ij",
        )
        assert torch.equal(held, whole[index])
        write_boxes(found, boxes, held)
    assert torch.equal(found, whole)


def test_a_whole_tensor_is_taken_without_a_copy() -> None:
    whole = torch.zeros(3, 4)
    assert slice_boxes(whole, Boxes.full((3, 4))).data_ptr() == whole.data_ptr()
    assert slice_boxes(torch.ones(()), Boxes(())).shape == ()
