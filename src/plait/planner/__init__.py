"""Time, memory and cost of any plan on any cluster, and the best plan. Imports no torch.

from plait.planner import ModelShape, Workload, cluster, search

model = ModelShape.from_config("config.json")
found = search(model, cluster("dgx-h100:8"), Workload(sequence=8192, batch=512))
print(found.best[0].plan, found.best[0].price.step_s)
"""

from plait.plan.devices import Device, device
from plait.planner.cluster import Cluster, cluster
from plait.planner.model_shape import ModelShape
from plait.planner.plan_families import PlanFamily
from plait.planner.ranked_plan import RankedPlan
from plait.planner.search import OBJECTIVES, Objective, SearchResult, search
from plait.planner.step_estimate import Software, StepEstimate, Workload, estimate_step

__all__ = [
    "OBJECTIVES",
    "Cluster",
    "Device",
    "ModelShape",
    "Objective",
    "PlanFamily",
    "RankedPlan",
    "SearchResult",
    "Software",
    "StepEstimate",
    "Workload",
    "cluster",
    "device",
    "estimate_step",
    "search",
]
