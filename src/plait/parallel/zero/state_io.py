"""Conversion between full tensors and the boxes that a rank holds; the interfaces of saving and loading.

`StateShard` is a part of the state that a rank saves, `StateReader` a source that it loads from.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import Group, raise_on_all, receive, receive_text, send, send_text
from plait.errors import CheckpointError, shown
from plait.plan import Box, Boxes, boxes_of_range


def slice_boxes(full: Tensor, boxes: Boxes) -> Tensor:
    """The elements of a full tensor in the boxes; a view if they are one box."""
    for dim, ranges in enumerate(boxes.ranges):
        if ranges != ((0, full.shape[dim]),):
            slices = [full.narrow(dim, start, stop - start) for start, stop in ranges]
            full = slices[0] if len(slices) == 1 else torch.cat(slices, dim)
    return full


def write_boxes(full: Tensor, boxes: Boxes, values: Tensor) -> None:
    """Write the elements of the boxes into a full tensor: the inverse of `slice_boxes`."""
    lengths = [[stop - start for start, stop in ranges] for ranges in boxes.ranges]
    starts = [list(accumulate(sizes, initial=0)) for sizes in lengths]
    for indices in product(*(range(len(ranges)) for ranges in boxes.ranges)):
        to, source = full, values
        for dim, index in enumerate(indices):
            start, stop = boxes.ranges[dim][index]
            to = to.narrow(dim, start, stop - start)
            source = source.narrow(dim, starts[dim][index], stop - start)
        to.copy_(source)


def boxes_of(flat: Tensor, boxes: Boxes, start: int) -> Iterator[tuple[Box, Tensor]]:
    """Split `flat` into (box of the full tensor, view of `flat` in its shape). `flat` holds the elements from
    `start` on of the tensor that consists of the boxes, row by row."""
    at = 0
    for run in boxes_of_range(boxes.shape, start, start + flat.numel()):
        rows = flat[at : at + run.numel].view(run.shape)
        at += run.numel
        for box, box_in_rows in boxes.parts(run):
            yield box, view_of(rows, box_in_rows)


def view_of(tensor: Tensor, box: Box) -> Tensor:
    """View of a tensor's elements in a box."""
    for dim, (start, stop) in enumerate(box.edges):
        if (start, stop) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


@dataclass(frozen=True, eq=False)
class StateShard:
    """Elements [start, stop) of the tensor that consists of the boxes of a full one, row by row."""

    key: str
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Boxes
    start: int
    stop: int
    read: Callable[[], Tensor]  # flat; a view of live state, valid until the next step
    forward_may_write: bool = False  # such as a buffer; other state is written by the optimizer only

    @classmethod
    def from_tensor(cls, key: str, tensor: Tensor) -> "StateShard":
        """A full tensor as one shard."""
        shape = tuple(tensor.shape)
        flat = tensor.detach().reshape(-1)
        return cls(
            key,
            shape,
            tensor.dtype,
            Boxes.full(shape),
            0,
            tensor.numel(),
            lambda: flat,
            forward_may_write=True,
        )

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def cpu(self) -> Tensor:
        """The elements, on the CPU."""
        return self.read().detach().cpu()

    def chunk(self, index: int, num_chunks: int) -> "StateShard":
        """One of `num_chunks` consecutive ranges of nearly equal length."""
        numel = self.stop - self.start
        low, high = numel * index // num_chunks, numel * (index + 1) // num_chunks
        return StateShard(
            self.key,
            self.full_shape,
            self.dtype,
            self.boxes,
            self.start + low,
            self.start + high,
            lambda: self.read()[low:high],
            self.forward_may_write,
        )


class StateReader(Protocol):
    """Full tensors by key, of which a rank reads the parts that it needs. Raises CheckpointError.

    Implemented by `InMemoryState` and by `checkpoint/reader.py`.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all full tensors."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of all full tensors."""

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        """Fill `into`, flat, with the elements from `start` on of the tensor that consists of the boxes.
        `counted`: only this one of the ranks that hold one copy of the state reads them."""

    def read_full(self, key: str) -> Tensor:
        """Return a full tensor."""

    def finish(
        self, copy: Group, everyone: Group, device: torch.device, error: CheckpointError | None
    ) -> None:
        """Raise CheckpointError on every rank if one has an `error` or has read damaged data. `copy`: the
        ranks that hold one copy of the state."""


def _is_entry(key: object, tensor: object) -> bool:
    is_tensor = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return isinstance(key, str) and is_tensor and not (tensor.is_meta or tensor.is_quantized)  # type: ignore[attr-defined]


def not_engine_state(
    given: str, expected: str, hint: str = "engine.state(), or the files of engine.save"
) -> CheckpointError:
    return CheckpointError("this is not the state of an engine", given=given, expected=expected, hint=hint)


class InMemoryState:
    """A StateReader over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError for anything but tensors with values, by name."""
        self._tensors = tensors
        invalid = f"a {type(tensors).__name__}"
        if isinstance(tensors, Mapping):
            entries = (f"{shown(key)}: {shown(of)}" for key, of in tensors.items() if not _is_entry(key, of))
            invalid = next(entries, "")
        if invalid:
            raise not_engine_state(invalid, "a dict of tensors by name", "engine.state()")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {key: tensor.dtype for key, tensor in self._tensors.items()}

    def read(
        self,
        key: str,
        boxes: Boxes,
        start: int,
        into: Tensor,
        *,
        counted: bool = True,  # noqa: ARG002
    ) -> None:
        values = slice_boxes(self._tensors[key].detach(), boxes).reshape(-1)
        into.copy_(values[start : start + into.numel()])

    def read_full(self, key: str) -> Tensor:
        return self._tensors[key]

    def finish(
        self,
        copy: Group,  # noqa: ARG002
        everyone: Group,
        device: torch.device,
        error: CheckpointError | None,
    ) -> None:
        raise_on_all(error, everyone, device)


def collect_shards(shards: Sequence[StateShard], world: Group, device: torch.device) -> dict[str, Tensor]:
    """The full tensors of all ranks' shards by key, on rank 0; {} elsewhere. Collective."""
    if world.rank:
        facts = [
            (s.key, s.full_shape, str(s.dtype), s.boxes.ranges, s.start, s.stop - s.start) for s in shards
        ]
        send_text(json.dumps(facts), world, 0, device)
        for shard in (shard for shard in shards if shard.num_bytes):
            send(shard.read().detach().to(device), world, 0, label=shard.key)
        return {}
    full: dict[str, Tensor] = {}
    for shard in shards:
        _write(full, shard.key, shard.full_shape, shard.boxes, shard.start, shard.read().detach())
    for rank in range(1, world.size):
        for key, shape, dtype, ranges, start, numel in json.loads(receive_text(world, rank, device)):
            flat = torch.empty(numel, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            if numel:
                receive(flat, world, rank, label=key)
            boxes = Boxes(tuple(tuple((low, high) for low, high in dim) for dim in ranges))
            _write(full, key, tuple(shape), boxes, start, flat)
    return dict(sorted(full.items()))


def _write(
    full: dict[str, Tensor], key: str, shape: tuple[int, ...], boxes: Boxes, start: int, flat: Tensor
) -> None:
    """Write a shard into its full tensor, which is created with the first one."""
    if key not in full:
        full[key] = torch.empty(shape, dtype=flat.dtype)
    for box, values in boxes_of(flat, boxes, start):
        view_of(full[key], box).copy_(values)
