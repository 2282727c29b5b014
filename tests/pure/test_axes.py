"""The roles of the axes follow from what each divides; tables with other axes give other roles."""

import pytest

from plait.plan import Grid, Layout, ParamInfo, Plan, TPCoord, UnitInfo, single_stage
from plait.plan.axes import (
    AXES,
    BATCH,
    EXPERTS,
    MODEL,
    REPLICAS,
    TENSOR,
    TOKENS,
    Axes,
    Roles,
    UnitKind,
)

DENSE, EXPERT = UnitKind.DENSE, UnitKind.EXPERT


def test_ranks_with_other_samples_sum_a_gradient_and_shard_its_states() -> None:
    roles = Roles.from_plan(Plan(dp=4, zero=1))
    shards = ("shard", "ep_shard", "cp", "ep_cp")
    assert TOKENS[:4] == BATCH
    assert (TENSOR, MODEL) == (("row", "col"), ("pp", "row", "col"))
    assert roles.gradient_sum() == TOKENS == ("replicate", "ep_replicate", *shards)
    assert roles.states() == shards
    assert roles.replicas() == ("replicate", "ep_replicate")
    assert REPLICAS == ("replicate",)
    assert {*roles.one_copy} == {"pp", "ep_replicate", *shards, "row", "col"}
    assert {*roles.stage_copy} == {"ep_replicate", *shards, "row", "col"}
    assert roles.same_stage == (*TOKENS, "row", "col")
    assert roles.step == AXES


def test_islands_leave_replicas_out_of_a_step() -> None:
    roles = Roles.from_plan(Plan(dp=4, zero=1, shard=2, local_steps=8))
    assert roles.gradient_sum() == ("ep_replicate", "shard", "ep_shard", "cp", "ep_cp")
    assert roles.replicas() == ("ep_replicate",)  # inside an island
    assert roles.step == ("pp", *roles.gradient_sum(), "row", "col")


@pytest.mark.parametrize(
    "text",
    [
        "dp=4 zero=1 shard=2",
        "dp=4 ep=2",
        "dp=4 cp=2 ep=2",
        "dp=4 cp=2 ep=4 zero=1 shard=2",
        "dp=24 ep=6 zero=3 shard=4",
    ],
)
def test_islands_are_the_ranks_along_replicas(text: str) -> None:
    plan = Plan.parse(f"{text} local_steps=8")
    grid = Grid.from_plan(plan)
    assert plan.num_islands == grid.degree(*REPLICAS) > 1
    assert plan.reduced_ranks == grid.degree(*Roles.from_plan(plan).gradient_sum())


@pytest.mark.parametrize(
    "text", ["dp=8 tp=2x4 pp=3 zero=3 shard=4", "dp=6", "dp=8 zero=1 shard=2 local_steps=8"]
)
def test_ranks_along_states_and_replicas_sum_a_gradient_together(text: str) -> None:
    plan = Plan.parse(text)
    roles, grid = Roles.from_plan(plan), Grid.from_plan(plan)
    rank = grid.num_ranks // 2
    summed = set(grid.group(rank, *roles.gradient_sum()))
    owners = grid.group(rank, *roles.states())
    assert summed == {other for owner in owners for other in grid.group(owner, *roles.replicas())}
    assert len(summed) == plan.reduced_ranks
    assert len(owners) == plan.shard_degree
    assert grid.degree(*roles.one_copy) * grid.degree(*REPLICAS) == grid.num_ranks


def test_tokens_and_model_divide_the_axes() -> None:
    assert sorted((*TOKENS, *MODEL)) == sorted(AXES)
    assert {*BATCH} < {*TOKENS}


