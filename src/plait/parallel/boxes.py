"""Between whole tensors and the boxes of them that a rank holds."""

from itertools import accumulate, product

import torch
from torch import Tensor

from plait.plan import Boxes


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
