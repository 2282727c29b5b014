"""Islands that train alone for some steps: the numbers of a simulation in one process, in float64."""

from pathlib import Path

import pytest
import torch

from plait.errors import PlanError
from plait.plan import MemoryUse, Plan
from support import local_steps, programs
from support.pool import Pool

SGD = {"optimizer": "SGD", "arguments": {"lr": 0.3}, "clip_norm": None}
DILOCO = "outer=nesterov:0.7:0.9"


def _even_batches(steps: int) -> list[dict[str, object]]:
    """Batches without masked labels: all islands have as many targets."""
    return [{**batch, "labels": batch["input_ids"]} for batch in programs.batches(steps)]


def test_averaging_after_every_sgd_step_equals_synchronous_data_parallelism(pool: Pool) -> None:
    task = local_steps.task(data=_even_batches, **SGD)
    trace = pool.run(local_steps.train, 2, task, "dp=2 local_steps=1 precision=fp64")[0]
    reference = programs.one_process_task(task, trace.first_weights, 1)
    assert programs.largest_difference(trace.weights_of("weights/"), reference.weights)[0] <= 1e-9


@pytest.mark.parametrize(
    "words",
    [
        "dp=2 local_steps=3",
        pytest.param(f"dp=2 local_steps=3 {DILOCO}", marks=pytest.mark.quick),
        f"dp=3 local_steps=4 micro=2 {DILOCO}",
        f"dp=4 zero=1 shard=2 local_steps=3 {DILOCO}",
        f"dp=4 zero=2 shard=2 local_steps=2 tp=2 {DILOCO}",
        f"dp=4 zero=3 shard=2 local_steps=3 micro=3 {DILOCO}",
        f"dp=2 pp=2 local_steps=2 micro=2 offload=cpu {DILOCO}",
        f"cp=2 dp=2 local_steps=3 {DILOCO}",
        f"cp=3 dp=2 zero=3 shard=1 local_steps=2 cp_method=ring recompute=full {DILOCO}",
        f"cp=2 dp=4 zero=1 shard=2 local_steps=3 cp_method=ulysses {DILOCO}",
    ],
)
def test_islands_train_as_in_a_simulation(pool: Pool, words: str) -> None:
    plan = Plan.parse(f"{words} precision=fp64")
    task = local_steps.task(programs.tied_llama, own_loss=plan.cp > 1)
    trace = pool.run(local_steps.train, plan.num_ranks, task, str(plan))[0]
    local_steps.check(trace, task, plan)
    assert len(trace.drifts) == local_steps.STEPS // plan.local_steps
    assert all(0.1 < drift < 10 for drift in trace.drifts)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("cp=4 local_steps=2", "local_steps needs at least two islands"),
        ("cp=2 dp=2 zero=1 local_steps=2", "local_steps needs at least two islands"),
        ("cp=4 zero=1 shard=2 local_steps=2", "shard does not divide dp"),
    ],
)
def test_an_island_of_a_part_of_the_ranks_of_cp_is_refused(words: str, fact: str) -> None:
    """Islands are replicas along `dp`, so each has complete rows."""
    with pytest.raises(PlanError) as raised:
        Plan.parse(words)
    assert raised.value.fact == fact


@pytest.mark.parametrize(
    "words",
    [
        f"dp=2 local_steps=4 exchange_parts=2 {DILOCO}",
        f"dp=4 zero=1 shard=2 local_steps=5 exchange_parts=3 {DILOCO}",
    ],
)
def test_parts_exchanged_during_later_steps_are_applied_as_in_a_simulation(pool: Pool, words: str) -> None:
    plan = Plan.parse(f"{words} precision=fp64")
    task = local_steps.task()
    trace = pool.run(local_steps.train, plan.num_ranks, task, str(plan))[0]
    part_of = pool.run(local_steps.parts_of, plan.num_ranks, task, str(plan))[0]
    assert len(set(part_of.values())) > 1
    local_steps.check(trace, task, plan, part_of=part_of)


def test_without_the_exchange_islands_drift_apart(pool: Pool) -> None:
    plan = Plan.parse(f"dp=2 local_steps=2 {DILOCO} precision=fp64")
    task = local_steps.task()
    trace = pool.run(local_steps.train, 2, task, str(plan), ("start_all_reduce",))[0]
    with pytest.raises(AssertionError):
        local_steps.check(trace, task, plan)


