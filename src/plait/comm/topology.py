"""Which ranks of a group are on one host."""

import hashlib

import torch

from plait.comm.collectives import Group, all_gather
from plait.comm.shm.rendezvous import identity


def hosts_of(group: Group, device: torch.device | None = None) -> tuple[tuple[int, ...], ...]:
    """Of each host, the places of its ranks in a group, in order. Every rank must call it. `device`: of the
    ranks, by default the CPU.

    Containers of one machine with networks of their own count as hosts.
    """
    found = torch.empty(group.size, dtype=torch.int64, device=device)
    all_gather(found, torch.tensor([_fingerprint()], device=device), group, label="host names")
    by_host: dict[int, list[int]] = {}
    for place, host in enumerate(found.tolist()):
        by_host.setdefault(host, []).append(place)
    return tuple(map(tuple, by_host.values()))


def _fingerprint() -> int:
    """Of this process's host: LOCAL_WORLD_SIZE says nothing about who sits together."""
    digest = hashlib.sha256(identity().encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
