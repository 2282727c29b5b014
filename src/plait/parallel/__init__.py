"""The strands. So far: data parallelism over units of flat storage, ZeRO 0 to 3; layers cut on a grid."""

from plait.parallel.account import foretold_bytes, held_bytes
from plait.parallel.compile import compile_blocks
from plait.parallel.groups import DataGroups, PartialSums, Precision
from plait.parallel.life import bring_to_life
from plait.parallel.owned import Masters, Owned
from plait.parallel.recompute import recompute_blocks
from plait.parallel.state import EngineState, persistent_buffers
from plait.parallel.units import Unit
from plait.parallel.zero import Zero

__all__ = [
    "DataGroups",
    "EngineState",
    "Masters",
    "Owned",
    "PartialSums",
    "Precision",
    "Unit",
    "Zero",
    "bring_to_life",
    "compile_blocks",
    "foretold_bytes",
    "held_bytes",
    "persistent_buffers",
    "recompute_blocks",
]
