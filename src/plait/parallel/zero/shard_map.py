"""The layout of a model over the ranks that together hold one copy: who has which boxes of a tensor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from plait.models import buffers_like_weights
from plait.parallel.zero.rank_context import Precision
from plait.plan import Grid, Layout, Plan, StageAssignment, TPCoord, UnitLayout
from plait.plan.axes import EXPERTS, STAGES, Roles, UnitKind
from plait.plan.layout import ParamShard, UnitInfo


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in a state_dict: forward may change them, and a resumed run needs them."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def buffer_dtypes(model: nn.Module, plan: Plan) -> dict[int, torch.dtype]:
    """The dtypes in which floating-point buffers are stored if not in their own, by id. Numbers keep theirs:
    they widen nothing that they are combined with, and may count."""
    if plan.precision == "fp64":
        return {id(b): torch.float64 for b in model.buffers() if b.is_floating_point()}
    compute = Precision.from_plan(plan).compute
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.ndim and b.dtype != compute]
    if compute == torch.float32 or not buffers:
        return {}
    follow = buffers_like_weights(model)
    return {id(b): compute for b in buffers if id(b) in follow}


@dataclass(frozen=True)
class StandaloneTensor:
    """A parameter or buffer that is in no unit."""

    kind: str  # weights or buffers
    stage: int  # the one whose copy is saved
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ShardMap:
    """Stages, their units and the tensors outside units. The same value on every rank.

    names        the model's parameters, in its order
    layouts      for every rank along PARTS (pp x ep x row x col, in rank order) the layout of each of its
                 stages
    standalone   tensors outside units, by name
    copies       ranks along EXPERTS, which have the same dense units
    grid_size    ranks that shard the same layers
    """

    names: tuple[str, ...]
    layouts: Sequence[Mapping[int, Layout]]
    standalone: Mapping[str, StandaloneTensor]
    copies: int
    grid_size: int

    @classmethod
    def from_plan(
        cls,
        model: nn.Module,
        facts: Sequence[UnitInfo],
        assignment: StageAssignment,
        rank_of: Mapping[int, int],
        grid: Grid,
        coords: Sequence[TPCoord],
        plan: Plan,
    ) -> "ShardMap":
        """Lay out a full model. `rank_of`: the `pp` coordinate of each stage. `coords`: of the ranks with
        parts of the same stages."""
        layouts: list[dict[int, Layout]] = []
        shards = {kind: grid.degree(*Roles.from_plan(plan).states(kind)) for kind in UnitKind}
        for rank in range(grid.degree(STAGES)):
            stages = [stage for stage in range(assignment.num_stages) if rank_of[stage] == rank]
            layouts += [
                {
                    stage: Layout.build(
                        assignment.units_of(stage, facts),
                        shards,
                        coord,
                        assignment.counted_on_other_stage(stage),
                    )
                    for stage in stages
                }
                for coord in coords
            ]
        in_units = {tensor.name for unit in facts for tensor in unit.tensors}
        named = dict(model.named_parameters())
        standalone = {
            name: StandaloneTensor("weights", assignment.owner[name], tuple(p.shape), p.dtype)
            for name, p in named.items()
            if name not in in_units
        }
        buffers = persistent_buffers(model)
        dtypes = buffer_dtypes(model, plan) if buffers else {}
        standalone |= {
            name: StandaloneTensor(
                "buffers", assignment.owner[name], tuple(buffer.shape), dtypes.get(id(buffer), buffer.dtype)
            )
            for name, buffer in buffers.items()
        }
        copies = grid.degree(*EXPERTS)
        return cls(tuple(named), layouts, standalone, copies, len(coords) // copies)

    def units(self) -> Iterator[tuple[int, int, dict[int, UnitLayout]]]:
        """Every unit as (stage, index in it, the layout on each rank along PARTS that has it). Of the ranks
        along EXPERTS, only the first has dense units here."""
        for stage in sorted({stage for layouts in self.layouts for stage in layouts}):
            by_rank = {rank: own[stage].units for rank, own in enumerate(self.layouts) if stage in own}
            for index, unit in enumerate(next(iter(by_rank.values()))):
                kind = unit.kind
                yield stage, index, {r: units[index] for r, units in by_rank.items() if self.holds(r, kind)}

    def holds(self, rank: int, kind: UnitKind) -> bool:
        """Return whether a rank along PARTS is the first of those that have the same units of this kind."""
        return kind is UnitKind.EXPERT or rank // self.grid_size % self.copies == 0

    def params(self) -> Iterator[tuple[ParamShard, int | None]]:
        """Every parameter in a unit once: one rank's shard, and its optimizer group; None if it is frozen. A
        rank that has some of it is taken, if there is one."""
        seen: set[str] = set()
        for _, _, by_rank in self.units():
            found: dict[str, tuple[ParamShard, int | None]] = {}
            for unit in by_rank.values():
                for shard in unit.params:
                    if shard.name not in found or not found[shard.name][0].boxes.numel:
                        found[shard.name] = shard, unit.group_of(shard)
            yield from (each for name, each in found.items() if name not in seen)
            seen |= found.keys()

    @cached_property
    def num_parameters(self) -> int:
        """Trainable elements of full tensors, each counted once."""
        return sum(
            torch.Size(shard.full_shape).numel() for shard, group in self.params() if group is not None
        )

    def first_rank(self, stage: int) -> int:
        """The first rank along MODEL that has a stage."""
        return next(rank for rank, layouts in enumerate(self.layouts) if stage in layouts) // self.copies
