"""Plans, grids, layouts, byte and FLOP counts: everything decided without a device. Imports no torch."""

from plait.plan.comm_log import CommCount, CommKey, Traffic, subtract_traffic, sum_traffic
from plait.plan.compression import compresses, message_buffer_bytes, reduces_over_all
from plait.plan.grid import AXES, Grid
from plait.plan.layout import ExpertDim, Layout, Overlap, ParamInfo, ParamShard, TPCoord, UnitInfo, UnitLayout
from plait.plan.memory import (
    MemoryUse,
    format_bytes,
    model_state_bytes,
    pinned_bytes,
    used_categories,
)
from plait.plan.plan import Plan
from plait.plan.sharding import Box, Boxes, ParamSharding, TPPlan, boxes_of_range
from plait.plan.stages import StageAssignment, balance_blocks, single_stage

__all__ = [
    "AXES",
    "Box",
    "Boxes",
    "CommCount",
    "CommKey",
    "ExpertDim",
    "Grid",
    "Layout",
    "MemoryUse",
    "Overlap",
    "ParamInfo",
    "ParamShard",
    "ParamSharding",
    "Plan",
    "StageAssignment",
    "TPCoord",
    "TPPlan",
    "Traffic",
    "UnitInfo",
    "UnitLayout",
    "balance_blocks",
    "boxes_of_range",
    "compresses",
    "format_bytes",
    "message_buffer_bytes",
    "model_state_bytes",
    "pinned_bytes",
    "reduces_over_all",
    "single_stage",
    "subtract_traffic",
    "sum_traffic",
    "used_categories",
]
