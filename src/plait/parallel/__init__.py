"""The strands. So far: data parallelism over units of flat storage."""

from plait.parallel.compile import compile_blocks
from plait.parallel.life import bring_to_life
from plait.parallel.recompute import recompute_blocks
from plait.parallel.units import Precision, Unit, UnitState, make_units
from plait.parallel.zero import DataParallel

__all__ = [
    "DataParallel",
    "Precision",
    "Unit",
    "UnitState",
    "bring_to_life",
    "compile_blocks",
    "make_units",
    "recompute_blocks",
]
