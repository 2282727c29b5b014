"""What gradients travel as when they are compressed: messages, and what has to be kept and held for them.

  reduce    a message holds                                      sent by a rank, per element of a unit
  fp16      halves                                               s (p-1)/p 2
  int8      of every BLOCK elements: 8-bit codes and a scale     s (p-1)/p (1 + 4/BLOCK)
  powersgd  two thin factors of each matrix; the rest as it is   2 (p-1)/p 4 (r (n + m) / (n m)) of a matrix

p ranks add up; s is 1 where each keeps its range, 2 where all get everything. Where replicas are on top of
ranges (hybrid sharding), codes are made for each of the two sums and factors for one over all data ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.plan.layout import Layout, UnitLayout
from plait.plan.plan import Plan

BLOCK = 256  # elements under one scale; every range of a unit is a multiple of it
BLOCK_BYTES = {
    "bf16": 2 * BLOCK,
    "fp16": 2 * BLOCK,
    "int8": BLOCK + 4,
}  # a float32 scale: its rounding does not add to the codes'
SUM_BYTES = 4  # bytes of an element that is added up: float32


@dataclass(frozen=True)
class Matrix:
    """A piece that travels as two factors: its dim 0 by all others, from `start` in its unit's storage."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


def compresses(plan: Plan) -> bool:
    """Whether gradients travel as something that has to be computed. Nothing does on one rank."""
    return plan.dp > 1 and plan.reduce not in ("fp32", "bf16")


def reduces_over_all(plan: Plan) -> bool:
    """Whether a compressed sum is over all data ranks, so that replicas have nothing left to add.

    Factors are sums over ranks themselves: how many ranks does not matter to them.
    """
    return plan.powersgd_rank is not None or (plan.shard_degree == 1 and plan.accumulates_full)


def matrices(unit: UnitLayout, rank: int) -> tuple[Matrix, ...]:
    """The pieces that are larger than their factors of this rank."""
    found = []
    for piece in unit.params:
        rows, columns = _as_matrix(piece.boxes.shape)
        if rank * (rows + columns) < rows * columns:
            found.append(Matrix(piece.start, rows, columns))
    return tuple(found)


def reductions_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """(ranks that add up, ranges that a unit is in by then) of each compressed sum that it goes through."""
    shards, replicas = plan.shard_degree, plan.dp // plan.shard_degree
    if reduces_over_all(plan):
        return ((plan.dp, 1),)
    return tuple((ranks, cut) for ranks, cut in ((shards, 1), (replicas, shards)) if ranks > 1)


def blocks_per_rank(numel: int, ranks: int) -> int:
    """How many blocks each rank adds up; the last ranks may have fewer."""
    return -(-numel // (BLOCK * ranks))


def code_bytes(numel: int, ranks: int, reduce: str) -> int:
    """Of what a rank has in hand for one sum: codes for and from all ranks."""
    return 2 * ranks * blocks_per_rank(numel, ranks) * BLOCK_BYTES[reduce]


def factor_bytes(unit: UnitLayout, rank: int) -> int:
    """Of a unit's first message: left factors, and what stays as it is."""
    found = matrices(unit, rank)
    plain = sum(p.boxes.numel for p in unit.params) - sum(m.rows * m.columns for m in found)
    return SUM_BYTES * (plain + rank * sum(m.rows for m in found))


def message_buffer_bytes(layout: Layout, plan: Plan) -> tuple[int, ...]:
    """Of what the messages of each sum are made in: the largest unit's, for one at a time."""
    trained = _compressed_units(layout, plan)
    if plan.powersgd_rank is not None:
        largest = max((factor_bytes(u, plan.powersgd_rank) for u in trained), default=0)
        return tuple(largest for _ in reductions_of(plan))
    return tuple(
        max((code_bytes(unit.numel // cut, ranks, plan.reduce) for unit in trained), default=0)
        for ranks, cut in reductions_of(plan)
    )


def residual_bytes(layout: Layout, plan: Plan) -> int:
    """What lives from step to step: what was lost on the way, and right factors to start from."""
    if plan.reduce == "fp16":
        return 0
    total = 0
    for unit in _compressed_units(layout, plan):
        total += sum(SUM_BYTES * unit.numel // cut for _, cut in reductions_of(plan))
        if plan.powersgd_rank is not None:
            total += (
                SUM_BYTES * plan.powersgd_rank * sum(m.columns for m in matrices(unit, plan.powersgd_rank))
            )
    return total


def _compressed_units(layout: Layout, plan: Plan) -> list[UnitLayout]:
    return [unit for unit in layout.units if unit.trains] if compresses(plan) else []


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