@pytest.mark.parametrize(("exchange", "bound"), [("bf16", 2**-7), ("int8", 2 / 127)])
def test_narrow_exchanges_differ_by_their_rounding_and_errors_do_not_add_up(
    pool: Pool, exchange: str, bound: float
) -> None:
    """Relative to the largest change of a weight: with rounding of contributions and of their sum."""
    task, plan = local_steps.task(**SGD), "dp=2 local_steps=2 precision=fp32"
    exact = pool.run(local_steps.train, 2, task, plan)[0]
    ours = pool.run(local_steps.train, 2, task, f"{plan} exchange={exchange}")[0]
    weights = exact.weights_of("weights/")
    change = max(float((weights[n] - exact.first_weights[n]).abs().max()) for n in weights)
    difference = max(float((weights[n] - w).abs().max()) for n, w in ours.weights_of("weights/").items())
    assert 0 < difference < bound * change


@pytest.mark.parametrize(
    ("first", "then", "at_step"),
    [
        (f"dp=2 local_steps=3 {DILOCO} precision=fp64", "", 4),
        (f"dp=2 local_steps=4 exchange_parts=2 exchange=int8 {DILOCO} precision=fp32", "", 5),
        (
            f"dp=4 zero=1 shard=2 local_steps=3 {DILOCO} precision=fp64",
            f"dp=4 zero=3 shard=2 local_steps=3 {DILOCO} precision=fp64",
            4,
        ),
    ],
)
def test_a_resumed_training_continues_with_the_same_numbers(
    pool: Pool, tmp_path: Path, first: str, then: str, at_step: int
) -> None:
    task, plan = local_steps.task(), Plan.parse(first)
    straight = pool.run(local_steps.train, plan.num_ranks, task, first)[0]
    resumed = pool.run(
        local_steps.interrupted, plan.num_ranks, task, first, then or first, at_step, tmp_path
    )[0]
    assert resumed.state.keys() == straight.state.keys()
    if not then:
        assert resumed.losses == straight.losses[at_step:]
        assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)
    states = ({key: tensor.double() for key, tensor in of.state.items()} for of in (resumed, straight))
    assert programs.largest_difference(*states)[0] <= 1e-9


def test_other_numbers_of_islands_continue_from_the_global_weights(pool: Pool, tmp_path: Path) -> None:
    plan = "local_steps=3 precision=fp64"
    task = local_steps.task()
    saved = pool.run(local_steps.saved, 2, task, f"dp=2 {plan}", 4, tmp_path)[0]
    more = pool.run(local_steps.loaded, 3, task, f"dp=3 {plan}", tmp_path)[0]
    alone = pool.run(local_steps.loaded, 1, task, "dp=1 precision=fp64", tmp_path)[0]
    assert {key for key in more if not key.startswith("islands/2/")} == saved.keys()
    assert all(torch.equal(more[key], saved[key]) for key in saved)
    for key in alone:
        kind = key.partition("/")[0]
        assert torch.equal(alone[key], saved[key if kind == "weights" else f"islands/0/{key}"]), key
        assert torch.equal(alone[key], more[f"islands/2/{key}"]), key


def _memory(plan: str) -> tuple[MemoryUse, MemoryUse]:
    """Estimated, and measured after four steps."""
    engine = programs.engine_of(programs.Task(programs.wide_llama), plan)
    estimated = engine.estimated_memory((programs.SEQUENCES // engine.plan.dp, programs.LENGTH))
    for batch in programs.batches(4):
        engine.step(programs.share_of(batch, engine))
    return estimated, engine.memory()


@pytest.mark.parametrize(
    "words",
    ["dp=2 local_steps=2", f"dp=2 local_steps=4 exchange_parts=2 exchange=int8 {DILOCO}"],
)
def test_memory_of_the_outer_optimizer_is_estimated(pool: Pool, words: str) -> None:
    estimated, measured = pool.run(_memory, 2, f"{words} precision=bf16")[0]
    assert measured.optimizer == pytest.approx(estimated.optimizer, rel=0.02)
    assert measured.buffers == estimated.buffers
