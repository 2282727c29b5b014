"""The strands: data parallelism over units of flat storage, ZeRO 0 to 3; layers cut on a grid; pipelines."""

from plait.parallel.activation_checkpoint import RecomputedForward, recompute_blocks
from plait.parallel.compile import compile_blocks
from plait.parallel.zero.flat_param import Unit
from plait.parallel.zero.grad_reduce import UnderWay
from plait.parallel.zero.groups import DataGroups, PartialSums, Precision
from plait.parallel.zero.materialize import bring_to_life, first_weights, let_go, move_buffers
from plait.parallel.zero.memory_stats import foretold_bytes, held_bytes, terms_of
from plait.parallel.zero.replica_check import Replicas
from plait.parallel.zero.shard_map import Holdings, persistent_buffers
from plait.parallel.zero.sharded_model import Held, SharedSums, Zero, cut_of
from plait.parallel.zero.sharded_optim import Masters, Owned
from plait.parallel.zero.state_dict import EngineState
from plait.parallel.zero.state_io import Kept, Source, WholeTensors, boxes_of, view_of

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
