"""The host transport: verbs between the ranks of one host through memory that they share."""

from plait.comm.shm.arena import Arena
from plait.comm.shm.rendezvous import HostPeers, meet
from plait.comm.shm.transport import Mailbox, ShmTransport, open_group

__all__ = ["Arena", "HostPeers", "Mailbox", "ShmTransport", "meet", "open_group"]
