"""A rank of a large grid makes its own groups and no other, when it needs them, in no time."""

import time
from typing import Any

from plait.comm import Group, Mesh
from plait.models import blocks_of, unit_facts
from plait.models.sharding.plan import build_tp_plan
from plait.parallel.zero.rank_context import RankGroups
from plait.parallel.zero.shard_map import ShardMap
from plait.plan import Grid, Plan, StageAssignment, TPCoord
from support import pipeline_models

PLAN = Plan.parse("pp=16 dp=128 zero=3 shard=16 tp=2x4")
RANK = 9_999
ENOUGH_S = 0.1  # of a core: milliseconds, on a machine that may be slow


class Remembers:
    """A world of as many ranks as the plan has, whose groups do not connect."""

    shares_communicators = False

    def __init__(self) -> None:
        self.rank, self.size = RANK, PLAN.num_ranks
        self.group = Group((RANK,), 0, None)
        self.made: list[tuple[int, ...]] = []

    def subgroup(self, ranks: tuple[int, ...], *_: object) -> Group:
        self.made.append(ranks)
        return Group(ranks, ranks.index(self.rank), None)


def quickest(run: Any) -> float:
    times = []
    for _ in range(5):
        began_s = time.process_time()
        run()
        times.append(time.process_time() - began_s)
    return min(times)


def test_the_coordinates_of_16384_ranks_are_computed_in_milliseconds() -> None:
    def all_coords() -> None:
        grid = Grid.from_plan(PLAN)
        coords = [grid.coord(rank) for rank in range(grid.num_ranks)]
        assert len(coords) == 16_384

    assert quickest(all_coords) < ENOUGH_S


def test_a_mesh_makes_a_group_when_it_is_asked_for_and_once() -> None:
    world: Any = Remembers()
    mesh = Mesh(world, Grid.from_plan(PLAN))
    assert not world.made
    mesh.group("row", "col")
    mesh.group("row", "col")
    assert world.made == [tuple(range(RANK // 8 * 8, RANK // 8 * 8 + 8))], "neighbours, and no other group"


def test_one_rank_of_16384_makes_its_own_groups_alone_in_milliseconds() -> None:
    worlds: list[Any] = []

    def groups() -> None:
        worlds.append(Remembers())
        RankGroups.build(Mesh(worlds[-1], Grid.from_plan(PLAN)), PLAN)

    assert quickest(groups) < ENOUGH_S
    made = worlds[0].made
    assert all(RANK in ranks for ranks in made)
    assert len(made) <= 12
    assert max(map(len, made)) == 16 * 16 * 8, "of one copy of the gradient, over pp x shard x row x col"


def test_groups_held_by_a_models_ranks_do_not_grow_with_the_data_ranks() -> None:
    model = pipeline_models.llama(layers=16)
    blocks = blocks_of(model)
    facts = unit_facts(model, blocks, None)
    names = dict(model.named_parameters())
    homes = {name: _stage_of(name) for name in names}
    cut = StageAssignment(tuple((stage, stage + 1) for stage in range(16)), homes, {})
    places = TPCoord.all_coords(build_tp_plan(model, 2, 4, sequence=False, blocks=blocks))
    rank_of = {stage: stage for stage in range(16)}
    held = ShardMap.from_plan(model, facts, cut, rank_of, Grid.from_plan(PLAN), places, PLAN)
    assert len(held.layouts) == 16 * 8, "one copy's, not 128 of them"
    assert held.num_parameters == sum(parameter.numel() for parameter in names.values())


def _stage_of(name: str) -> int:
    words = name.split(".")
    return int(words[2]) if "layers" in words else 0 if "embed_tokens" in name else 15
