"""The forms of parallelism: ZeRO 0 to 3, tensor and pipeline parallelism, DistributedDataParallel."""

from plait.parallel.activation_checkpoint import RecomputedForward, recompute_blocks
from plait.parallel.compile import compile_blocks
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.grad_reduce import InFlightReductions
from plait.parallel.zero.groups import DataGroups, Precision, ReplicatedGradReduce
from plait.parallel.zero.materialize import bind_flat_params, init_flat_params, move_buffers, release_unused
from plait.parallel.zero.memory_stats import allocated_bytes, estimated_bytes, transport_facts
from plait.parallel.zero.replica_check import ReplicaCheck
from plait.parallel.zero.shard_map import ShardMap, persistent_buffers
from plait.parallel.zero.sharded_model import ShardedModel, ShardedStage, TiedGradReduce, flat_param_config
from plait.parallel.zero.sharded_optim import MasterWeights, ShardedOptimizer
from plait.parallel.zero.state_dict import ShardedState
from plait.parallel.zero.state_io import InMemoryState, StateReader, StateShard, boxes_of, view_of

__all__ = [
    "DataGroups",
    "FlatParam",
    "InFlightReductions",
    "InMemoryState",
    "MasterWeights",
    "Precision",
    "RecomputedForward",
    "ReplicaCheck",
    "ReplicatedGradReduce",
    "ShardMap",
    "ShardedModel",
    "ShardedOptimizer",
    "ShardedStage",
    "ShardedState",
    "StateReader",
    "StateShard",
    "TiedGradReduce",
    "allocated_bytes",
    "bind_flat_params",
    "boxes_of",
    "compile_blocks",
    "estimated_bytes",
    "flat_param_config",
    "init_flat_params",
    "move_buffers",
    "persistent_buffers",
    "recompute_blocks",
    "release_unused",
    "transport_facts",
    "view_of",
]
