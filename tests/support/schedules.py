"""Random valid schedules, and a naive executor for schedules."""

import random
from collections import deque

from plait.plan.schedule import Action, B, F, Kind, Schedule, W


def random_schedule(
    rng: random.Random, ranks: int, micros: int, chunks: int = 1, splits: float = 0.5
) -> Schedule:
    """Build a random valid schedule with `chunks` randomly assigned stages on each rank.

    splits    probability that a backward is split in two; 0 for none, 1 for all
    """
    stages = list(range(ranks * chunks))
    rng.shuffle(stages)
    rank_of = {stage: place % ranks for place, stage in enumerate(stages)}
    after = {}  # actions that become possible after an action
    for stage in stages:
        for micro in range(micros):
            forward, backward = F(stage, micro), B(stage, micro)
            after[forward] = [F(stage + 1, micro)] if stage + 1 < len(stages) else [backward]
            after[backward] = [B(stage - 1, micro)] if stage else []
            if rng.random() < splits:
                after[backward].append(W(stage, micro))
    ready = [F(0, micro) for micro in range(micros)]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        lists[rank_of[action.stage]].append(action)
        ready += after.get(action, ())
    return Schedule.from_actions("random", lists)


class Executor:
    """Executes a schedule with real channels, as simply as possible.

    A rank posts a receive when its next action needs it, after those of all earlier messages of the channel;
    a message is delivered when its receive is posted; sends wait in their channel and never block. The
    counters are those of `Checked`.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [0] * schedule.num_ranks
        self.in_flight = [0] * schedule.num_ranks
        self.buffers = [0] * schedule.num_ranks
        self._done: set[Action] = set()
        self._sent: dict[tuple[int, int, Kind], deque[Action]] = {}  # not delivered yet, by receiver
        self._received: list[list[Action]] = [[] for _ in schedule.ranks]  # not used yet
        self._held: list[set[tuple[int, int]]] = [set() for _ in schedule.ranks]

    def run(self) -> "Executor":
        """Run until no rank can continue."""
        while any(self._step(rank) for rank in range(self.schedule.num_ranks)):
            pass
        return self

    @property
    def stuck(self) -> dict[int, int]:
        """Position of each stuck rank."""
        lengths = map(len, self.schedule.ranks)
        return {rank: self.at[rank] for rank, length in enumerate(lengths) if self.at[rank] < length}

    def _step(self, rank: int) -> bool:
        if self.at[rank] == len(self.schedule.ranks[rank]):
            return False
        action = self.schedule.ranks[rank][self.at[rank]]
        kind, stage, micro = action
        before = {Kind.F: None, Kind.B: F(stage, micro), Kind.W: B(stage, micro)}[kind]
        if before is not None and before not in self._done:
            return False
        if not self._has_input(rank, action):
            return False
        self._count(rank, action)
        self._done.add(action)
        self._send(rank, action)
        self.at[rank] += 1
        return True

    def _has_input(self, rank: int, action: Action) -> bool:
        other = {Kind.F: action.stage - 1, Kind.B: action.stage + 1, Kind.W: -1}[action.kind]
        source = self.schedule.rank_of.get(other)
        if source is None:
            return True
        if source == rank:
            return Action(action.kind, other, action.micro) in self._done
        channel = self._sent.setdefault((source, rank, action.kind), deque())
        received = self._received[rank]
        while action not in received and channel:
            received.append(channel.popleft())
            self.buffers[rank] = max(self.buffers[rank], len(received))
        if action not in received:
            return False
        received.remove(action)
        return True

    def _send(self, rank: int, action: Action) -> None:
        to = {Kind.F: action.stage + 1, Kind.B: action.stage - 1, Kind.W: -1}[action.kind]
        target = self.schedule.rank_of.get(to, rank)
        if target != rank:
            channel = self._sent.setdefault((rank, target, action.kind), deque())
            channel.append(Action(action.kind, to, action.micro))

    def _count(self, rank: int, action: Action) -> None:
        kind, stage, micro = action
        held = self._held[rank]
        if kind is Kind.F:
            held.add((stage, micro))
        self.in_flight[rank] = max(self.in_flight[rank], len(held))
        splits = W(stage, micro) in self.schedule.ranks[rank]
        if kind is Kind.W or (kind is Kind.B and not splits) or not self.schedule.trains:
            held.discard((stage, micro))
