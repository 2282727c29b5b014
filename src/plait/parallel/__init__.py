"""The strands: data parallelism over units of flat storage, ZeRO 0 to 3; layers cut on a grid; pipelines."""

from plait.parallel.account import foretold_bytes, held_bytes, terms_of
from plait.parallel.boxes import boxes_of, view_of
from plait.parallel.compile import compile_blocks
from plait.parallel.groups import DataGroups, PartialSums, Precision
from plait.parallel.held import Held, SharedSums
from plait.parallel.holdings import Holdings, persistent_buffers
from plait.parallel.kept import Kept, Source, WholeTensors
from plait.parallel.life import bring_to_life, first_weights, let_go, move_buffers
from plait.parallel.owned import Masters, Owned
from plait.parallel.recompute import RecomputedForward, recompute_blocks
from plait.parallel.reduce import UnderWay
from plait.parallel.replicas import Replicas
from plait.parallel.state import EngineState
from plait.parallel.units import Unit
from plait.parallel.zero import Zero, cut_of

__all__ = [
    "DataGroups",
    "EngineState",
    "Held",
    "Holdings",
    "Kept",
    "Masters",
    "Owned",
    "PartialSums",
    "Precision",
    "RecomputedForward",
    "Replicas",
    "SharedSums",
    "Source",
    "UnderWay",
    "Unit",
    "WholeTensors",
    "Zero",
    "boxes_of",
    "bring_to_life",
    "compile_blocks",
    "cut_of",
    "first_weights",
    "foretold_bytes",
    "held_bytes",
    "let_go",
    "move_buffers",
    "persistent_buffers",
    "recompute_blocks",
    "terms_of",
    "view_of",
]
