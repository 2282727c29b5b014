"""The host transport: verbs between the ranks of one host through memory that they share."""

from plait.comm.shm.arena import Arena
from plait.comm.shm.rendezvous import Neighbours, meet
from plait.comm.shm.transport import Board, HostLink, open_group

__all__ = ["Arena", "Board", "HostLink", "Neighbours", "meet", "open_group"]
