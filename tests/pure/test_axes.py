"""The roles of the axes follow from what each divides; tables with other axes give other roles."""

from typing import Any

import pytest

from plait.plan import Grid, Layout, ParamInfo, Plan, UnitInfo, single_stage
from plait.plan.axes import (
    AXES,
    BATCH,
    MODEL,
    REPLICAS,
    TABLE,
    TENSOR,
    TOKENS,
    Axes,
    Axis,
    Divides,
    Roles,
    UnitKind,
)

DENSE = UnitKind.DENSE


def test_ranks_with_other_samples_sum_a_gradient_and_shard_its_states() -> None:
    roles = Roles.from_plan(Plan(dp=4, zero=1))
    assert (BATCH, TENSOR, MODEL) == (("replicate", "shard"), ("row", "col"), ("pp", "row", "col"))
    assert roles.gradient_sum() == TOKENS == ("replicate", "shard", "cp")
    assert roles.states() == ("shard", "cp")
    assert roles.replicas() == REPLICAS == ("replicate",)
    assert roles.one_copy == ("pp", "shard", "cp", "row", "col")
    assert roles.stage_copy == ("shard", "cp", "row", "col")
    assert roles.same_stage == ("replicate", "shard", "cp", "row", "col")
    assert roles.step == AXES


def test_islands_leave_replicas_out_of_a_step() -> None:
    roles = Roles.from_plan(Plan(dp=4, zero=1, shard=2, local_steps=8))
    assert roles.gradient_sum() == ("shard", "cp")
    assert roles.replicas() == ()
    assert roles.step == ("pp", "shard", "cp", "row", "col")


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


def test_an_axis_of_samples_is_in_the_sums_of_units_that_do_not_differ_along_it() -> None:
    """Experts will differ along such an axis, and dense units will not."""
    at = AXES.index("cp")
    for differs, names in ((frozenset({DENSE}), ()), (frozenset(), ("ep",))):
        axis = Axis("ep", "ep", Divides.SAMPLES, lambda _: 2, differs, shards_states=True)
        roles = Roles(has_islands=False, table=(*TABLE[:at], axis, *TABLE[at:]))
        assert roles.gradient_sum(DENSE) == ("replicate", "shard", *names, "cp")
        assert roles.states(DENSE) == ("shard", *names, "cp")
        assert roles.replicas(DENSE) == ("replicate",)


def test_a_unit_of_a_stage_has_the_models_kind() -> None:
    kind: Any = object()  # another than dense
    tensors = (ParamInfo("a", (2, 2), group=0), ParamInfo("b", (2, 2), group=0))
    (unit,) = single_stage(("a", "b"), 1).units_of(0, [UnitInfo("block", tensors, kind)])
    assert (unit.kind, unit.tensors) == (kind, tensors)
    assert [layout.kind for layout in Layout.build([unit], 2).units] == [kind]


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
