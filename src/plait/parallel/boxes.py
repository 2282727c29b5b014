"""Between whole tensors and the boxes of them that a rank holds."""

from collections.abc import Iterator
from itertools import accumulate, product

import torch
from torch import Tensor

from plait.plan import Box, Boxes, runs


def taken(whole: Tensor, boxes: Boxes) -> Tensor:
    """What the boxes hold of a whole tensor; a view of it where they are one box."""
    for dim, ranges in enumerate(boxes.ranges):
        if ranges != ((0, whole.shape[dim]),):
            parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def put(whole: Tensor, boxes: Boxes, held: Tensor) -> None:
    """The other way: writes what the boxes hold into the whole tensor."""
    lengths = [[stop - start for start, stop in ranges] for ranges in boxes.ranges]
    starts = [list(accumulate(sizes, initial=0)) for sizes in lengths]
    for numbers in product(*(range(len(ranges)) for ranges in boxes.ranges)):
        to, source = whole, held
        for dim, number in enumerate(numbers):
            start, stop = boxes.ranges[dim][number]
            to = to.narrow(dim, start, stop - start)
            source = source.narrow(dim, starts[dim][number], stop - start)
        to.copy_(source)


def boxes_of(flat: Tensor, boxes: Boxes, start: int) -> Iterator[tuple[Box, Tensor]]:
    """`flat` is what lies from element `start` on in the tensor that holds the boxes, row by row: (box of the
    whole tensor, view of `flat` in its shape) of all of it."""
    at = 0
    for run in runs(boxes.shape, start, start + flat.numel()):
        rows = flat[at : at + run.numel].view(run.shape)
        at += run.numel
        for whole, place in boxes.parts(run):
            yield whole, view_of(rows, place)


def view_of(tensor: Tensor, box: Box) -> Tensor:
    """What of a tensor is in a box of it."""
    for dim, (start, stop) in enumerate(box.edges):
        if (start, stop) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
