"""Seconds and memory of parameter servers: bytes over bandwidth, through the links that carry most.

Workers push during the last micro-batch's backward and pull when the servers have updated. Between domains,
all exchanges of a process are counted as if they crossed the network.
"""

from plait.errors import PlanError
from plait.plan import MemoryUse, Plan
from plait.plan.estimate.server_traffic import server_memory, server_traffic, worker_memory
from plait.planner.communication import Links, network

_STATES = 2  # of Adam


def check_is_priced(plan: Plan) -> None:
    """Raise PlanError unless the slowest process of the plan decides a step's time."""
    if plan.sync != "all":
        raise PlanError(
            "the planner can price parameter servers only with sync=all",
            given=f"sync={plan.sync}",
            expected="workers that take every step together",
            hint="sync=all; how much the other policies gain depends on how uneven the workers are",
        )


def exchange_s(plan: Plan, links: Links, numel: int) -> tuple[float, float]:
    """Seconds of a step's pushes and of its pulls. `numel`: of the model."""
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


def fullest(plan: Plan, use: MemoryUse, high: float, numel: int) -> tuple[MemoryUse, float]:
    """Return the bytes of the fullest process, and the upper end of their interval. `use`, `high`: of a rank
    with the full model and its optimizer's states, which they are without servers."""
    if not plan.num_servers:
        return use, high
    uses = [worker_memory(plan, use, numel, _STATES)]
    if plan.servers:
        uses.append(server_memory(plan, numel, _STATES))
    largest = max(uses, key=lambda each: each.total)
    return largest, high / use.total * largest.total
