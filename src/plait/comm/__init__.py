"""The only door to torch.distributed: the world, groups over grid axes, the verbs, the local launcher."""

from plait.comm.connect import World, connect
from plait.comm.launch import launch_local
from plait.comm.mesh import Mesh
from plait.comm.verbs import (
    Group,
    Pending,
    Summing,
    all_gather,
    all_reduce,
    broadcast,
    is_direct,
    reduce_scatter,
    sends_narrow,
    start_all_gather,
    start_all_reduce,
    start_exchange,
    start_reduce_scatter,
)

__all__ = [
    "Group",
    "Mesh",
    "Pending",
    "Summing",
    "World",
    "all_gather",
    "all_reduce",
    "broadcast",
    "connect",
    "is_direct",
    "launch_local",
    "reduce_scatter",
    "sends_narrow",
    "start_all_gather",
    "start_all_reduce",
    "start_exchange",
    "start_reduce_scatter",
]
