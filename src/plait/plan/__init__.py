"""What can be decided without a device: plans, grids, layouts, bytes and FLOPs. Imports no torch."""

from plait.plan.boxes import Box, Boxes, runs
from plait.plan.grid import AXES, Grid
from plait.plan.layout import Layout, Overlap, Piece, Place, TensorFact, UnitFact, UnitLayout
from plait.plan.memory import MemoryUse, model_state_bytes
from plait.plan.plan import Plan, uncompilable
from plait.plan.stages import StageCut, deal, whole_model
from plait.plan.tensor import ParameterCut, TensorPlan
from plait.plan.traffic import Line, Tally, Traffic, added, between
from plait.plan.wire import adds_at_once, compresses, room_bytes

__all__ = [
    "AXES",
    "Box",
    "Boxes",
    "Grid",
    "Layout",
    "Line",
    "MemoryUse",
    "Overlap",
    "ParameterCut",
    "Piece",
    "Place",
    "Plan",
    "StageCut",
    "Tally",
    "TensorFact",
    "TensorPlan",
    "Traffic",
    "UnitFact",
    "UnitLayout",
    "added",
    "adds_at_once",
    "between",
    "compresses",
    "deal",
    "model_state_bytes",
    "room_bytes",
    "runs",
    "uncompilable",
    "whole_model",
]
