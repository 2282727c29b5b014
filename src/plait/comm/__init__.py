"""The only door to torch.distributed: the world, groups over grid axes, the verbs, the local launcher."""

from plait.comm.connect import World, connect
from plait.comm.launch import launch_local
from plait.comm.mesh import Mesh
from plait.comm.verbs import (
    Exchange,
    Group,
    Pending,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    sends_narrow,
    start_all_gather,
    start_all_reduce,
    start_exchange,
    start_reduce_scatter,
)

__all__ = [
    "Exchange",
    "Group",
    "Mesh",
    "Pending",
    "World",
    "all_gather",
    "all_reduce",
    "broadcast",
    "connect",
    "launch_local",
    "reduce_scatter",
    "sends_narrow",
    "start_all_gather",
    "start_all_reduce",
    "start_exchange",
    "start_reduce_scatter",
]
