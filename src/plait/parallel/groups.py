"""The ranks that a plan's data parallelism is between, and the dtypes that it computes and adds up in."""

from dataclasses import dataclass

import torch

from plait.comm import Group, Mesh
from plait.plan import Plan, adds_at_once, compresses


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
    """The groups of data parallelism, of this rank."""

    all: Group  # replicate x shard
    replicate: Group
    gathers: Group  # along shard; see [Note: two lanes] in `zero.py`
    reductions: Group
    at_once: Group  # for sums over all data ranks, where the plan makes such; else it is `reductions`

    @classmethod
    def of(cls, mesh: Mesh, plan: Plan) -> "DataGroups":
        reductions = mesh.group("shard", lane="reductions")
        at_once = compresses(plan) and adds_at_once(plan)
        return cls(
            mesh.group("replicate", "shard"),
            mesh.group("replicate", lane="reductions"),
            mesh.group("shard", lane="gathers"),
            reductions,
            mesh.group("replicate", "shard", lane="reductions") if at_once else reductions,
        )
