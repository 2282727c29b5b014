"""The roles of the axes follow from what each divides; tables with other axes give other roles."""

from dataclasses import replace

import pytest

from plait.plan import Grid, Plan, axes
from plait.plan.axes import AXES, BATCH, MODEL, REPLICAS, TABLE, TENSOR, TOKENS, Axes, Axis, Roles, UnitKind

DENSE = UnitKind.DENSE


def test_the_roles_of_a_step_are_those_of_the_papers() -> None:
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


@pytest.mark.parametrize("text", ["dp=8 tp=2x4 pp=3 zero=3 shard=4", "dp=6", "dp=4 zero=2 local_steps=0"])
def test_ranks_along_states_and_replicas_sum_a_gradient_together(text: str) -> None:
    plan = Plan.parse(text)
    roles, grid = Roles.from_plan(plan), Grid.from_plan(plan)
    rank = grid.num_ranks // 2
    summed = set(grid.group(rank, *roles.gradient_sum()))
    owners = grid.group(rank, *roles.states())
    assert summed == {other for owner in owners for other in grid.group(owner, *roles.replicas())}
    assert len(summed) == plan.dp
    assert grid.degree(*roles.one_copy) * grid.degree(*roles.replicas()) == grid.num_ranks


def test_an_axis_along_which_one_kind_differs_is_left_out_of_its_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As expert parallelism needs it: the axis divides samples, and only the experts' parameters."""
    of_experts = Axis("ep", "ep", axes.Divides.SAMPLES, lambda _: 2, frozenset({DENSE}), shards_states=True)
    at = AXES.index("cp")
    monkeypatch.setattr(axes, "TABLE", (*TABLE[:at], of_experts, *TABLE[at:]))
    monkeypatch.setattr(axes, "AXES", tuple(axis.name for axis in axes.TABLE))
    roles = Roles(has_islands=False)
    assert roles.gradient_sum(DENSE) == ("replicate", "shard", "cp")
    dense = tuple(
        replace(axis, differs=axis.differs - {DENSE}) if axis.name == "ep" else axis for axis in axes.TABLE
    )
    monkeypatch.setattr(axes, "TABLE", dense)
    assert roles.gradient_sum(DENSE) == ("replicate", "shard", "ep", "cp")
    assert roles.states(DENSE) == ("shard", "ep", "cp")


def test_a_ranks_index_in_a_group_is_its_place_in_it() -> None:
    grid = Grid.from_degrees(pp=2, replicate=2, shard=3, row=2, col=2)
    some: list[Axes] = [("pp",), ("shard", "row", "col"), ("replicate", "shard"), ("row", "col"), ()]
    for names in some:
        for rank in range(grid.num_ranks):
            group = grid.group(rank, *names)
            assert group.index(rank) == grid.index(rank, *names)
            assert group[0] == grid.first(rank, *names)


def test_only_axes_with_several_ranks_are_used_outermost_first() -> None:
    assert Grid.from_degrees(pp=2, col=2).used(("col", "row", "pp")) == ("pp", "col")
    assert Grid.from_degrees(pp=2, shard=3, col=4).stride("shard") == 4