def test_experts_differ_along_axes_along_which_dense_units_are_the_same() -> None:
    for zero in (0, 1):
        roles = Roles.from_plan(Plan(dp=4, ep=2, zero=zero))
        assert roles.gradient_sum(DENSE) == TOKENS
        assert roles.gradient_sum(EXPERT) == ("replicate", "shard", "cp")
        assert roles.states(DENSE) == (("shard", "ep_shard", "cp", "ep_cp") if zero else ())
        assert roles.states(EXPERT) == (("shard", "cp") if zero else ())
        assert {*roles.states(EXPERT), *EXPERTS, *MODEL} <= {*roles.one_copy}


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("dp=8 ep=2", (4, 2, 1, 1, 1, 1)),
        ("dp=8 ep=4 zero=1", (1, 1, 2, 4, 1, 1)),
        ("dp=8 ep=2 zero=3 shard=4", (2, 1, 2, 2, 1, 1)),
        ("dp=8 ep=4 zero=2 shard=4", (2, 1, 1, 4, 1, 1)),
        ("dp=8 ep=4 zero=1 shard=2", (2, 2, 1, 2, 1, 1)),
        ("dp=6 ep=6 zero=1 shard=2", (1, 3, 1, 2, 1, 1)),
        ("dp=1 cp=2 ep=2", (1, 1, 1, 1, 1, 2)),
        ("dp=2 cp=2 ep=2 zero=1", (1, 1, 2, 1, 1, 2)),
        ("dp=2 cp=2 ep=4 zero=1", (1, 1, 1, 2, 1, 2)),
        ("dp=2 cp=4 ep=2", (2, 1, 1, 1, 2, 2)),
        ("dp=4 cp=6 ep=4 zero=2 shard=1", (2, 2, 1, 1, 3, 2)),
        ("dp=2 cp=3 ep=2 zero=3", (1, 1, 1, 2, 3, 1)),
    ],
)
def test_ep_takes_its_ranks_out_of_cp_then_shard_groups_then_replicas(
    text: str, degrees: tuple[int, ...]
) -> None:
    plan = Plan.parse(text)
    grid = Grid.from_plan(plan)
    assert tuple(grid.degree(axis) for axis in TOKENS) == degrees
    assert grid.num_ranks == plan.num_ranks == plan.dp * plan.cp
    assert grid.degree(*EXPERTS) == plan.ep
    assert grid.group(0, *EXPERTS)[:2] == (0, 1) or plan.cp // grid.degree("ep_cp") > 1
    any_dp = Plan.parse(text.replace(f"dp={plan.dp}", "dp=auto"))
    assert any_dp.resolved(plan.num_ranks) == plan


def test_a_block_has_a_unit_of_each_kind_with_shards_of_its_own() -> None:
    tensors = (ParamInfo("a", (2, 2), group=0), ParamInfo("b", (4, 256), group=0, kind=EXPERT))
    (unit,) = single_stage(("a", "b"), 1).units_of(0, [UnitInfo("block", tensors)])
    assert unit.tensors == tensors
    dense, experts = Layout.build([unit], {DENSE: 4, EXPERT: 2}, TPCoord(expert=1, experts=2)).units
    assert (dense.kind, dense.name, dense.block, dense.num_shards) == (DENSE, "block", "block", 4)
    assert (experts.kind, experts.name, experts.block, experts.num_shards) == (
        *(EXPERT, "block (experts)", "block", 2),
    )
    assert experts.params[0].boxes.ranges == (((2, 4),), ((0, 256),))


def test_a_ranks_index_in_a_group_is_its_place_in_it() -> None:
    grid = Grid.from_degrees(pp=2, replicate=2, shard=3, row=2, col=2)
    some: list[Axes] = [("pp",), ("shard", "row", "col"), ("replicate", "shard"), ("row", "col"), ()]
    for names in some:
        for rank in range(grid.num_ranks):
            group = grid.group(rank, *names)
            assert group.index(rank) == grid.index(rank, *names)
            assert group[0] == grid.first(rank, *names)


def test_only_axes_with_several_ranks_are_used_outermost_first() -> None:
    assert Grid.from_degrees(pp=2, col=2).used("col", "row", "pp") == ("pp", "col")
    assert Grid.from_degrees(pp=2, shard=3, col=4).stride("shard") == 4
