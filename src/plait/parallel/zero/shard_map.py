"""Who holds what of a model, over all the ranks that hold one: the same value on each of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.plan import Grid, Layout, ParamShard, Plan, StageAssignment, TPCoord, UnitInfo, UnitLayout


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict holds: what forward may change, and what a resumed run needs."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def buffer_dtype(buffer: Tensor, plan: Plan) -> torch.dtype:
    """What a buffer is kept in."""
    return torch.float64 if plan.precision == "fp64" and buffer.is_floating_point() else buffer.dtype


@dataclass(frozen=True)
class StandaloneTensor:
    """A parameter or buffer that lies in no unit."""

    kind: str  # weights or buffers
    stage: int  # whose counts
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ShardMap:
    """Stages, their units and what lies in none.

    order       the model's parameters by name, in its order
    layouts     of every rank of the model (pp x row x col, in rank order) the layout of each of its stages
    loose       what lies in no unit, by name
    """

    order: tuple[str, ...]
    layouts: Sequence[Mapping[int, Layout]]
    loose: Mapping[str, StandaloneTensor]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        facts: Sequence[UnitInfo],
        cut: StageAssignment,
        rank_of: Mapping[int, int],
        grid: Grid,
        places: Sequence[TPCoord],
        plan: Plan,
    ) -> "ShardMap":
        """Of the whole model. `rank_of`: the place on `pp` of each stage. `places`: of the ranks that cut the
        same layers."""
        layouts: list[dict[int, Layout]] = []
        for rank in range(grid.degree("pp")):
            stages = [stage for stage in range(cut.num_stages) if rank_of[stage] == rank]
            layouts += [
                {
                    stage: Layout.build(
                        cut.units_of(stage, facts),
                        grid.degree("shard"),
                        place,
                        cut.counted_on_other_stage(stage),
                    )
                    for stage in stages
                }
                for place in places
            ]
        placed = {tensor.name for unit in facts for tensor in unit.tensors}
        named = dict(model.named_parameters())
        loose = {
            name: StandaloneTensor("weights", cut.owner[name], tuple(p.shape), p.dtype)
            for name, p in named.items()
            if name not in placed
        }
        loose |= {
            name: StandaloneTensor(
                "buffers", cut.owner[name], tuple(buffer.shape), buffer_dtype(buffer, plan)
            )
            for name, buffer in persistent_buffers(model).items()
        }
        return cls(tuple(named), layouts, loose)

    def units(self) -> Iterator[tuple[int, int, dict[int, UnitLayout]]]:
        """(stage, number in it, the ranks of the model that have it with their layouts) of every unit."""
        for stage in sorted({stage for layouts in self.layouts for stage in layouts}):
            held = {rank: found[stage].units for rank, found in enumerate(self.layouts) if stage in found}
            for number in range(len(next(iter(held.values())))):
                yield stage, number, {rank: units[number] for rank, units in held.items()}

    def pieces(self) -> Iterator[tuple[ParamShard, bool]]:
        """Of every parameter that lies in a unit, once: some rank's piece, and whether it trains."""
        seen: set[str] = set()
        for _, _, held in self.units():
            unit = next(iter(held.values()))
            for piece in unit.params:
                if piece.name not in seen:
                    seen.add(piece.name)
                    yield piece, unit.trains

    @property
    def num_parameters(self) -> int:
        """Trainable elements of whole tensors, each counted once."""
        return sum(torch.Size(piece.full_shape).numel() for piece, trains in self.pieces() if trains)

    def first_rank(self, stage: int) -> int:
        """The first rank of the model that has a stage."""
        return next(rank for rank, layouts in enumerate(self.layouts) if stage in layouts)
