"""The clocks of parameter servers: properties under random events."""

import random

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.servers import SyncPolicy
from plait.server.clocks import AppliedOnce, ClockTable

EVENTS = 10_000


class Job:
    """Workers that do, in any order, what real ones do; and what each update was applied to."""

    def __init__(self, sync: str, workers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = SyncPolicy.parse(sync)
        self.table = ClockTable(self.policy, workers)
        self.applied, self.updates = AppliedOnce(), []  # (clock, workers), in order
        self.doing: dict[int, str] = {}
        self.clock: dict[int, int] = {}
        for worker in range(workers):
            self.join(worker)

    def join(self, worker: int) -> None:
        self.clock[worker], self.doing[worker] = self.table.add(worker), "read"

    def apply(self, clock: int, workers: tuple[int, ...]) -> None:
        if not self.applied.has(clock, workers):
            self.applied.record(clock, workers)
            self.updates.append((clock, workers))

    def event(self) -> None:
        if self.doing and self.random.random() < 0.01:
            worker = self.random.choice(sorted(self.doing))
            del self.doing[worker]
            self.table.remove(worker)
        if len(self.doing) < len(self.clock) and self.random.random() < 0.02:
            self.join(self.random.choice(sorted(self.clock.keys() - self.doing.keys())))
        if self.doing:
            self.progress(self.random.choice(sorted(self.doing)))

    def progress(self, worker: int) -> None:
        clock, table = self.clock[worker], self.table
        match self.doing[worker]:
            case "read":
                if table.may_read(worker):
                    self.check_read(worker)
                    self.doing[worker] = "push"
            case "push":
                table.commit(worker, clock, (1.0, float(worker)))
                table.commit(worker, clock, (9.0, 9.0))  # a repeated message
                self.doing[worker] = "wait"
            case "wait":
                for (other, at), update in list(table.unfinished().items()):
                    assert update == "factor"
                    self.apply(at, (other,))
                    table.finish(other, at)
                decision = table.decision(worker, clock)
                if decision is not None:
                    assert decision.totals == (len(decision.workers), sum(decision.workers))
                    table.begin(worker, clock, "factor")
                    self.doing[worker] = "apply"
            case "apply":
                decision = table.decision(worker, clock)
                if self.policy.sums or self.random.random() < 0.9:
                    self.apply(decision.clock, decision.workers)
                    self.apply(decision.clock, decision.workers)
                    self.clock[worker] = table.advance(worker, clock)
                    assert self.clock[worker] > clock
                    self.doing[worker] = "read"

    def check_read(self, worker: int) -> None:
        if self.policy.kind == "stale":
            slowest = min(self.table.workers[other].clock for other in self.doing)
            assert self.clock[worker] - slowest <= self.policy.number
            # Every update up to c - S - 1 of the workers that are present has been applied.
            for other in self.doing:
                done = self.applied.clocks.get(other, -1)
                assert done >= min(self.clock[worker] - self.policy.number, self.clock[other]) - 1 or (
                    done == -1 or self.table.workers[other].clock > done
                )


@pytest.mark.parametrize("sync", ["all", "backup:1", "backup:3", "stale:0", "stale:3", "async"])
def test_updates_are_applied_once_and_no_worker_waits_for_ever(sync: str) -> None:
    for seed in range(4):
        job = Job(sync, workers=5, seed=seed)
        for _ in range(EVENTS // 4):
            job.event()
        assert len(job.updates) > EVENTS // 200
        pushes = [(clock, worker) for clock, workers in job.updates for worker in workers]
        assert len(pushes) == len(set(pushes))
        if job.policy.sums:
            clocks = [clock for clock, _ in job.updates]
            assert clocks == sorted(set(clocks))
        if job.policy.kind == "stale":
            assert job.table.counts.max_spread == job.policy.number  # and not less: the bound is reached


def test_backup_takes_the_first_pushes_and_moves_late_workers_to_the_present_clock() -> None:
    table = ClockTable(SyncPolicy.parse("backup:1"), 3)
    for worker in range(3):
        table.add(worker)
    table.commit(2, 0, (1.0,))
    assert table.decision(2, 0) is None
    table.commit(0, 0, (1.0,))
    assert table.decision(1, 0).workers == (0, 2)
    table.commit(1, 0, (1.0,))
    assert table.counts.dropped == 1
    assert table.advance(1, 0) == 1


def test_a_step_of_all_workers_goes_on_without_one_that_died() -> None:
    table = ClockTable(SyncPolicy.parse("all"), 2)
    for worker in range(2):
        table.add(worker)
    table.commit(0, 0, (3.0,))
    assert table.decision(0, 0) is None
    table.remove(1)
    assert table.decision(0, 0).workers == (0,)
    assert table.advance(0, 0) == 1
    assert table.add(1) == 1


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("dp=2 sync=async", "only with parameter servers"),
        ("dp=2 servers=1 sync=slow", "unknown value for sync"),
        ("dp=2 servers=1 sync=backup:2", "drops the pushes of all"),
        ("dp=2 servers=1 server=colocated", "as many as the workers"),
        ("dp=2 tp=2 servers=1", "cannot be combined with these keys"),
        ("dp=2 zero=1 servers=1", "cannot be combined with these keys"),
        ("servers=1 dp=auto", "a number of workers"),
    ],
)
def test_a_plan_with_servers_refuses_what_they_do_not_do(plan: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Plan.parse(plan)


def test_a_plan_counts_servers_as_ranks() -> None:
    assert Plan.parse("dp=6 servers=2 sync=stale:3").num_ranks == 8
    assert Plan.parse("dp=4 server=colocated").num_ranks == 4
    assert str(Plan.parse("dp=4 server=colocated sync=async")) == "dp=4 sync=async server=colocated"


def test_a_worker_joins_again_when_the_decision_on_its_last_push_has_been_applied() -> None:
    table = ClockTable(SyncPolicy("all"), 2)
    for worker in range(2):
        table.add(worker)
        table.commit(worker, 0, (1.0,))
    assert not table.is_settled(1), "it has not left"
    table.remove(1)
    assert not table.is_settled(1), "servers may still read its push"
    table.advance(0, 0)
    assert table.is_settled(1)
    assert table.add(1) == 1
