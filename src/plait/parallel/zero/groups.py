"""The ranks that a plan's parallelism is between, and the dtypes that it computes and adds up in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, Mesh, all_reduce, shares_memory
from plait.plan import Layout, Plan, UnitLayout, compresses, reduces_over_all


@dataclass(frozen=True)
class Precision:
    """What parameters are computed in, and what master weights and sums of gradients are kept in."""

    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, plan: Plan) -> "Precision":
        return {
            "fp64": cls(torch.float64, torch.float64),
            "fp32": cls(torch.float32, torch.float32),
            "bf16": cls(torch.bfloat16, torch.float32),
            "fp16": cls(torch.float16, torch.float32),
        }[plan.precision]


@dataclass(frozen=True)
class DataGroups:
    """The groups of data parallelism, of this rank, and those with which it shares a model."""

    everyone: Group
    all: Group  # replicate x shard
    replicate: Group
    gathers: Group  # along shard; see [Note: two lanes] in `zero.py`
    reductions: Group
    at_once: Group  # for sums over all data ranks, where the plan makes such; else it is `reductions`
    grid: Group  # row x col: those that cut the same layers
    model: Group  # pp x row x col: those that hold other pieces, for the same data
    stage: Group  # all ranks with pieces of the same stages
    pipeline: Group  # pp: those with other stages, for the same data
    norm: Group  # pp x shard x row x col: those that together hold one copy of the gradient

    @classmethod
    def of(cls, mesh: Mesh, plan: Plan) -> "DataGroups":
        reductions = mesh.group("shard", lane="reductions")
        at_once = compresses(plan) and reduces_over_all(plan)
        return cls(
            mesh.world.group,
            mesh.group("replicate", "shard"),
            mesh.group("replicate", lane="reductions"),
            mesh.group("shard", lane="gathers"),
            reductions,
            mesh.group("replicate", "shard", lane="reductions") if at_once else reductions,
            mesh.group("row", "col"),
            mesh.group("pp", "row", "col"),
            mesh.group("replicate", "shard", "row", "col"),
            mesh.group("pp"),
            mesh.group("pp", "shard", "row", "col", lane="reductions"),
        )


def shares_parameters(plan: Plan, groups: DataGroups) -> bool:
    """Whether the ranks along `shard` have one memory for them: see the note of that name in `units.py`."""
    return shares_memory(groups.gathers) and plan.offload != "cpu"


class ReplicatedGradReduce:
    """Sums what columns have computed of gradients that each of them sees a part of.

    [Note: when parts are summed]
    All ranks of a grid run the same program on the same data, so units complete in the same order on all of
    them: the sum is taken where a unit's reduction begins, at the same point of every rank's program, on
    connections of its own. What is summed there are a step's micro-batches together, and one message per
    unit and set of columns.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        found = {sharers for unit in layout.units if unit.trains for sharers, _, _ in unit.partial}
        in_order = sorted(found, key=lambda sharers: (len(sharers), sharers))
        self._groups = {sharers: mesh.part("col", sharers, lane="gradients") for sharers in in_order}

    def add_up(self, layout: UnitLayout, gradient: Tensor) -> None:
        """In place, in float32 at least. `gradient` is laid out like the unit's storage."""
        for sharers, start, stop in layout.partial:
            parts = gradient[start:stop]
            wide = parts.to(torch.promote_types(parts.dtype, torch.float32))
            all_reduce(wide, self._groups[sharers], label=f"parts of {layout.name}")
            if wide is not parts:
                parts.copy_(wide)
