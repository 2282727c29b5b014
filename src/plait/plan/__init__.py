"""What can be decided without a device: plans, grids, layouts, bytes and FLOPs. Imports no torch."""

from plait.plan.comm_log import CommCount, CommKey, Traffic, added, between
from plait.plan.compression import adds_at_once, compresses, room_bytes
from plait.plan.estimate.memory import MemoryUse, model_state_bytes
from plait.plan.grid import AXES, Grid
from plait.plan.layout import Layout, Overlap, Piece, TensorFact, TPCoord, UnitFact, UnitLayout
from plait.plan.plan import Plan, uncompilable
from plait.plan.sharding import Box, Boxes, ParamSharding, TPPlan, runs
from plait.plan.stages import StageAssignment, balance_blocks, single_stage

__all__ = [
    "AXES",
    "Box",
    "Boxes",
    "CommCount",
    "CommKey",
    "Grid",
    "Layout",
    "MemoryUse",
    "Overlap",
    "ParamSharding",
    "Piece",
    "Plan",
    "StageAssignment",
    "TPCoord",
    "TPPlan",
    "TensorFact",
    "Traffic",
    "UnitFact",
    "UnitLayout",
    "added",
    "adds_at_once",
    "balance_blocks",
    "between",
    "compresses",
    "model_state_bytes",
    "room_bytes",
    "runs",
    "single_stage",
    "uncompilable",
]
