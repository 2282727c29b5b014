"""The NCCL communicators of a plan: which there are, and the order in which all ranks create them.

[Note: few communicators]
A communicator has its own buffers and, in torch, its own stream: what is started on one does not queue after
another's work. It also costs 100 to 400 MB of device memory, and a creation that all its ranks take part in.
So only traffic that overlaps with computation, or that computation waits for, has one of its own:

  all ranks              small messages: losses, norms, votes, texts, checkpoints
  shard, "gathers"       all-gathers of parameters
  shard, "reductions"    reduce-scatters of gradients; replicate likewise for replicas
  cp                     keys, values or heads, inside attention
  ep, ep and col         tokens of mixtures, to their experts and back
  row, col               the collectives inside tensor-parallel layers
  pp, "sends of class i" messages between stages

All other groups communicate by sends and receives through the communicator of all ranks, see
`comm/subgroup_transport.py`. With pp=8 tp=8 dp=16 a rank has six. CPU ranks share memory or have sockets:
there every group has its own connections, which cost little.

[Note: creation order of communicators]
torch creates a communicator of a bound default group by `ncclCommSplit`, a collective of all ranks of the
job: the n-th split of one rank is matched with the n-th of every other, and the colors of one split have to
partition the ranks. Groups that only some ranks create (the channels between two stages, the stages that
share a parameter) would be matched with other groups, or wait forever. Therefore:

  1. The list is a function of the plan alone, so it is equal on all ranks.
  2. Every entry is named by axes. "Equal coordinates on all other axes" is an equivalence relation, so the
     groups of one entry partition the ranks, and every rank is in exactly one.
  3. A mesh creates the entire list at once, before any other group.

By 1 and 3, the n-th split of all ranks is the same entry; by 2, it is valid. No rank waits for one that is
not about to make the same call, so ranks cannot wait in a circle. Communicators of arbitrary ranks
(`World.new_group`) are created by their members only, without a split.

[Note: classes of senders]
Messages that are started on a communicator run in order, on one stream: a send after a receive would wait
for the receive's sender, which may wait for this send. So on each communicator a rank either only sends or
only receives. Pipeline ranks are divided into classes such that ranks with adjacent stages are in different
classes, and the messages of each class have a communicator. Even and odd ranks are two classes; only
interleaved stages on an odd number of ranks need a third. Sends and receives of one communicator are started
in one order, see [Note: global message order] in `parallel/pipeline/executor.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from plait.plan.axes import EXPERTS, FEATURES, HIDDEN, REPLICAS, SEQUENCE, STAGES, Axes, Roles, UnitKind
from plait.plan.compression import compresses, reduces_over_all
from plait.plan.grid import Grid
from plait.plan.plan import Plan

# Thread blocks of a send or a receive, which occupy multiprocessors for as long as they wait.
_MESSAGE_CTAS = 4


@dataclass(frozen=True)
class Communicator:
    """A communicator for each set of ranks that differ along `axes` only.

    axes      axes of degree above 1, outermost first
    channel   see `Mesh.group`
    max_ctas  limit of the thread blocks of its kernels; None: NCCL's choice
    """

    axes: tuple[str, ...]
    channel: str
    max_ctas: int | None = None


def communicators(plan: Plan, rank_of: Mapping[int, int]) -> tuple[Communicator, ...]:
    """Return the communicators of a job, apart from that of all ranks, in the order of their creation.

    `rank_of`: the `pp` coordinate of every stage. See the notes at the top.
    """
    roles, grid = Roles.from_plan(plan), Grid.from_plan(plan)
    wanted: list[tuple[Axes, str, int | None]] = [(roles.states(kind), "gathers", None) for kind in UnitKind]
    if compresses(plan) and reduces_over_all(plan):
        wanted.append((roles.gradient_sum(), "reductions", None))
    else:
        of_kinds = [axes for kind in UnitKind for axes in (roles.states(kind), roles.replicas(kind))]
        wanted += [(axes, "reductions", None) for axes in (*of_kinds, REPLICAS)]
    if plan.sync_batchnorm:
        wanted.append((roles.gradient_sum(), "statistics", None))
    wanted += [(SEQUENCE, "", None), (EXPERTS, "", None), ((*EXPERTS, FEATURES), "", None)]
    wanted += [((HIDDEN,), "", None), ((FEATURES,), "", None)]
    classes = sorted(set(sender_classes(rank_of).values()))
    wanted += [((STAGES,), sends_channel(number), _MESSAGE_CTAS) for number in classes]
    used = [(grid.used(*axes), channel, max_ctas) for axes, channel, max_ctas in wanted]
    return tuple(Communicator(*each) for each in dict.fromkeys(used) if each[0])


def num_communicators(plan: Plan, rank_of: Mapping[int, int]) -> int:
    """Return the number of a rank's communicators, with that of all ranks: the same on every rank."""
    return 0 if plan.num_ranks == 1 else 1 + len(communicators(plan, rank_of))


def sender_classes(rank_of: Mapping[int, int]) -> dict[int, int]:
    """Return the class of every pipeline rank. See [Note: classes of senders]."""
    return _sender_classes(tuple(rank_of[stage] for stage in range(len(rank_of))))


@cache
def _sender_classes(rank_of: tuple[int, ...]) -> dict[int, int]:
    neighbors: dict[int, set[int]] = {rank: set() for rank in sorted(set(rank_of))}
    for stage in range(len(rank_of) - 1):
        rank, next_rank = rank_of[stage], rank_of[stage + 1]
        if rank != next_rank:
            neighbors[rank].add(next_rank)
            neighbors[next_rank].add(rank)
    classes: dict[int, int] = {}
    for rank, adjacent in neighbors.items():
        taken = {classes[other] for other in adjacent if other in classes}
        classes[rank] = next(number for number in range(len(taken) + 1) if number not in taken)
    return classes


def sends_channel(sender_class: int) -> str:
    """Return the channel of the messages that ranks of a class send."""
    return f"sends of class {sender_class}"
