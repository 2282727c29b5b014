"""Traffic and memory of parameter servers: bytes per step and process, next to those of a ring.

N elements are pushed at p bytes and pulled at q bytes by each of w workers; S servers hold N / S each.

  process                   sends                receives
  worker                    N p                  N q
  dedicated server          w N / S q            w N / S p
  colocated (both roles)    (w-1)/w N (p + q)    (w-1)/w N (p + q)
  ring, zero=1              (w-1)/w N (p + q)    (w-1)/w N (p + q)

Under local steps, what is pushed is a change of weights, and what is pulled are master weights: once in H
steps, so these are 1 / H of a step.

A replicated server sends the sum of N / S gradients, m bytes each, to its replica on the next server, and
receives as many; and it has all that a server has twice.

On one host none of it is sent: processes map each other's memory, and the same bytes pass through it.
"""

from dataclasses import dataclass, replace

from plait.plan.compression import BLOCK, BLOCK_BYTES
from plait.plan.estimate.memory import COMPUTE_BYTES, MASTER_BYTES, MemoryUse
from plait.plan.plan import Plan
from plait.plan.servers import top_share

_NUMBER_BYTES = 4  # of an element that is sent by itself


@dataclass(frozen=True)
class ServerTraffic:
    """Bytes of a step, as (sent, received).

    worker   of a worker; with colocated servers, of a process, which is both
    server   of a dedicated server, without its replica
    replica  of a server, for replicas
    ring     of a rank of `zero=1` over the workers
    """

    worker: tuple[int, int]
    server: tuple[int, int] | None
    ring: tuple[int, int]
    replica: tuple[int, int] = (0, 0)


def server_traffic(plan: Plan, numel: int) -> ServerTraffic:
    """`numel`: trained elements of the model. Pushes that leave out zeros are smaller."""
    push, pull = numel * _push_bytes(plan), float(numel * COMPUTE_BYTES[plan.dtype])
    full, share = float(numel * MASTER_BYTES[plan.dtype]), (plan.dp - 1) / plan.dp
    reduced = full if top_share(plan.reduce) or plan.local_steps else push  # no ring sends parts or changes
    ring = round(share * (reduced + pull))
    if plan.local_steps:
        push, pull, full = (num_bytes / plan.local_steps for num_bytes in (push, full, full))
    if plan.server == "colocated":
        both = round(share * (push + pull))
        return ServerTraffic((both, both), None, (ring, ring))
    each = plan.dp / plan.num_servers
    copied = round(full / plan.servers) if plan.server == "replicated" else 0
    server = (round(each * pull), round(each * push))
    return ServerTraffic((round(push), round(pull)), server, (ring, ring), (copied, copied))


def _push_bytes(plan: Plan) -> float:
    """Bytes per element of a push."""
    if share := top_share(plan.push_format):
        return share * (MASTER_BYTES[plan.dtype] + _NUMBER_BYTES)
    codes = BLOCK_BYTES.get(plan.push_format)
    return MASTER_BYTES[plan.dtype] if codes is None else codes / BLOCK


def server_memory(plan: Plan, numel: int, states_per_element: int) -> MemoryUse:
    """Bytes of a server, and what a colocated one adds to its worker: weights, sums of gradients, states.
    `states_per_element`: of the engine's optimizer."""
    if plan.local_steps:  # the servers' is the outer one
        states_per_element = int(plan.local.momentum > 0)
    held = -(-numel // plan.num_servers) * MASTER_BYTES[plan.dtype] * (1 + (plan.server == "replicated"))
    return MemoryUse(0, held, held, states_per_element * held, 0, 0)


def worker_memory(plan: Plan, use: MemoryUse, numel: int, states_per_element: int) -> MemoryUse:
    """Bytes of a worker of the plan. `use`: of a process that trains alone, by `Plan.of_worker`."""
    has_residuals = plan.push_format == "int8" or top_share(plan.push_format)  # what pushes have not sent
    residuals = numel * MASTER_BYTES[plan.dtype] if has_residuals else 0
    kept = use.optimizer + numel * MASTER_BYTES[plan.dtype] if plan.local_steps else 0  # global weights
    use = replace(use, optimizer=kept, gradients=use.gradients + residuals)
    if plan.server != "colocated":
        return use
    own = server_memory(plan, numel, states_per_element)
    return replace(
        use,
        optimizer=use.optimizer + own.optimizer,
        master=use.master + own.master,
        gradients=use.gradients + own.gradients,
    )
