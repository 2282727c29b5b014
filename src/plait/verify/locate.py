"""Where numbers differ: of each parameter, the coordinates of the ranks whose own pieces are off."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from plait.comm import all_gather, broadcast
from plait.engine.engine import Engine
from plait.plan import AXES, Grid


def places(
    expected: Mapping[str, Tensor], names: Sequence[str], engine: Engine, *, off: float
) -> dict[str, str]:
    """By name, where the last step's gradients differ from what the first rank, which is asked, expects of
    them, by more than `off` of a piece's norm: see `described`. Elsewhere {}. Every rank calls it."""
    world, shapes = engine.world, engine.weight_shapes()
    order = list(shapes)
    asked = torch.full((len(shapes),), -1, device=engine.device)
    for place, name in enumerate(name for name in names if name in expected):
        asked[place] = order.index(f"weights/{name}")
    broadcast(asked, world.group)
    found: dict[str, str] = {}
    for index in asked[asked >= 0].tolist():
        name = order[index].removeprefix("weights/")
        whole = torch.empty(shapes[order[index]], dtype=torch.float64, device=engine.device)
        if world.rank == 0:
            whole.copy_(expected[name])
        broadcast(whole, world.group)
        own = engine.gradient_error(name, whole)
        row = torch.tensor(own or (-1.0, -1.0), dtype=torch.float64, device=engine.device)
        rows = row.new_empty(2 * world.size)
        all_gather(rows, row, world.group)
        if world.rank == 0:
            found[name] = _text(rows.view(-1, 2).tolist(), off, Grid.from_plan(engine.plan))
    return found


def _text(errors: Sequence[Sequence[float]], off: float, grid: Grid) -> str:
    """`errors`: of every rank the squared error of its piece and the square of what it should be."""
    holders = [rank for rank, (_, square) in enumerate(errors) if square >= 0]
    largest = max((square for _, square in errors), default=0.0)
    allowed = {rank: off * math.sqrt(max(errors[rank][1], 1e-6 * largest, 1e-60)) for rank in holders}
    wrong = [rank for rank in holders if not math.sqrt(errors[rank][0]) <= allowed[rank]]  # or it is NaN
    return described(wrong, holders, grid) if wrong else ""


def described(off: Collection[int], holders: Collection[int], grid: Grid) -> str:
    """Ranks in the words of the grid: what they share on axes along which holders of the parameter differ.

    `everywhere` where all that hold it are off; `col=1`; `replicate=0,1 col=1`; ranks by number where they
    are no block of the grid.
    """
    if set(off) == set(holders):
        return "everywhere"
    coords = {rank: grid.coord(rank) for rank in holders}
    words, block = [], set(holders)
    for axis in AXES:
        mine = {coords[rank][axis] for rank in off}
        if mine != {coords[rank][axis] for rank in holders}:
            words.append(f"{axis}={','.join(map(str, sorted(mine)))}")
            block = {rank for rank in block if coords[rank][axis] in mine}
    return " ".join(words) if block == set(off) else f"ranks {', '.join(map(str, sorted(off)))}"
