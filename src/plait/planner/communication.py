"""Seconds of communication: by the bytes, the group's placement on the cluster, and who shares its links.

[Note: hierarchical collectives]
A group of ranks has members inside domains (one switched link) and spans domains over the hosts' network.
Its rings pass every member, and enter and leave every domain as often as there are network cards, so the two
levels work at the same time: the slower one decides. All groups of one kind communicate at once, so groups of
the same domain share its network: with l members per domain, domain / l groups do (AxoNN's beta = beta_node
/ min(ranks of a host, inner degree)).

[Note: rings and trees]
A ring passes its members one after the other: NCCL's reduce-scatters and all-gathers are rings (before 2.23,
and since then with more than one rank per host), so a small message in a wide group takes as long as all of
its hops. All-reduces have trees over hosts as well. Latencies are added up as NCCL's own choice between the
two does (nccl/src/graph/tuning.cc: 3.4 us a hop over NVLink, 14 us over the network).
"""

import math
from functools import lru_cache
from typing import NamedTuple

from plait.plan import Plan
from plait.plan.events import server_traffic
from plait.planner.cluster import Cluster
from plait.planner.constants import Constants


class Links(NamedTuple):
    """Usable bandwidths of a cluster, per direction; hashable, for caches."""

    domain: int  # devices of one switched link
    link: float  # of a device, bytes/s
    network: float  # of a domain, bytes/s
    leaf_domains: float  # domains below one leaf: beyond them, bandwidth is divided by `oversubscription`
    oversubscription: float
    host: float  # of a device to its host's memory, bytes/s
    collective_s: float
    hop_s: float
    network_hop_s: float
    measured: tuple[tuple[str, int, int, float, float], ...]  # domains for the hosts of `DeviceSpeed.network`

    @classmethod
    @lru_cache(maxsize=1 << 6)
    def of(cls, cluster: Cluster, constants: Constants) -> "Links":
        hosts_per_domain = max(1, cluster.domain_size // cluster.host_size)
        device = cluster.device
        return cls(
            max(cluster.domain_size, cluster.host_size),
            device.link_bytes_per_s * constants.link_fraction,
            cluster.network_bytes_per_s * hosts_per_domain * constants.network_fraction,
            max(1.0, cluster.leaf_hosts / hosts_per_domain),
            cluster.oversubscription,
            device.host_bytes_per_s * constants.link_fraction,
            constants.collective_s,
            constants.hop_s,
            constants.network_hop_s,
            (
                *((*row[:2], 1, row[2], row[3] / constants.link_fraction) for row in device.collectives),
                *((*row[:4], row[4] / constants.network_fraction) for row in cluster.network),
            ),
        )

    def measured_s(self, kind: str, ranks: int, domains: int, num_bytes: float) -> float | None:
        """Seconds of a collective of so many ranks in each domain; None if it was not measured."""
        for name in (kind, _ELSEWHERE.get(kind)):
            for *placed, start_s, byte_s in self.measured:
                if placed == [name, ranks, domains]:
                    return start_s + num_bytes * byte_s
        return None


_ELSEWHERE = {  # where no memory is shared
    "scattered sum": "reduce-scatter",
    "unshard": "all-gather",
    "foreign all-reduce": "all-reduce",
    "exchange in layers": "all-to-all",
}


class Group(NamedTuple):
    """`degree` ranks, `stride` apart, of a job of `ranks`."""

    degree: int
    stride: int
    ranks: int

    def placement(self, domain: int) -> tuple[int, int]:
        """Members in one domain, and domains of the group: of the worst group."""
        span = self.degree * self.stride
        if span <= domain:
            if domain % span == 0 or self.ranks <= domain:
                return self.degree, 1
            return -(-self.degree // 2), 2  # some group crosses a border
        local = max(1, domain // self.stride)
        return local, -(-self.degree // local)


@lru_cache(maxsize=1 << 15)
def collective_s(kind: str, links: Links, group: Group, num_bytes: float) -> float:
    """Seconds of a collective of `plan.host_profile.KINDS`, or of an "exchange in layers": of heads by
    attention over ranks, of tokens by experts, on `num_bytes` of the full tensor.

    Each of the passes (reduce-scatter, all-gather) sends (n - 1) / n of the bytes along every level.
    """
    if group.degree == 1 or not num_bytes:
        return 0.0
    passes = 2 if kind.endswith("all-reduce") else 1
    local, domains = group.placement(links.domain)
    measured_s = links.measured_s(kind, local, domains, num_bytes)
    if measured_s is not None:
        return measured_s
    share = (group.degree - 1) / group.degree
    inside = share * num_bytes / links.link if local > 1 else 0.0
    between = 0.0
    if domains > 1:
        sharing = min(links.domain, group.ranks) / local
        # It passes nothing on: each member sends to every member of the other domains.
        crossing = local * (group.degree - local) / group.degree if kind == "exchange in layers" else share
        between = crossing * num_bytes * sharing / network(links, domains * group.stride)
    is_ring = passes == 1 and kind != "exchange in layers"
    hops = _hops_s(links, group.degree, local, domains, is_ring=is_ring)
    return links.collective_s + passes * (max(inside, between) + hops)


def _hops_s(links: Links, degree: int, local: int, domains: int, *, is_ring: bool) -> float:
    """Seconds until the first byte has passed all members, in one pass. See [Note: rings and trees]."""
    ring = (degree - domains) * links.hop_s + (domains - 1) * links.network_hop_s
    if is_ring or domains == 1:
        return ring
    return min(ring, (local - 1) * links.hop_s + 2 * math.log2(domains) * links.network_hop_s)


def network(links: Links, ranks_apart: int) -> float:
    """Bytes/s of a domain to ranks so far away."""
    leaves = ranks_apart > links.leaf_domains * links.domain
    return links.network / (links.oversubscription if leaves else 1.0)


@lru_cache(maxsize=1 << 12)
def send_s(links: Links, stride: int, ranks: int, num_bytes: float) -> float:
    """Seconds of a message to the rank `stride` further, which all ranks of a domain send at once."""
    is_inside = stride * 2 <= links.domain or ranks <= links.domain
    if is_inside or stride >= links.domain:
        measured_s = links.measured_s("send-receive", *((2, 1) if is_inside else (1, 2)), num_bytes)
        if measured_s is not None:
            return measured_s
    if is_inside:
        return links.collective_s + num_bytes / links.link
    sharing = min(links.domain, stride)
    return links.collective_s + links.network_hop_s + num_bytes * sharing / network(links, stride)


def server_exchange_s(plan: Plan, links: Links, numel: int) -> tuple[float, float]:
    """Seconds of a step's pushes to parameter servers and of its pulls, through the links that carry most.
    `numel`: of the model.

    Workers push during the last micro-batch's backward and pull when the servers have updated. Between
    domains, all exchanges of a process are counted as if they crossed the network.
    """
    traffic, workers = server_traffic(plan, numel), plan.dp
    if traffic.server is None:
        half = links.collective_s + _through(plan, links, (traffic.worker[0], workers)) / 2
        return half, half
    pushes = ((traffic.worker[0], workers), (traffic.server[1], plan.servers))
    pulls = ((traffic.server[0], plan.servers), (traffic.worker[1], workers))
    push, pull = (links.collective_s + _through(plan, links, *flows) for flows in (pushes, pulls))
    if plan.server == "replicated":  # between pushes and pulls
        pull += links.collective_s + _through(plan, links, (traffic.replica[0], plan.servers))
    return push, pull


def _through(plan: Plan, links: Links, *flows: tuple[int, int]) -> float:
    """Seconds of (bytes of a process, number of such processes): of the fullest link."""
    seconds = max(num_bytes / links.link for num_bytes, _ in flows)
    if plan.num_ranks > links.domain:
        rate = network(links, plan.num_ranks)
        between = max(num_bytes * min(processes, links.domain) / rate for num_bytes, processes in flows)
        seconds = max(seconds, between)
    return seconds
