"""Locate mismatches: for each parameter, the coordinates of the ranks whose shards are wrong."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from plait.comm import all_gather, broadcast
from plait.engine.engine import Engine
from plait.plan import AXES, Grid


def locate_mismatches(expected: Mapping[str, Tensor], engine: Engine, *, tolerance: float) -> dict[str, str]:
    """Map each parameter to the ranks whose gradient shards, in the last step, differ from `expected`.

    `expected` and the result, descriptions as in `describe_ranks`, are rank 0's; {} on the others.
    `tolerance`: relative to the norm of a shard. Collective.
    """
    world, shapes = engine.world, engine.weight_shapes()
    order = list(shapes)
    indices = torch.full((len(shapes),), -1, device=engine.device)
    for position, name in enumerate(expected):
        indices[position] = order.index(f"weights/{name}")
    broadcast(indices, world.group)
    descriptions: dict[str, str] = {}
    for index in indices[indices >= 0].tolist():
        name = order[index].removeprefix("weights/")
        reference = torch.empty(shapes[order[index]], dtype=torch.float64, device=engine.device)
        if world.rank == 0:
            reference.copy_(expected[name])
        broadcast(reference, world.group)
        own = engine.gradient_distance(name, reference)
        row = torch.tensor(own or (-1.0, -1.0), dtype=torch.float64, device=engine.device)
        rows = row.new_empty(2 * world.size)
        all_gather(rows, row, world.group)
        if world.rank == 0:
            errors = rows.view(-1, 2).tolist()
            descriptions[name] = _description(errors, tolerance, Grid.from_plan(engine.plan))
    return descriptions


def _description(errors: Sequence[Sequence[float]], tolerance: float, grid: Grid) -> str:
    """`errors`: per rank the squared norms of its shard's error and of the reference; negative: no shard."""
    holders = [rank for rank, (_, square) in enumerate(errors) if square >= 0]
    largest = max((square for _, square in errors), default=0.0)
    allowed = {rank: tolerance * math.sqrt(max(errors[rank][1], 1e-6 * largest, 1e-60)) for rank in holders}
    wrong = [rank for rank in holders if not math.sqrt(errors[rank][0]) <= allowed[rank]]  # or it is NaN
    return describe_ranks(wrong, holders, grid) if wrong else ""


def describe_ranks(wrong: Collection[int], holders: Collection[int], grid: Grid) -> str:
    """Describe the wrong ranks by their coordinates on the axes where not all holders are wrong.

    Such as `col=1` or `replicate=0,1 col=1`; `all ranks` if all holders of the parameter are wrong; rank
    numbers if they are not a block of the grid.
    """
    if set(wrong) == set(holders):
        return "all ranks"
    coords = {rank: grid.coord(rank) for rank in holders}
    parts, block = [], set(holders)
    for axis in AXES:
        values = {coords[rank][axis] for rank in wrong}
        if values != {coords[rank][axis] for rank in holders}:
            parts.append(f"{axis}={','.join(map(str, sorted(values)))}")
            block = {rank for rank in block if coords[rank][axis] in values}
    return " ".join(parts) if block == set(wrong) else f"ranks {', '.join(map(str, sorted(wrong)))}"
