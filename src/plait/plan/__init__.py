"""What can be decided without a device: plans, grids, layouts, bytes and FLOPs. Imports no torch."""

from plait.plan.grid import AXES, Grid
from plait.plan.layout import Box, Boxes, Layout, Overlap, Piece, Place, TensorFact, UnitFact, UnitLayout
from plait.plan.memory import MemoryUse, model_state_bytes
from plait.plan.plan import Plan
from plait.plan.stages import StageCut, deal, whole_model
from plait.plan.tensor import ParameterCut, TensorPlan
from plait.plan.wire import adds_at_once, compresses, room_bytes

__all__ = [
    "AXES",
    "Box",
    "Boxes",
    "Grid",
    "Layout",
    "MemoryUse",
    "Overlap",
    "ParameterCut",
    "Piece",
    "Place",
    "Plan",
    "StageCut",
    "TensorFact",
    "TensorPlan",
    "UnitFact",
    "UnitLayout",
    "adds_at_once",
    "compresses",
    "deal",
    "model_state_bytes",
    "room_bytes",
    "whole_model",
]
