"""The host transport: verbs between the ranks of one host through memory that they share."""

from plait.comm.host.arena import Arena
from plait.comm.host.form import Board, open_group
from plait.comm.host.link import HostLink
from plait.comm.host.meet import Neighbours, meet

__all__ = ["Arena", "Board", "HostLink", "Neighbours", "meet", "open_group"]
