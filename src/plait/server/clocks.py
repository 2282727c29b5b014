"""The clocks of the workers, and which pushes make up a step. PURE: no torch, no threads, no messages.

[Note: clocks and steps]
A worker's clock is the number of steps that it has finished. At clock c it pushes its gradient and *commits*
it; a `Decision` says whose pushes are applied together. Under `all` and `backup` there is one decision per
clock, so that clocks and steps agree; under `async` and `stale` each commit is a decision by itself. When the
update has been applied on every server, the worker *advances* to clock c + 1, and may read again when the
policy admits it: under `stale:S` no worker reads at a clock more than S ahead of the slowest one (stale
synchronous parallel; Ho et al. 2013). A read at clock c then has every update up to clock c - S - 1.

[Note: workers that leave and join]
A worker that has left is no longer waited for. What it had committed is applied if it had been decided on
before, otherwise not at all. A worker that joins starts at the clock of the next decision, or of the
slowest worker, and never at a clock for which its push was decided on. If it has been here before, it
joins when what was decided on its last push has been applied everywhere (`is_settled`): servers read that
push until then, and take it from the process that joined last.

[Note: updates whose worker died]
Under `async` and `stale` only the worker itself applies its update, on one server after the other. The first
server records what it is about to do (`begin`); if the worker dies in between, the next worker that commits
is asked to finish it (`unfinished`). Servers apply an update once, so it does not matter how far it came.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.plan.servers import SyncPolicy

STALENESS_BINS = 64  # of the histogram; the last one also counts what is staler


@dataclass(frozen=True)
class Decision:
    """Workers whose pushes of a clock are applied together, in the order of their ranks.

    totals      sums over these workers of what they have committed
    staleness   decisions between a worker's last read and this one, the largest of these workers
    """

    clock: int
    workers: tuple[int, ...]
    totals: tuple[float, ...]
    staleness: int = 0


@dataclass
class _Worker:
    clock: int
    version: int  # decisions before its last read
    commit: tuple[float, ...] | None = None  # of its present clock
    decided: Decision | None = None  # on that commit


@dataclass
class EventCounts:
    """Numbers of events so far."""

    decided: int = 0
    taken: int = 0  # pushes that are part of a decision
    dropped: int = 0  # pushes that came too late for their step
    left: int = 0
    joined: int = 0
    max_staleness: int = 0
    staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BINS)  # decisions by staleness
    max_spread: int = 0  # how many clocks a worker that read was ahead of the slowest


class ClockTable:
    """Clocks, commits and decisions of one job. Every method returns at once: None means to ask again after
    the next event."""

    def __init__(self, policy: SyncPolicy, num_workers: int, clock: int = 0) -> None:
        """`num_workers`: of the plan. No step is decided before so many have joined, or `begin` is called."""
        self.policy = policy
        self.counts = EventCounts()
        self.workers: dict[int, _Worker] = {}
        self._num_workers = num_workers
        self._started = False
        self._finished = clock - 1  # the last one after which a worker has advanced
        self._next = clock  # of the next decision, under policies that sum
        self._last_decided: dict[int, int] = {}  # clocks by worker, also of those that left
        self._decisions: dict[int, Decision] = {}  # by clock, under policies that sum
        self._unfinished: dict[tuple[int, int], str] = {}  # by worker and clock: what it began to apply
        self.is_held = False  # no decision is made meanwhile: see `is_quiet`

    @property
    def version(self) -> int:
        """Number of decisions."""
        return self.counts.decided

    @property
    def present_clock(self) -> int:
        """The clock at which a worker joins."""
        if self.policy.sums or not self.workers:
            return self._next
        return min(worker.clock for worker in self.workers.values())

    def add(self, worker: int) -> int:
        """Add a worker; return its clock."""
        assert worker not in self.workers, f"worker {worker} joined twice"
        clock = max(self.present_clock, self._last_decided.get(worker, -1) + 1)
        self.workers[worker] = _Worker(clock, self.version)
        self.counts.joined += 1
        self._started |= len(self.workers) >= self._num_workers
        self._decide()
        return clock

    def is_settled(self, worker: int) -> bool:
        """Return whether a worker has left, and nothing of it is to be applied but what is `unfinished`."""
        if worker in self.workers:
            return False
        return not self.policy.sums or self._last_decided.get(worker, -1) <= self._finished

    def remove(self, worker: int) -> None:
        """Remove a worker that ended or died."""
        state = self.workers.pop(worker, None)
        if state is None:
            return
        self.counts.left += 1
        if not self.workers:
            self._next = max(self._next, state.clock)
        self._decide()

    def commit(self, worker: int, clock: int, totals: Sequence[float]) -> None:
        """Record that a worker has pushed everything of a clock. A repeated commit changes nothing."""
        state = self.workers[worker]
        if clock < state.clock or (clock == state.clock and state.commit is not None):
            return
        assert clock == state.clock, f"worker {worker} commits clock {clock} at clock {state.clock}"
        state.commit = tuple(totals)
        if self.policy.sums and clock < self._next:
            self.counts.dropped += 1
        self._decide()

    def decision(self, worker: int, clock: int) -> Decision | None:
        """The decision on a commit; None while there is none. One without the worker has dropped its push."""
        if self.policy.sums:
            return self._decisions.get(clock)
        state = self.workers[worker]
        return state.decided if state.clock == clock else None

    def is_finished(self, clock: int) -> bool:
        """Return whether a clock's update has been applied on every server, under policies that sum."""
        return clock <= self._finished

    def begin(self, worker: int, clock: int, update: str) -> None:
        """Record that a worker begins to apply its own update. See [Note: updates whose worker died]."""
        if not self.policy.sums and self._last_decided.get(worker, -1) == clock:
            self._unfinished.setdefault((worker, clock), update)

    def finish(self, worker: int, clock: int) -> None:
        """Record that an update has been applied on every server."""
        self._unfinished.pop((worker, clock), None)

    def unfinished(self) -> Mapping[tuple[int, int], str]:
        """Updates that workers began to apply before they died, by worker and clock."""
        return {
            key: update
            for key, update in self._unfinished.items()
            if key[0] not in self.workers or self.workers[key[0]].clock != key[1]
        }

    def advance(self, worker: int, clock: int) -> int:
        """Record that a worker's step `clock` is finished; return its next clock: the present one if it was
        late."""
        self.finish(worker, clock)
        self._finished = max(self._finished, clock)
        state = self.workers[worker]
        if state.clock == clock:
            state.clock = max(clock + 1, self._next) if self.policy.sums else clock + 1
            state.commit, state.decided = None, None
            self._forget()
            self._decide()
        return state.clock

    def may_read(self, worker: int) -> bool:
        """Return whether a worker may pull at its present clock, and record the read if so."""
        state = self.workers[worker]
        if not self._started:
            return False
        ahead = state.clock - min(each.clock for each in self.workers.values())
        if self.policy.kind == "stale" and ahead > self.policy.number:
            return False
        self.counts.max_spread = max(self.counts.max_spread, ahead)
        state.version = self.version
        return True

    @property
    def is_quiet(self) -> bool:
        """True if every decision has been applied everywhere, so that what the servers hold is one state."""
        if self.unfinished():
            return False
        return all(worker.decided is None for worker in self.workers.values())

    def hold(self, is_held: bool) -> None:
        """Make no decision until `hold(False)`."""
        self.is_held = is_held
        self._decide()

    def restart(self, clock: int) -> None:
        """Begin another training, or go on with one that was saved, at this clock for all workers."""
        self._next, self._finished = clock, clock - 1
        self._last_decided.clear()
        self._decisions.clear()
        self._unfinished.clear()
        for state in self.workers.values():
            state.clock, state.version, state.commit, state.decided = clock, self.version, None, None

    # --- decisions

    def _decide(self) -> None:
        if self.is_held or not self._started:
            return
        if self.policy.sums:
            while self._decide_clock():
                pass
            return
        for worker, state in sorted(self.workers.items()):
            if state.commit is not None and state.decided is None:
                state.decided = self._decision(state.clock, [worker])

    def _decide_clock(self) -> bool:
        """Decide on the next clock if enough workers have committed it."""
        others = [state.clock for state in self.workers.values() if state.clock < self._next]
        if self._finished < self._next - 1 and others:  # they apply the last decision
            return False
        ready = [
            worker
            for worker, state in sorted(self.workers.items())
            if state.commit is not None and state.clock == self._next
        ]
        needed = len(self.workers)
        if self.policy.kind == "backup":
            needed = min(needed, self._num_workers - self.policy.number)
        if not ready or len(ready) < needed:
            return False
        decision = self._decision(self._next, ready)
        self._decisions[self._next] = decision
        for worker in ready:
            self.workers[worker].decided = decision
        self._next += 1
        return True

    def _decision(self, clock: int, workers: list[int]) -> Decision:
        states = [self.workers[worker] for worker in workers]
        totals = tuple(sum(column) for column in zip(*(s.commit for s in states if s.commit), strict=True))
        staleness = max(self.version - state.version for state in states)
        self._last_decided |= dict.fromkeys(workers, clock)
        self.counts.decided += 1
        self.counts.taken += len(workers)
        self.counts.staleness[min(staleness, STALENESS_BINS - 1)] += 1
        self.counts.max_staleness = max(self.counts.max_staleness, staleness)
        return Decision(clock, tuple(workers), totals, staleness)

    def _forget(self) -> None:
        """Drop decisions that no worker can ask for any more."""
        oldest = min(state.clock for state in self.workers.values())
        for clock in [clock for clock in self._decisions if clock < oldest]:
            del self._decisions[clock]


@dataclass
class AppliedOnce:
    """The last clock of each worker whose update a server has applied."""

    clocks: dict[int, int] = field(default_factory=dict)

    def has(self, clock: int, workers: tuple[int, ...]) -> bool:
        """Return whether the update of these workers' clock has been applied."""
        seen = [self.clocks.get(worker, -1) >= clock for worker in workers]
        assert all(seen) or not any(seen), f"some of {workers} were applied at clock {clock}"
        return all(seen)

    def record(self, clock: int, workers: tuple[int, ...]) -> None:
        self.clocks |= dict.fromkeys(workers, clock)
