"""The host transport: collectives between the ranks of one host through shared memory."""

from plait.comm.shm.arena import Arena
from plait.comm.shm.rendezvous import HostPeers, connect_host_peers, host_identity
from plait.comm.shm.transport import ShmTransport, open_group, open_host_group

__all__ = [
    "Arena",
    "HostPeers",
    "ShmTransport",
    "connect_host_peers",
    "host_identity",
    "open_group",
    "open_host_group",
]
