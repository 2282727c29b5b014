"""What can be decided without a device: plans, grids, layouts, bytes and FLOPs. Imports no torch."""

from plait.plan.comm_log import Line, Tally, Traffic, added, between
from plait.plan.compression import adds_at_once, compresses, room_bytes
from plait.plan.estimate.memory import MemoryUse, model_state_bytes
from plait.plan.grid import AXES, Grid
from plait.plan.layout import Layout, Overlap, Piece, Place, TensorFact, UnitFact, UnitLayout
from plait.plan.plan import Plan, uncompilable
from plait.plan.sharding import Box, Boxes, ParameterCut, TensorPlan, runs
from plait.plan.stages import StageCut, deal, whole_model

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
