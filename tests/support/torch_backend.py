"""Joining a process group over plait's backend, on ranks."""

import os

import torch.distributed as dist

from plait.comm import register_backend


def join(times: int = 1) -> dist.ProcessGroup:
    """Join the default process group. `times`: how often this run has joined one."""
    register_backend()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['PLAIT_RENDEZVOUS_FILE']}-{times}", size)
    dist.init_process_group("plait", store=store, rank=rank, world_size=size)
    assert dist.get_backend() == "plait"
    assert dist.group.WORLD is not None
    return dist.group.WORLD
