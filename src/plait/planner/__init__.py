"""Time, memory and cost of any plan on any cluster, and the best plan. Imports no torch.

from plait.planner import ModelShape, Workload, cluster, search

model = ModelShape.from_config("config.json")
found = search(model, cluster("dgx-h100:8"), Workload(sequence=8192, batch=512))
print(found.best[0].plan, found.best[0].price.step_s)
"""

from plait.planner.cluster import Cluster, cluster
from plait.planner.families import Family
from plait.planner.hardware import Device, device
from plait.planner.model_shape import ModelShape
from plait.planner.outcome import Outcome
from plait.planner.price import Price, Software, Workload, price
from plait.planner.search import OBJECTIVES, Found, Objective, search

__all__ = [
    "OBJECTIVES",
    "Cluster",
    "Device",
    "Family",
    "Found",
    "ModelShape",
    "Objective",
    "Outcome",
    "Price",
    "Software",
    "Workload",
    "cluster",
    "device",
    "price",
    "search",
]
