"""ZeRO 0 to 3 compute what the one-process program computes, under every plan, and what each other does."""

import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import plait
from plait.errors import ConfigError, PlaitError
from plait.parallel.zero import unshard
from support import edge_case_models, hybrid_plans, programs, zero_plans
from support.covering import Case
from support.pool import Pool, Ranks


def check_parity(pool: Pool, case: Case) -> None:
    build = getattr(programs, case["build"])
    over = pool.over(case.get("transport", "auto"))
    ours = over.run(programs.train, int(case["dp"]), build, zero_plans.plan_of(case))[0]
    oracle = programs.one_process(build, ours.first_weights, zero_plans.micros_of(case))
    programs.assert_same(ours, oracle)
    assert all(norm > 2 * programs.CLIP for norm in oracle.norms), "clipping was not active"


FEW = zero_plans.few_cases(hybrid_plans.pairs_in(zero_plans.FACTORS, zero_plans.seen_in))


@pytest.mark.parametrize("case", FEW, ids=zero_plans.name_of)
def test_gradients_and_weights_equal_the_one_process_programs(pool: Pool, case: Case) -> None:
    check_parity(pool, case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", zero_plans.all_cases(), ids=zero_plans.name_of)
def test_under_every_plan_gradients_and_weights_equal_the_one_process_programs(
    pool: Pool, case: Case
) -> None:
    check_parity(pool, case)


# --- the stages against each other

STAGES = ("", "zero=1", "zero=2", "zero=3")


def _bits(plan: str, build: Any = programs.rough_llama) -> Any:
    """Losses, norms and weights of four steps."""
    engine = plait.parallelize(
        build(),
        plan,
        optimizer_args=programs.ADAMW,
        clip_norm=programs.CLIP,
        loss=programs.summed_loss,
        seed=3,
    )
    results = [engine.step(programs.share_of(batch, engine)) for batch in programs.batches(4)]
    assert all(result.grad_norm > programs.CLIP for result in results), "clipping was not active"
    return results, engine.full_parameters()


def assert_same_bits(pool: Ranks, ranks: int, plans: list[str], build: Any = programs.rough_llama) -> None:
    results, weights = pool.run(_bits, ranks, plans[0], build)[0]
    for plan in plans[1:]:
        other_results, other_weights = pool.run(_bits, ranks, plan, build)[0]
        assert [r.loss for r in other_results] == [r.loss for r in results], plan
        assert [r.grad_norm for r in other_results] == [r.grad_norm for r in results], plan
        differing = [name for name in weights if not torch.equal(weights[name], other_weights[name])]
        assert not differing, f"{plan}: {differing}"


@pytest.mark.parametrize("micro", ["micro=1", "micro=3 accumulate=unsharded"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_on_two_ranks_all_stages_have_the_same_bits(
    pool: Pool, precision: str, micro: str, transport: str
) -> None:
    """Two addends have one sum. What is summed over micro-batches first has to be so at every stage."""
    assert_same_bits(
        pool.over(transport), 2, [f"dp=2 {micro} precision={precision} {stage}" for stage in STAGES]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_that_accumulate_in_ranges_have_the_same_bits(pool: Pool, precision: str) -> None:
    plans = [f"dp=2 micro=3 precision={precision} accumulate=sharded zero={stage}" for stage in (2, 3)]
    assert_same_bits(pool, 2, plans)


def test_a_branch_on_one_rank_leaves_all_stages_the_same_bits(pool: Pool) -> None:
    assert_same_bits(pool, 2, [f"dp=2 {stage}" for stage in STAGES], programs.branches)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_when_parameters_are_gathered_and_how_long_they_stay_changes_no_bit(
    pool: Pool, precision: str
) -> None:
    words = ["prefetch=0", "", "prefetch=2", "prefetch=9", "reshard=step", "reshard=step prefetch=0"]
    assert_same_bits(
        pool.over("gloo"), 2, [f"dp=2 micro=3 zero=3 precision={precision} {word}" for word in words]
    )


@pytest.mark.parametrize("dp", [3, 4])
def test_on_more_ranks_all_stages_agree_to_fp32(pool: Pool, dp: int) -> None:
    results, weights = pool.run(_bits, dp, f"dp={dp}")[0]
    hybrid = ["zero=1 shard=2", "zero=2 shard=2", "zero=3 shard=2"] if dp == 4 else []
    for stage in (*STAGES[1:], *hybrid):
        other_results, other_weights = pool.run(_bits, dp, f"dp={dp} {stage}")[0]
        assert [r.loss for r in other_results] == pytest.approx([r.loss for r in results], rel=1e-6), stage
        norms = [r.grad_norm for r in results]
        assert [r.grad_norm for r in other_results] == pytest.approx(norms, rel=1e-5), stage
        # AdamW's update of an element whose gradient is all rounding is anyone's guess, up to its size
        difference, name = programs.largest_difference(other_weights, weights)
        assert difference < 1e-4, f"{stage}: {name}"
        scale = torch.cat([w.flatten() for w in weights.values()]).norm()
        apart = torch.cat([(other_weights[n] - w).flatten() for n, w in weights.items()]).norm()
        assert apart < 1e-6 * scale, stage


def _bits_twice(plan: str) -> Any:
    return _bits(plan), _bits(plan)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", ["dp=3 zero=1", "dp=3 zero=2 micro=2", "dp=4 zero=3 shard=2 micro=3"])
def test_the_same_plan_and_seed_give_the_same_bits(pool: Pool, words: str, precision: str) -> None:
    ranks = int(words[3])
    first, second = pool.run(_bits_twice, ranks, f"{words} precision={precision}")[0]
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


# --- what every stage says to its peers


@pytest.mark.parametrize(
    ("plan", "verb"),
    [
        pytest.param("dp=2", "start_all_reduce", marks=pytest.mark.quick),
        ("dp=2 zero=1", "start_scattered_sum"),
        ("dp=2 zero=1", "start_all_gather"),
        ("dp=2 zero=2 micro=3", "start_scattered_sum"),
        ("dp=2 zero=2 micro=3 accumulate=unsharded", "start_scattered_sum"),
        ("dp=2 zero=2", "start_all_gather"),
        pytest.param("dp=2 zero=3 micro=3", "start_scattered_sum", marks=pytest.mark.quick),
        ("dp=2 zero=3 reshard=step", "start_scattered_sum"),
        ("dp=2 zero=3", "start_all_gather"),
        ("dp=2 zero=3 reshard=step", "start_all_gather"),
        ("dp=4 zero=1 shard=2", "start_all_reduce"),
        ("dp=4 zero=2 shard=2", "start_all_reduce"),
        ("dp=4 zero=3 shard=2", "start_all_reduce"),
    ],
)
@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_without_its_communication_parity_fails(pool: Pool, plan: str, verb: str, transport: str) -> None:
    if verb == "start_all_gather" and transport == "host":
        pytest.skip("nothing is gathered where memory is shared: see the next test")
    task = programs.Task(programs.llama)
    ranks, words = int(plan[3]), f"{plan} precision=fp64"
    ours = pool.over(transport).run(programs.train_task, ranks, task, words, muted_ops=(verb,))[0]
    oracle = programs.one_process_task(task, ours.first_weights, micros=2)
    with pytest.raises(AssertionError, match="differs by"):
        programs.assert_same(ours, oracle)


def _slow_owner(waits: bool) -> Any:
    """Weights after a few steps in which rank 1 is late with its range."""
    engine = programs.engine_of(programs.Task(programs.llama), "dp=2 zero=3 precision=fp64")
    stage = engine._parts.sharded.stages[0]
    late = stage.update
    with ExitStack() as patches:
        if not waits:
            patches.enter_context(mock.patch.object(unshard, "barrier"))
        if torch.distributed.get_rank() == 1:
            slow = mock.patch.object(stage, "update", lambda step: (time.sleep(0.2), late(step)))
            patches.enter_context(slow)
        return [engine.step(programs.share_of(b, engine)).loss for b in programs.batches(3)]


def test_without_the_barrier_after_an_update_ranks_read_old_weights(pool: Pool) -> None:
    assert pool.run(_slow_owner, 2, True) != pool.run(_slow_owner, 2, False)


def _num_gathers(plan: str) -> list[int]:
    """Gathers of each step, and the number of units."""
    engine = programs.engine_of(programs.Task(programs.branches), plan)
    counts = []
    for batch in programs.batches(3):
        with mock.patch.object(unshard, "start_all_gather", wraps=unshard.start_all_gather) as verb:
            engine.step(programs.share_of(batch, engine))
        counts.append(verb.call_count)
    return [*counts, len(engine.layout.units)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_kept_for_a_step_are_gathered_once_a_step(pool: Pool, prefetch: int) -> None:
    """Also a block that forward uses twice."""
    plan = f"dp=2 zero=3 micro=3 reshard=step prefetch={prefetch} precision=fp64"
    for *counts, num_units in pool.over("gloo").run(_num_gathers, 2, plan, timeout_s=30):
        assert counts == [num_units] * 3


def test_a_verb_that_no_rank_uses_cannot_be_muted() -> None:
    with pytest.raises(AssertionError, match="no module of"), programs.muted("launch_local"):
        pass


# --- first weights and refusals


def _initial_weights(plan: str, build: Any) -> Any:
    return programs.engine_of(programs.Task(build), plan, seed=7).full_parameters()


@pytest.mark.parametrize("build", [programs.llama, programs.tied_llama, programs.branches])
def test_first_weights_are_the_same_at_every_stage(pool: Pool, build: Any) -> None:
    alone = pool.run(_initial_weights, 1, "dp=1 precision=fp64", build)[0]
    for plan in ("dp=2 zero=1", "dp=3 zero=2", "dp=3 zero=3", "dp=4 zero=3 shard=2"):
        together, *others = pool.run(_initial_weights, int(plan[3]), f"{plan} precision=fp64", build)
        assert together.keys() == alone.keys()
        assert all(torch.equal(alone[name], together[name]) for name in alone), plan
        assert others == [{}] * len(others), "whole tensors are rank 0's"


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("options", [{"clip_value": 0.0}, {"clip_value": -1.0}, {"clip_value": float("nan")}])
def test_an_invalid_limit_is_refused(stage: int, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="clip_value") as caught:
        plait.parallelize(programs.llama(), f"zero={stage}", **options)
    assert "\n  expected: above 0" in str(caught.value)


def _foreign_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [*model.parameters(), nn.Parameter(torch.ones(3))]}]


def _missing_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [*model.parameters()][1:]}]


def _repeated_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [*model.parameters()]}, {"params": [*model.parameters()][:1], "lr": 1.0}]


@pytest.mark.parametrize("groups", [_foreign_groups, _missing_groups, _repeated_groups])
@pytest.mark.parametrize("stage", [0, 3])
def test_groups_that_are_not_the_models_parameters_once_each_are_refused(groups: Any, stage: int) -> None:
    with pytest.raises(PlaitError) as caught:
        programs.engine_of(programs.Task(edge_case_models.uneven, groups=groups), f"zero={stage}")
    assert "\n  given   : " in str(caught.value)


def _no_such_class(model: nn.Module) -> Any:
    return nn.Conv2d


def _not_of_the_model(model: nn.Module) -> Any:
    return [nn.Linear(2, 2)]


def _inside_each_other(model: Any) -> Any:
    return [model.first, model.first.up]


@pytest.mark.parametrize("blocks", [_no_such_class, _not_of_the_model, _inside_each_other])
@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_that_are_not_the_models_are_refused(blocks: Any, stage: int) -> None:
    with pytest.raises(PlaitError) as caught:
        programs.engine_of(programs.Task(edge_case_models.separate, blocks=blocks), f"zero={stage}")
    assert "\n  given   : " in str(caught.value)
