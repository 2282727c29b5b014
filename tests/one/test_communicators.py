"""All ranks of a job create their NCCL communicators in one order, each a partition, and few of them."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _process_group_color

from plait.comm import Group, Mesh
from plait.parallel.pipeline.executor import Pipeline
from plait.parallel.pipeline.split_backward import BackwardSplitter
from plait.parallel.tensor.shards import TensorGroups
from plait.parallel.zero.rank_context import RankGroups
from plait.parallel.zero.sharded_model import TiedGradReduce
from plait.plan import Grid, Plan
from plait.plan.communicators import communicators, num_communicators, sender_classes
from plait.plan.schedule import Schedule, make_schedule

META = torch.device("meta")
PLANS = [
    "dp=16",
    "dp=8 zero=3 shard=2",
    "tp=2x4 dp=2 zero=2",
    "dp=4 shard=2 zero=1 reduce=powersgd",
    "dp=4 shard=2 zero=3 reduce=int8 sync_batchnorm=true",
    "pp=2 dp=2 zero=1 micro=4",
    "pp=3 micro=6",
    "pp=3 chunks=2 schedule=interleaved micro=6 dp=2",
    "pp=5 tp=2 micro=8 schedule=zb-h1",
    "pp=4 schedule=zbv micro=8 dp=2 zero=1 tp=2x2",
    "pp=8 tp=8 dp=16 zero=1 micro=8",
    "pp=8 tp=8 dp=16 zero=3 micro=8 schedule=interleaved chunks=2",
    "pp=16 tp=2x4 dp=8 zero=1 shard=4 micro=16",
]
MOST = {"pp=8 tp=8 dp=16 zero=1 micro=8": 6, "dp=16": 2, "pp=3 micro=6": 3}  # with that of all ranks


@dataclass
class Rank:
    """A world of one rank, whose groups do not connect."""

    rank: int
    size: int
    device: torch.device = META
    shares_communicators: bool = True
    splits: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    others: list[tuple[int, ...]] = field(default_factory=list)  # created by their members only

    @property
    def group(self) -> Group:
        return self._made(tuple(range(self.size)))

    def _made(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, ranks.index(self.rank), None)

    def split_group(self, ranks: tuple[int, ...], channel: str, *_: object) -> Group:
        assert not self.others, "the splits come first"
        self.splits.append((ranks, channel))
        return self._made(ranks)

    def new_group(self, ranks: tuple[int, ...], *_: object) -> Group:
        self.others.append(ranks)
        return self._made(ranks)

    def subgroup(self, ranks: tuple[int, ...], *_: object) -> Group:
        return self._made(ranks)  # through the communicator of all ranks


def build(plan: Plan, schedule: Schedule) -> list[Rank]:
    """All ranks, each after it has created the groups of an engine."""
    grid, ranks = Grid.from_plan(plan), []
    listed = communicators(plan, schedule.rank_of)
    for number in range(grid.num_ranks):
        world: Any = Rank(number, grid.num_ranks)
        mesh = Mesh(world, grid, listed)
        RankGroups.build(mesh, plan)
        TensorGroups(mesh.group("row"), mesh.group("col"))
        TiedGradReduce({"embedding": (0, schedule.num_stages - 1)}, schedule.rank_of, mesh)
        Pipeline(schedule.rank_of, mesh, BackwardSplitter())
        ranks.append(world)
    return ranks


def waits_in_a_circle(calls: list[list[Any]]) -> bool:
    """True if collective calls, by rank in order, block each other: the order of all ranks has a cycle."""
    after: dict[Any, set[Any]] = defaultdict(set)
    num_before: dict[Any, int] = {call: 0 for of_rank in calls for call in of_rank}
    for of_rank in calls:
        for call, following in itertools.pairwise(of_rank):
            if following not in after[call]:
                after[call].add(following)
                num_before[following] += 1
    free = [call for call, number in num_before.items() if not number]
    num_done = 0
    while free:
        num_done += 1
        for following in after[free.pop()]:
            num_before[following] -= 1
            if not num_before[following]:
                free.append(following)
    return num_done < len(num_before)


@pytest.mark.parametrize("text", PLANS)
def test_the_nth_split_of_all_ranks_is_one_partition_of_them(text: str) -> None:
    plan = Plan.parse(text)
    ranks = build(plan, make_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks))
    everyone = list(range(len(ranks)))
    assert len({len(rank.splits) for rank in ranks}) == 1, "as many splits on all ranks"
    for number in range(len(ranks[0].splits)):
        called = {rank.splits[number] for rank in ranks}
        assert len({channel for _, channel in called}) == 1
        assert sorted(member for members, _ in called for member in members) == everyone
        assert all(rank.rank in rank.splits[number][0] for rank in ranks)
        colors = {_process_group_color(list(members)) for members, _ in called}
        assert len(colors) == len(called), "two groups would become one communicator"
    assert not any(rank.others for rank in ranks), "no group is left to its members"
    # Also if torch does not split, but each group's members wait for one another.
    assert not waits_in_a_circle([rank.splits for rank in ranks])
    number = num_communicators(plan, make_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks).rank_of)
    assert 1 + len(ranks[0].splits) == number <= MOST.get(text, 9)


@pytest.mark.parametrize("text", [*PLANS, "dp=4 shard=2 zero=1 local_steps=8", "dp=4 reduce=int8"])
def test_gathers_and_reductions_of_units_have_communicators_of_their_own(text: str) -> None:
    plan = Plan.parse(text)
    schedule = make_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks)
    grid = Grid.from_plan(plan)
    world: Any = Rank(grid.num_ranks - 1, grid.num_ranks)
    groups = RankGroups.build(Mesh(world, grid, communicators(plan, schedule.rank_of)), plan)
    units = groups.dense
    used = {"gathers": [units.all_gather], "reductions": [units.first_reduction]}
    if units.first_reduction is units.reduce_scatter:  # otherwise nothing is left over replicas
        used["reductions"] += [units.replicate, groups.islands]
    for channel, over in used.items():
        for group in (group for group in over if group.size > 1):
            assert (group.ranks, channel) in world.splits


def test_members_wait_in_a_circle_where_the_order_differs() -> None:
    """The check above finds what it looks for."""
    assert waits_in_a_circle([[(0, 1), (1, 2), (0, 2)][i:] + [(0, 1), (1, 2), (0, 2)][:i] for i in range(3)])
    assert not waits_in_a_circle([[(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 2), (1, 2)]])


@pytest.mark.parametrize("name", ["interleaved", "zbv", "1f1b"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_a_pipeline_rank_either_sends_or_receives_on_a_communicator(name: str, num_ranks: int) -> None:
    chunks = 2 if name == "interleaved" else 0
    rank_of = make_schedule(name, num_ranks, 2 * num_ranks, chunks).rank_of
    classes = sender_classes(rank_of)
    for stage in range(len(rank_of) - 1):
        one, other = rank_of[stage], rank_of[stage + 1]
        assert one == other or classes[one] != classes[other], f"stages {stage} and {stage + 1}"
    is_odd_ring = name == "interleaved" and num_ranks % 2 and num_ranks > 1
    assert len(set(classes.values())) == (3 if is_odd_ring else min(2, num_ranks))
