"""The plans of a sweep, plans made simpler, and ranks in the words of the grid."""

import pytest

from plait.plan import Grid, Plan
from plait.verify import all_plans
from plait.verify.model_spec import parse_source
from plait.verify.sweep import simpler_plans
from plait.verify.worker import common_experts, describe_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 8])
def test_a_sweep_has_every_arrangement_of_the_ranks_once(num_ranks: int) -> None:
    plans = all_plans(num_ranks)
    assert len(set(map(str, plans))) == len(plans)
    assert {plan.num_ranks for plan in plans} == {num_ranks}
    degrees = {(plan.pp, plan.dp, plan.rows, plan.cols) for plan in plans}
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    assert degrees == {
        (pp, dp, rows, num_ranks // (pp * dp * rows))
        for pp in divisors
        for dp in divisors
        for rows in divisors
        if num_ranks % (pp * dp * rows) == 0
    }
    for pp, dp, rows, cols in degrees:
        mine = [p for p in plans if (p.pp, p.dp, p.rows, p.cols) == (pp, dp, rows, cols)]
        assert {p.zero for p in mine} == ({0, 1, 2, 3} if dp > 1 else {0})
        assert {p.sp for p in mine} == ({False, True} if cols > 1 else {False})
        assert len({p.schedule for p in mine}) == (3 if pp > 1 else 1)


@pytest.mark.parametrize(("model", "experts"), [("mixtral", 4), ("llama", 1), ("dbrx", 4)])
def test_a_sweep_of_a_mixture_has_every_ep_that_divides_its_experts(model: str, experts: int) -> None:
    assert common_experts(parse_source(model, layers=2)) == experts
    without, plans = all_plans(4), all_plans(4, experts)
    assert [str(plan) for plan in plans if plan.ep == 1] == [*map(str, without)]
    assert {(plan.dp, plan.ep) for plan in plans} == {
        (dp, ep) for dp in (1, 2, 4) for ep in (1, 2, 4) if dp % ep == 0 and experts % ep == 0
    }


def test_simpler_plans_lack_one_part_each() -> None:
    plan = Plan.parse("pp=2 schedule=zb-h1 dp=2 zero=3 reshard=step tp=2 sp=true micro=4 recompute=full")
    found = simpler_plans(plan)
    assert set(found) == {"pp", "schedule", "dp", "zero", "tp", "sp", "micro", "recompute"}
    assert str(found["tp"]) == str(Plan.parse(str(plan).replace("tp=2", "").replace("sp=true", "")))
    assert (found["dp"].dp, found["dp"].zero, found["dp"].reshard) == (1, 0, "use")
    assert all(plan.num_ranks % other.num_ranks == 0 for other in found.values())
    assert simpler_plans(Plan()) == {}


GRID = Grid.from_degrees(pp=2, replicate=2, col=2)


@pytest.mark.parametrize(
    ("off", "holders", "words"),
    [
        (range(8), range(8), "all ranks"),
        ([1, 3, 5, 7], range(8), "col=1"),
        ([4, 6], range(8), "pp=1 col=0"),
        ([4, 5, 6, 7], [4, 5, 6, 7], "all ranks"),
        ([5, 7], [4, 5, 6, 7], "col=1"),
        ([0, 3], range(8), "ranks 0, 3"),
    ],
)
def test_ranks_are_named_by_grid_coordinates(off: list[int], holders: list[int], words: str) -> None:
    assert describe_ranks(off, holders, GRID) == words
