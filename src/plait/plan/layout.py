"""The layout: which box of which whole tensor each unit's flat storage holds, and where.

One table, read by whoever needs it: the units bind parameters to it, the optimizer takes its groups
from it, the checkpointer its names and shapes, the memory arithmetic its sizes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A piece starts at a multiple of this many elements: 16 bytes of bf16, which is what matrix units ask
# of a pointer. Widths of real models are multiples of it, so gaps are rare. They hold zeros for ever:
# no parameter lies there, so their gradient is zero.
ALIGNMENT = 8


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a whole tensor: start and stop per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __and__(self, other: "Box") -> "Box":
        """What both boxes hold; a box without elements where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(max(lo, min(a, b)) for lo, a, b in zip(start, self.stop, other.stop, strict=True))
        return Box(start, stop)


@dataclass(frozen=True)
class TensorFact:
    """What a plan needs to know of one parameter. `decay`: weight decay applies to it."""

    name: str
    shape: tuple[int, ...]
    decay: bool


@dataclass(frozen=True)
class UnitFact:
    """Parameters that are communicated together: a block, the embedding, the head."""

    name: str
    tensors: tuple[TensorFact, ...]


@dataclass(frozen=True)
class Piece:
    """The box of a whole tensor that a rank holds, `numel` elements from `start` in its unit's storage."""

    name: str
    whole_shape: tuple[int, ...]
    box: Box
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.box.numel


@dataclass(frozen=True)
class UnitLayout:
    """One flat storage. Pieces that decay stand first, so each optimizer group is one range."""

    name: str
    pieces: tuple[Piece, ...]
    decay_stop: int  # [0, decay_stop) decays, [decay_stop, numel) does not
    numel: int

    @classmethod
    def of(cls, unit: UnitFact) -> "UnitLayout":
        """Lays the tensors one behind the other: first those that decay, in the model's order."""
        pieces: list[Piece] = []
        position = decay_stop = 0
        for decay in (True, False):
            for tensor in unit.tensors:
                if tensor.decay != decay:
                    continue
                piece = Piece(tensor.name, tensor.shape, Box.whole(tensor.shape), position)
                pieces.append(piece)
                position = -(-piece.stop // ALIGNMENT) * ALIGNMENT
            if decay:
                decay_stop = position
        return cls(unit.name, tuple(pieces), decay_stop, position)

    @property
    def groups(self) -> tuple[tuple[bool, int, int], ...]:
        """The optimizer's groups: (decay, start, stop), those that are not empty."""
        ranges = ((True, 0, self.decay_stop), (False, self.decay_stop, self.numel))
        return tuple((decay, start, stop) for decay, start, stop in ranges if stop > start)


@dataclass(frozen=True)
class Layout:
    """Every unit of a rank, in the order in which forward uses them."""

    units: tuple[UnitLayout, ...]

    @classmethod
    def of(cls, units: Iterable[UnitFact]) -> "Layout":
        return cls(tuple(UnitLayout.of(unit) for unit in units if unit.tensors))

    @property
    def numel(self) -> int:
        """Elements that the rank stores, gaps included."""
        return sum(unit.numel for unit in self.units)

    @property
    def num_parameters(self) -> int:
        """Elements of whole tensors, each counted once."""
        return sum(math.prod(piece.whole_shape) for unit in self.units for piece in unit.pieces)
