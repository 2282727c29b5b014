"""Division of the parameters over servers: ranges of the units' flat storages, in chunks.

The runs of elements with the same optimizer options, over all trained units in the order of forward, form one
flat sequence. It is divided into chunks of at most MAX_NUMEL elements, and server i holds the i-th part of
the sequence, so that servers are balanced to one chunk (Li et al. 2014, with equal ranges for hashing).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from plait.plan import UnitLayout
from plait.plan.layout import RANGE_ALIGNMENT

MAX_NUMEL = 2**20  # 4 MiB of float32
_CHUNKS_PER_SERVER = 4  # of small models, at least


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a trained unit's storage, of one optimizer group."""

    unit: int
    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of each server, in the order of forward; and a digest that two processes compare."""

    of_server: tuple[tuple[Chunk, ...], ...]
    digest: str

    @classmethod
    def build(cls, layouts: Sequence[UnitLayout], num_servers: int) -> "ChunkTable":
        """`layouts`: of the trained units, unsharded."""
        runs = [(unit, *run) for unit, layout in enumerate(layouts) for run in layout.owned_groups(0)]
        total = sum(stop - start for *_, start, stop in runs)
        wanted = -(-total // (_CHUNKS_PER_SERVER * num_servers))
        length = min(MAX_NUMEL, -(-wanted // RANGE_ALIGNMENT) * RANGE_ALIGNMENT)
        parts: list[list[Chunk]] = [[] for _ in range(num_servers)]
        before = 0
        for unit, group, low, high in runs:
            for start in range(low, high, length):
                chunk = Chunk(unit, group, start, min(start + length, high))
                parts[before * num_servers // total].append(chunk)
                before += chunk.numel
        names = [(layout.name, [(p.name, p.start, p.stop) for p in layout.params]) for layout in layouts]
        digest = hashlib.sha256(repr((names, parts)).encode()).hexdigest()[:16]
        return cls(tuple(map(tuple, parts)), digest)
