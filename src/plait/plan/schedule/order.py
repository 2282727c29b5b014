"""Which action waits for which, and an order in which they can all run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from plait.plan.schedule.action import Action, B, F, Kind, Schedule


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What must have ended before an action begins, beside its rank's earlier ones. Its own stage's first."""
    kind, stage, micro = action
    if kind is Kind.F:
        return (F(stage - 1, micro),) if stage else ()
    if kind is Kind.W:
        return (B(stage, micro),)
    own = F(stage, micro)
    return (own, B(stage + 1, micro)) if stage < num_stages - 1 else (own,)


@dataclass(frozen=True)
class Walk:
    """A run of a schedule without time.

    order   (rank, action) of all that can run, each after what it needs
    stuck   where that is not all: a rank's position in its list, and what the action there waits for in vain
    """

    order: tuple[tuple[int, Action], ...]
    stuck: dict[int, tuple[int, Action]]


def walk(schedule: Schedule) -> Walk:
    """Every rank computes in its list's order, and waits where it has to: in time linear in the actions."""
    num_stages = schedule.num_stages
    position = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    awake = list(reversed(range(schedule.num_ranks)))
    while awake:
        rank = awake.pop()
        actions = schedule.ranks[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((need for need in needs(action, num_stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            order.append((rank, action))
            position[rank] += 1
            awake += waiting.pop(action, ())
    stuck = {rank: (position[rank], need) for need, ranks in waiting.items() for rank in ranks}
    return Walk(tuple(order), stuck)


def held(schedule: Schedule, actions: Iterable[Action], sizes: Sequence[float]) -> Iterator[float]:
    """What the saved activations of some actions, in their order, amount to during each of them.

    sizes    of one micro-batch's activations, by stage

    They are there from a forward's start until what uses them last has ended: the backward, or its weights'
    half. Forwards that no backward follows keep nothing after themselves.
    """
    now, last = 0.0, Kind.B if schedule.trains else Kind.F
    for kind, stage, micro in actions:
        if kind is Kind.F:
            now += sizes[stage]
        yield now
        if kind is Kind.W or (kind is last and (stage, micro) not in schedule.split):
            now -= sizes[stage]
