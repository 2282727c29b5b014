"""Islands whose outer optimizer is on parameter servers: the numbers of a simulation in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.directory import step_path
from plait.plan import Plan
from plait.server.job import join_job, process_world
from plait.train.servers import RESUMED, continue_first_island
from support import local_steps, programs
from support.pool import Pool

DILOCO = "outer=nesterov:0.7:0.9"
SGD = {"optimizer": "SGD", "arguments": {"lr": 0.3}, "clip_norm": None}


def train(
    task: programs.Task, plan: str, sends: bool = False, folder: Path | None = None, start: int = 0
) -> Any:
    """A trace of this worker, with the servers' counts; None on a server. `sends`: without shared memory.
    `folder`: of a checkpoint after `start` steps, to continue from; with 0, worker 0 saves one after half of
    the steps."""
    parsed = Plan.parse(plan)
    world = process_world(join_job(parsed), shares_memory=not sends)
    try:
        engine = programs.engine_of(task, plan, seed=3 + start, world=world)
    except SystemExit:
        return None
    first, losses, drifts = engine.full_parameters(), [], []
    if start and engine.data_rank == 0:
        assert folder is not None
        engine.load(step_path(folder, start))
        world.store.set(RESUMED, str(step_path(folder, start)))
    elif start:
        continue_first_island(engine, world)
    for number, batch in enumerate(task.data(task.steps)[start:], start + 1):
        result = engine.step(programs.share_of(batch, engine))
        losses.append(result.loss)
        if result.exchange is not None:
            drifts.append(result.exchange.drift)
        if folder is not None and engine.data_rank == 0 and not start and number == task.steps // 2:
            engine.save(folder)
    trace = local_steps.IslandsTrace(first, losses, engine.state(), drifts)
    counts = engine.server_counts()
    world.close()
    return trace, counts


@pytest.mark.parametrize(
    ("words", "sends"),
    [
        pytest.param("dp=2 servers=1 local_steps=4", False, marks=pytest.mark.quick),
        (f"dp=3 servers=2 server=replicated micro=2 local_steps=2 {DILOCO}", True),
    ],
)
def test_islands_on_servers_train_as_in_a_simulation(pool: Pool, words: str, sends: bool) -> None:
    plan = Plan.parse(f"{words} precision=fp64")
    task = local_steps.task(programs.tied_llama)
    found = pool.run(train, plan.num_ranks, task, str(plan), sends)[: plan.dp]
    trace, counts = found[0]
    own, common, losses = local_steps.simulate(task, plan, trace.first_weights)
    assert trace.losses == [pytest.approx(loss, rel=1e-9) for loss in losses]
    assert programs.largest_difference(trace.weights_of("weights/"), common)[0] <= 1e-9
    for index, ((island, _), weights) in enumerate(zip(found, own, strict=True)):
        ours = island.weights_of(f"islands/{index}/weights/")
        assert programs.largest_difference(ours, weights)[0] <= 1e-9
    assert counts["decided"] == len(trace.drifts) == local_steps.STEPS // plan.local_steps
    if sends:  # an exchange in H steps: changes to the servers, and new weights from them
        num_bytes = 8 * sum(weight.numel() for weight in common.values()) * counts["decided"]
        assert counts["moved_bytes"][1][0] == pytest.approx(num_bytes, rel=0.1)


def test_drift_is_that_of_islands_without_servers(pool: Pool) -> None:
    task = local_steps.task()
    plan = f"dp=2 local_steps=4 {DILOCO} precision=fp64"
    alone = pool.run(local_steps.train, 2, task, plan)[0]
    found = pool.run(train, 3, task, f"{plan} servers=1")[0][0]
    assert found.drifts == [pytest.approx(drift, rel=1e-6) for drift in alone.drifts]
    assert programs.largest_difference(found.weights_of("weights/"), alone.weights_of("weights/"))[0] <= 1e-9
    momentum = "outer_momentum/"
    assert programs.largest_difference(found.weights_of(momentum), alone.weights_of(momentum))[0] <= 1e-9


def test_averages_of_one_sgd_step_are_synchronous_data_parallelism(pool: Pool) -> None:
    task = local_steps.task(data=even_batches, **SGD)
    trace = pool.run(train, 3, task, "dp=2 servers=1 local_steps=1 precision=fp64")[0][0]
    reference = programs.one_process_task(task, trace.first_weights, 1)
    assert programs.largest_difference(trace.weights_of("weights/"), reference.weights)[0] <= 1e-9


def even_batches(steps: int) -> list[dict[str, object]]:
    """Batches without masked labels: all islands have as many targets."""
    return [{**batch, "labels": batch["input_ids"]} for batch in programs.batches(steps)]


def test_islands_continue_from_a_checkpoint_between_exchanges_with_the_same_bits(
    pool: Pool, tmp_path: Path
) -> None:
    """Their optimizer has no states, of which only the first island's are saved."""
    task, plan = local_steps.task(**SGD), f"dp=2 server=colocated local_steps=2 {DILOCO} precision=bf16"
    straight = pool.run(train, 2, task, plan, False, tmp_path)[0][0]
    half = local_steps.STEPS // 2
    resumed = pool.run(train, 2, task, plan, False, tmp_path, half)[0][0]
    assert resumed.losses == straight.losses[half:]
    assert resumed.state.keys() == straight.state.keys()
    assert any(key.startswith("outer_momentum/") for key in resumed.state)
    assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)


def test_islands_of_a_resumed_training_continue_the_optimizer_states_of_the_first(
    pool: Pool, tmp_path: Path
) -> None:
    task, plan = local_steps.task(), "dp=2 server=colocated local_steps=2"
    pool.run(train, 2, task, plan, False, tmp_path)
    for index, (island, _) in enumerate(pool.run(train, 2, task, plan, False, tmp_path, 4)):
        taken = island.weights_of(f"islands/{index}/scalar.step/")
        assert {int(number) for number in taken.values()} == {local_steps.STEPS}


def count_changes(words: str, steps: int) -> Any:
    """Each island's steps as they count in the global weights, when all have ended."""
    process = join_job(Plan.parse(f"dp=2 {words}"))
    try:
        engine = local_steps.ledger_engine(2, words)
    except SystemExit:
        return None
    while engine.num_steps < steps:
        engine.step({"worker": torch.tensor([engine.data_rank])})
    process.store.set(f"ended {engine.data_rank}", "")
    for worker in range(2):
        process.store.wait_for(f"ended {worker}")
    rows = -engine.full_parameters()["rows"]
    process.store.set(f"read {engine.data_rank}", "")
    for worker in range(2):
        process.store.wait_for(f"read {worker}")
    engine.world.close()
    return rows.amin(1).tolist(), rows.amax(1).tolist()


def test_changes_that_are_applied_by_themselves_count_as_in_the_mean(pool: Pool) -> None:
    for fewest, most in pool.run(count_changes, 3, "servers=1 sync=async local_steps=4", 16)[:2]:
        assert fewest == most == [8.0, 8.0]
