"""The hosts of a group's ranks."""

import hashlib

import torch

from plait.comm.collectives import Group, all_gather
from plait.comm.shm.rendezvous import host_identity


def ranks_by_host(group: Group, device: torch.device | None = None) -> tuple[tuple[int, ...], ...]:
    """Return, for each host, the group ranks on it, in order. Collective. `device`: of the ranks, by default
    the CPU.

    Containers of one machine with separate network namespaces count as hosts.
    """
    fingerprints = torch.empty(group.size, dtype=torch.int64, device=device)
    all_gather(fingerprints, torch.tensor([_fingerprint()], device=device), group, label="host names")
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(fingerprints.tolist()):
        by_host.setdefault(host, []).append(rank)
    return tuple(map(tuple, by_host.values()))


def _fingerprint() -> int:
    """Hash of this process's host identity. LOCAL_WORLD_SIZE does not show which ranks share a host."""
    digest = hashlib.sha256(host_identity().encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
