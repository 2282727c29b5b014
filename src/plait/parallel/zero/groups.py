"""Process groups and dtypes of a plan, and the reduction of replicated parameters' gradients over columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, Mesh, all_reduce, shares_memory
from plait.plan import Layout, Plan, UnitLayout, compresses
from plait.plan.compression import reduces_over_all


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters in forward and backward, and that of master weights and reduced gradients."""

    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def from_plan(cls, plan: Plan) -> "Precision":
        return {
            "fp64": cls(torch.float64, torch.float64),
            "fp32": cls(torch.float32, torch.float32),
            "bf16": cls(torch.bfloat16, torch.float32),
            "fp16": cls(torch.float16, torch.float32),
        }[plan.precision]


@dataclass(frozen=True)
class DataGroups:
    """The process groups of this rank's data parallelism, and those with which it shares a model."""

    world: Group
    dp: Group  # replicate x shard
    replicate: Group
    all_gather: Group  # along shard; see [Note: two channels] in `sharded_model.py`
    reduce_scatter: Group  # along shard
    dp_reduce: Group  # replicate x shard, if the plan reduces over both at once; otherwise `reduce_scatter`
    tp: Group  # row x col: ranks that shard the same layers
    model: Group  # pp x row x col: ranks with other parts of the model, for the same data
    stage: Group  # replicate x shard x row x col: ranks of the same stages
    pp: Group  # ranks with other stages, for the same data
    norm: Group  # pp x shard x row x col: ranks that together hold one copy of the gradient

    @classmethod
    def build(cls, mesh: Mesh, plan: Plan) -> "DataGroups":
        reduce_scatter = mesh.group("shard", channel="reductions")
        single_reduction = compresses(plan) and reduces_over_all(plan)
        return cls(
            mesh.world.group,
            mesh.group("replicate", "shard"),
            mesh.group("replicate", channel="reductions"),
            mesh.group("shard", channel="gathers"),
            reduce_scatter,
            mesh.group("replicate", "shard", channel="reductions") if single_reduction else reduce_scatter,
            mesh.group("row", "col"),
            mesh.group("pp", "row", "col"),
            mesh.group("replicate", "shard", "row", "col"),
            mesh.group("pp"),
            mesh.group("pp", "shard", "row", "col", channel="reductions"),
        )


def shares_parameters(plan: Plan, groups: DataGroups) -> bool:
    """Whether the ranks along `shard` share one memory: [Note: parameters in shared memory],
    `flat_param.py`."""
    return shares_memory(groups.all_gather) and plan.offload != "cpu"


class ReplicatedGradReduce:
    """Sums over columns the gradients of parameters that are replicated over `col` but see partial inputs.

    [Note: reduction over columns]
    All ranks of a tensor-parallel grid run the same program on the same data, so units complete in the same
    order on all of them. The all-reduce runs where a unit's reduction starts, at the same point of every
    rank's program, on its own connections. It sums a step's micro-batches together, with one message per unit
    and set of columns.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        column_sets = {sharers for unit in layout.units if unit.trains for sharers, _, _ in unit.partial}
        in_order = sorted(column_sets, key=lambda sharers: (len(sharers), sharers))
        self._groups = {sharers: mesh.subgroup("col", sharers, channel="gradients") for sharers in in_order}

    def reduce(self, layout: UnitLayout, gradient: Tensor) -> None:
        """All-reduce in place, in float32 at least. `gradient` is laid out like the unit's storage."""
        for sharers, start, stop in layout.partial:
            partial_sums = gradient[start:stop]
            wide = partial_sums.to(torch.promote_types(partial_sums.dtype, torch.float32))
            all_reduce(wide, self._groups[sharers], label=f"parts of {layout.name}")
            if wide is not partial_sums:
                partial_sums.copy_(wide)
