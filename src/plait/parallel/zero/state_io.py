"""Between whole tensors and the boxes of them that a rank holds.

What a rank has to save, and where what it loads comes from.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import Group, raise_on_all
from plait.errors import CheckpointError
from plait.plan import Box, Boxes, boxes_of_range


def slice_boxes(whole: Tensor, boxes: Boxes) -> Tensor:
    """What the boxes hold of a whole tensor; a view of it where they are one box."""
    for dim, ranges in enumerate(boxes.ranges):
        if ranges != ((0, whole.shape[dim]),):
            parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def write_boxes(whole: Tensor, boxes: Boxes, held: Tensor) -> None:
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
    for run in boxes_of_range(boxes.shape, start, start + flat.numel()):
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


@dataclass(frozen=True, eq=False)
class StateShard:
    """Elements [start, stop) of the tensor that holds the boxes of a whole one, row by row."""

    key: str
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Boxes
    start: int
    stop: int
    read: Callable[[], Tensor]  # flat; of what lives on, good until the next step

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> "StateShard":
        """All of a tensor."""
        shape = tuple(tensor.shape)
        flat = tensor.detach().reshape(-1)
        return cls(key, shape, tensor.dtype, Boxes.full(shape), 0, tensor.numel(), lambda: flat)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def cpu(self) -> Tensor:
        """What is in it, on the CPU."""
        return self.read().detach().cpu()

    def share(self, number: int, of: int) -> "StateShard":
        """One of `of` runs of about as many elements."""
        numel = self.stop - self.start
        low, high = numel * number // of, numel * (number + 1) // of
        return StateShard(
            self.key,
            self.full_shape,
            self.dtype,
            self.boxes,
            self.start + low,
            self.start + high,
            lambda: self.read()[low:high],
        )


class StateReader(Protocol):
    """Whole tensors by key, of which a rank reads what it needs. Raises CheckpointError."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all of them."""

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        """Fills `into`, flat, with what lies from element `start` on in the tensor that holds the boxes.
        `counted`: of the ranks that hold one copy of the state, only this one reads it."""

    def whole(self, key: str) -> Tensor:
        """All of a tensor."""

    def finish(
        self, copy: Group, everyone: Group, device: torch.device, error: CheckpointError | None
    ) -> None:
        """Raises CheckpointError on every rank, if one has an `error` or has read what is damaged. `copy`:
        the ranks that hold one copy of the state."""


class InMemoryState:
    """A source in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}

    def read(
        self,
        key: str,
        boxes: Boxes,
        start: int,
        into: Tensor,
        *,
        counted: bool = True,  # noqa: ARG002
    ) -> None:
        held = slice_boxes(self._tensors[key].detach(), boxes).reshape(-1)
        into.copy_(held[start : start + into.numel()])

    def whole(self, key: str) -> Tensor:
        return self._tensors[key]

    def finish(
        self,
        copy: Group,  # noqa: ARG002
        everyone: Group,
        device: torch.device,
        error: CheckpointError | None,
    ) -> None:
        raise_on_all(error, everyone, device)
