"""Traffic of one rank in a step, estimated from the plan alone: the laws that the numbers follow."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.plan import (
    CommCount,
    CommKey,
    Grid,
    Layout,
    ParamInfo,
    Plan,
    UnitInfo,
    subtract_traffic,
    sum_traffic,
)
from plait.plan.comm_log import from_rows, to_rows
from plait.plan.events import RankFacts, StageFacts, TransportFacts, ring_bytes, step_traffic
from plait.plan.prefetch import ExecOrder, PrefetchWalk, planned_gathers
from plait.plan.schedule import make_schedule

NUMEL = 3 * 4096  # of all units together; nothing is padded up to 16 ranks
BLOCKS = ("a", "b", "c")


def facts_of(text: str, rank: int = 0, *, shares: bool = False) -> RankFacts:
    """Facts of a model of three units, all on one stage; gradients travel in the dtype of computation."""
    plan = Plan.parse(text)
    units = [UnitInfo(name, (ParamInfo(f"{name}.weight", (64, 64), 0),)) for name in BLOCKS]
    schedule = make_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks)
    layout = Layout.build(units, plan.shard_degree)
    said = {CommKey(("col",), "", "all-reduce"): CommCount(2, 100)} if plan.cols > 1 else {}
    uses = ExecOrder(BLOCKS, BLOCKS[::-1])
    stage = StageFacts(layout, said, uses, output=(640,), gradient=(640,))
    wide = {"bf16": 2, "fp64": 8}.get(plan.precision, 4)
    terms = TransportFacts(wide, shares, exchanges=False, host_size=plan.num_ranks)
    return RankFacts(plan, Grid.from_plan(plan), rank, schedule, [stage] * schedule.num_stages, {}, terms)


def sent_elements(text: str, **options: Any) -> float:
    """By a rank for parameters and gradients, in a ring, in units of all parameters."""
    facts = facts_of(f"{text} precision=bf16", **options)
    said = step_traffic(facts)
    moved = sum_traffic(said.get(strand, {}) for strand in ("parameters", "gradients"))
    moved = {line: tally for line, tally in moved.items() if tally.num_bytes > 100}  # no votes
    return ring_bytes(moved, facts.grid) / (2 * NUMEL)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_zero_stages_send_as_much_as_the_readme_states(ranks: int) -> None:
    """2 (N-1)/N parameters up to stage 2, half as much again at stage 3."""
    share = (ranks - 1) / ranks
    for zero in (1, 2):
        assert sent_elements(f"dp={ranks} zero={zero}") == pytest.approx(2 * share)
    once_more = (2 * 3 - 1) / 3  # the last unit of forward stays for backward
    assert sent_elements(f"dp={ranks} zero=3 prefetch=0") == pytest.approx((once_more + 1) * share)
    assert sent_elements(f"dp={ranks} zero=3 reshard=step") == pytest.approx(2 * share)


def test_ranks_with_one_memory_gather_nothing() -> None:
    assert sent_elements("dp=4 zero=3", shares=True) == pytest.approx(0.75)
    said = step_traffic(facts_of("dp=4 zero=3", shares=True))
    assert said["parameters"] == {CommKey(("shard",), "gathers", "barrier"): CommCount(1, 0)}


@pytest.mark.parametrize("micro", [1, 2, 5])
def test_whole_gradients_are_reduced_once_a_step_and_cut_ones_for_every_micro_batch(micro: int) -> None:
    def calls(text: str) -> int:
        traffic = step_traffic(facts_of(f"{text} micro={micro}"))["gradients"]
        return traffic[CommKey(("shard",), "reductions", "reduce-scatter")].count

    assert calls("dp=2 zero=1") == len(BLOCKS)
    assert calls("dp=2 zero=2 accumulate=unsharded") == len(BLOCKS)
    assert calls("dp=2 zero=2") == len(BLOCKS) * micro


def test_replicas_add_up_ranges_once_a_step() -> None:
    traffic = step_traffic(facts_of("dp=8 zero=2 shard=4 micro=3"))["gradients"]
    assert traffic[CommKey(("replicate",), "reductions", "all-reduce")] == CommCount(3, 4 * NUMEL // 4)
    assert traffic[CommKey(("shard",), "reductions", "reduce-scatter")] == CommCount(9, 3 * 4 * NUMEL)


def test_a_single_rank_sends_nothing() -> None:
    for text in ("dp=1", "dp=1 zero=3 micro=2", "dp=1 reduce=int8", "dp=1 algorithm=ring"):
        assert step_traffic(facts_of(text)) == {}


@given(
    pp=st.integers(1, 5),
    chunks=st.integers(1, 3),
    micro=st.integers(1, 7),
    name=st.sampled_from(["1f1b", "gpipe"]),
)
def test_every_message_of_a_pipeline_rank_has_a_receiver(pp: int, chunks: int, micro: int, name: str) -> None:
    text = f"pp={pp} schedule={name} chunks={chunks} micro={micro}"
    found = [step_traffic(facts_of(text, rank)).get("stages", {}) for rank in range(pp)]
    sent, received = (
        sum_traffic(
            {CommKey(line.axes, line.channel, ""): t for line, t in of.items() if line.op == verb}
            for of in found
        )
        for verb in ("send", "receive")
    )
    assert sent == received
    stages = pp * chunks
    crossings = stages - 1 if pp > 1 else 0
    assert sum(tally.count for tally in sent.values()) == 2 * crossings * micro


@given(
    uses=st.integers(1, 6),
    prefetch=st.integers(0, 3),
    passes=st.lists(st.booleans(), max_size=5),
    keeps=st.booleans(),
)
def test_every_use_finds_its_unit_gathered(uses: int, prefetch: int, passes: list[bool], keeps: bool) -> None:
    order = list(range(uses))
    found = planned_gathers(ExecOrder(order, order[::-1]), passes, prefetch, keeps=keeps)
    assert set(found) == (set(order) if passes else set())
    if keeps:
        assert len(found) == len(set(found))
    elif passes:
        most = uses * len(passes)
        assert uses <= len(found) <= most


def test_pinned_units_are_gathered_once_for_a_forward_and_its_backward() -> None:
    uses = ExecOrder(["a", "b", "c"], ["c", "b", "a"], {"a"})
    assert planned_gathers(uses, [False, True], 0, keeps=False) == ["a", "b", "c", "b"]
    assert planned_gathers(uses, [True], 0, keeps=False) == ["a", "c", "b"]


def test_a_walk_begins_gathers_as_far_ahead_as_it_may() -> None:
    walk = PrefetchWalk(["a", "b", "c"], 1, (), reshards=True)
    assert [walk.advance() for _ in range(3)] == [["a", "b"], ["c"], []]


def test_named_algorithms_send_what_they_receive_over_all_ranks() -> None:
    for name, ranks in itertools.product(("naive", "ring", "tree", "halving", "two-level"), (2, 3, 4)):
        said = [step_traffic(facts_of(f"dp={ranks} algorithm={name}", rank)) for rank in range(ranks)]
        totals = [
            sum(t.num_bytes for of in said for line, t in of["gradients"].items() if line.op == verb)
            for verb in ("send", "receive")
        ]
        assert totals[0] == totals[1] > 0


def test_traffic_survives_json() -> None:
    traffic = sum_traffic(step_traffic(facts_of("pp=2 dp=4 tp=2 zero=3 shard=2 micro=2")).values())
    assert from_rows(to_rows(traffic)) == traffic
    assert subtract_traffic({}, traffic) == traffic


def test_traffic_of_one_of_16384_ranks_is_estimated_quickly() -> None:
    begun_s = time.process_time()
    facts = facts_of("pp=16 dp=128 tp=8 zero=3 shard=32 micro=64 precision=bf16", 16_383)
    said = step_traffic(facts)
    assert time.process_time() - begun_s < 2.0
    assert facts.grid.num_ranks == 16_384
    assert set(said) == {"layers", "parameters", "gradients", "stages", "step"}
