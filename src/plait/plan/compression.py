"""Gradient compression arithmetic: message sizes, and the memory that compression needs.

  reduce    message                                              sent by a rank, per element of a unit
  fp16      half-precision values                                s (p-1)/p 2
  int8      per BLOCK elements: 8-bit codes and a scale          s (p-1)/p (1 + 4/BLOCK)
  powersgd  two thin factors of each matrix; the rest as it is   2 (p-1)/p 4 (r (n + m) / (n m)) of a matrix

p ranks are summed over; s is 1 if each keeps its range, 2 if all get everything. With replicas of ranges
(hybrid sharding), fp16 and int8 compress each of the two reductions, PowerSGD one over all data ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from plait.plan.layout import Layout, UnitLayout
from plait.plan.plan import Plan

BLOCK = 256  # elements under one scale; every range of a unit is a multiple of it
BLOCK_BYTES = {
    "bf16": 2 * BLOCK,
    "fp16": 2 * BLOCK,
    "int8": BLOCK + 4,
}  # the scale is float32: its rounding error is negligible
SUM_BYTES = 4  # of an element of a sum: float32
_MIN_MESSAGE_BLOCKS = 512  # of a message: 133 kB of 8-bit codes


@dataclass(frozen=True)
class Matrix:
    """A tensor sent as two factors: dim 0 by all other dims, from `start` in a flat tensor."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Factors:
    """The messages of PowerSGD for a flat tensor: matrices as two factors of `rank`, other ranges as is."""

    rank: int
    matrices: tuple[Matrix, ...]  # larger than their factors
    uncompressed: tuple[tuple[int, int], ...]  # start and stop

    @classmethod
    def of(cls, tensors: Iterable[tuple[int, tuple[int, ...]]], rank: int) -> "Factors":
        """`tensors`: start and shape of each, in order."""
        matrices, uncompressed = [], []
        for start, shape in tensors:
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
            if rank * (rows + columns) < rows * columns:
                matrices.append(Matrix(start, rows, columns))
            else:
                uncompressed.append((start, start + rows * columns))
        return cls(rank, tuple(matrices), tuple(uncompressed))

    @classmethod
    def of_unit(cls, unit: UnitLayout, rank: int) -> "Factors":
        return cls.of(((shard.start, shard.boxes.shape) for shard in unit.params), rank)

    @classmethod
    def sizes_of(cls, units: Iterable[UnitLayout], rank: int | None) -> tuple[int, int]:
        """`left_bytes` and `right_numel` of these units together; 0 without PowerSGD."""
        all_factors = [cls.of_unit(unit, rank) for unit in units] if rank is not None else []
        return sum(f.left_bytes for f in all_factors), sum(f.right_numel for f in all_factors)

    @property
    def left_bytes(self) -> int:
        """Bytes of the first message: left factors, and tensors that are not compressed."""
        plain = sum(stop - start for start, stop in self.uncompressed)
        return SUM_BYTES * (plain + self.rank * sum(matrix.rows for matrix in self.matrices))

    @property
    def right_numel(self) -> int:
        """Elements of the second message: right factors."""
        return self.rank * sum(matrix.columns for matrix in self.matrices)


def compresses(plan: Plan) -> bool:
    """Return whether gradients are compressed. False on one data rank."""
    return plan.token_ranks > 1 and plan.reduce not in ("fp32", "bf16")


def rounds_to_bf16(plan: Plan) -> bool:
    """Return whether gradients are rounded to bf16. Gradients that are not sent are not rounded."""
    return plan.reduce == "bf16" and plan.reduced_ranks > 1


def full_grad_dtype(plan: Plan, *, receives: bool) -> str:
    """The dtype of full gradients, as a value of `precision`: narrow if each reduction sends one narrow
    contribution per rank. `receives`: a range's owner receives the contributions as they are, and adds them.

    See [Note: narrow messages, wide sums] in `comm/torch_transport.py`. Compression adds its residuals to the
    buffer and leaves sums in it, so it is wide.
    """
    sums = "fp64" if plan.dtype == "fp64" else "fp32"
    if compresses(plan) or (plan.accumulates_full and plan.micro > 1):
        return sums
    if rounds_to_bf16(plan):
        return "bf16"
    return plan.dtype if receives else sums


def reduces_over_all(plan: Plan) -> bool:
    """Return whether a compressed reduction covers all data ranks and leaves none over replicas.

    PowerSGD factors are themselves sums over ranks, so any number of ranks will do.
    """
    return plan.powersgd_rank is not None or (plan.shard_degree == 1 and plan.accumulates_full)


def reductions_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """(ranks, number of ranges that a unit is in by then) of each compressed reduction of a unit, in
    order."""
    shards, replicas = plan.shard_degree, plan.token_ranks // plan.shard_degree
    if reduces_over_all(plan):
        return ((plan.token_ranks, 1),)
    return tuple((ranks, ranges) for ranks, ranges in ((shards, 1), (replicas, shards)) if ranks > 1)


def blocks_per_rank(numel: int, ranks: int) -> int:
    """Blocks that each rank sums; the last ranks may have fewer."""
    return -(-numel // (BLOCK * ranks))


def message_blocks(num_blocks: int) -> tuple[int, ...]:
    """Blocks of each message between two ranks: see [Note: two messages] in `comm/compression.py`."""
    if num_blocks < 2 * _MIN_MESSAGE_BLOCKS:
        return (num_blocks,)
    return num_blocks - num_blocks // 2, num_blocks // 2


def code_bytes(numel: int, ranks: int, reduce: str) -> int:
    """Bytes of a rank's message buffers for one reduction: codes to and from all ranks."""
    return 2 * ranks * blocks_per_rank(numel, ranks) * BLOCK_BYTES[reduce]


def message_buffer_bytes(layout: Layout, plan: Plan) -> tuple[int, ...]:
    """Bytes of the message buffers of each reduction: sized for the largest unit, one at a time."""
    trained = _compressed_units(layout, plan)
    if plan.powersgd_rank is not None:
        largest = max((Factors.of_unit(u, plan.powersgd_rank).left_bytes for u in trained), default=0)
        return tuple(largest for _ in reductions_of(plan))
    return tuple(
        max((code_bytes(unit.numel // ranges, ranks, plan.reduce) for unit in trained), default=0)
        for ranks, ranges in reductions_of(plan)
    )


def residual_bytes(layout: Layout, plan: Plan) -> int:
    """Bytes kept from step to step: compression errors (error feedback) and right factors."""
    if plan.reduce == "fp16":
        return 0
    total = 0
    for unit in _compressed_units(layout, plan):
        total += sum(SUM_BYTES * unit.numel // ranges for _, ranges in reductions_of(plan))
        if plan.powersgd_rank is not None:
            total += SUM_BYTES * Factors.of_unit(unit, plan.powersgd_rank).right_numel
    return total


def _compressed_units(layout: Layout, plan: Plan) -> list[UnitLayout]:
    return [unit for unit in layout.units if unit.trains] if compresses(plan) else []
