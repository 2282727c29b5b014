"""The transport of a group that nobody has chosen one for: shared memory on one host, else Gloo."""

from datetime import timedelta

import torch.distributed as dist

from plait.comm.host import Board, meet, open_group
from plait.comm.torch_link import over_gloo
from plait.comm.transport import Transport


def best_transport(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Transport:
    """A transport of its own for `size` ranks that meet in this store, which nothing else uses."""
    gloo = over_gloo(store, rank, size, timeout)
    neighbours, hosts, _ = meet(rank, size, gloo, wanted=True)
    if neighbours is not None and len(set(hosts)) == 1:
        gloo.cut()
        ranks, board = tuple(range(size)), Board.of(store)
        return open_group(neighbours, ranks, rank, board, "plait/group", timeout, is_own=True)
    if neighbours is not None:
        neighbours.close()
    return gloo
