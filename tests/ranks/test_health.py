"""Detection by all ranks together: slow ranks, ranks that hang, spikes of the loss."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import newest
from plait.comm import (
    ReduceWork,
    all_reduce,
    barrier,
    connect,
    start_all_gather,
    start_exchange,
    start_scattered_sum,
)
from plait.data.loader import Batches
from plait.errors import CommError
from plait.train.heartbeat import Heartbeat
from plait.train.prepare import prepare
from plait.train.run_dir import RunDir
from plait.train.stragglers import Stragglers
from plait.train.trainer import train
from support import programs, trainings
from support.pool import Pool

LATE_S = 0.15
STEPS, EVERY = 6, 3
SLOW_S = 0.25


def _seconds_by_verb() -> dict[str, float]:
    """Seconds by verb on the clock, for calls to which rank 0 comes late while rank 1 computes."""
    world = connect()
    group, numbers = world.group, torch.ones(2 * world.size)
    whole = torch.empty(2 * world.size * world.size)

    def summed(summing: ReduceWork, out: torch.Tensor) -> None:
        assert len([*summing.into(out)]) == 1
        summing.release()

    waits: dict[str, Any] = {
        "run": lambda: all_reduce(numbers, group),
        "started": lambda: start_all_gather(whole, numbers, group).wait(),
        "barrier": lambda: barrier(group),
        "background": lambda: group.comm_thread.submit(lambda: all_reduce(numbers, group)).wait(),
        "scattered sum": lambda: summed(start_scattered_sum(numbers.clone(), group), torch.empty(2)),
        "exchange": lambda: summed(start_exchange(numbers.clone(), group), torch.empty_like(numbers)),
    }
    found = {}
    for name, wait in waits.items():
        barrier(group)
        if world.rank == 0:
            time.sleep(LATE_S)
        before_s = world.clock.seconds
        wait()
        found[name] = world.clock.seconds - before_s
    before_s = world.clock.seconds
    time.sleep(LATE_S)
    found["nothing"] = world.clock.seconds - before_s
    return found


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_the_clock_counts_waiting_in_every_kind_of_verb_and_nothing_else(pool: Pool, transport: str) -> None:
    late, other = pool.over(transport).run(_seconds_by_verb, 2)
    assert len(other) == 7
    assert other.pop("nothing") == 0.0
    assert late.pop("nothing") == 0.0
    assert {name: seconds for name, seconds in other.items() if seconds < 0.8 * LATE_S} == {}
    assert {name: seconds for name, seconds in late.items() if seconds > 0.5 * LATE_S} == {}


def _notes(plan: str, slow_rank: int) -> list[str]:
    engine = trainings.engine_of(plan)
    notes: list[str] = []
    stragglers = Stragglers(engine.world, engine.plan, EVERY, 3.0, notes.append)
    for step, batch in enumerate(programs.batches(STEPS), 1):
        stragglers.begin(step - 1)
        if engine.world.rank == slow_rank:
            time.sleep(SLOW_S)  # as in its data
        engine.step(programs.share_of(batch, engine))
        stragglers.end(step)
    return notes


@pytest.mark.parametrize(
    ("transport", "plan", "ranks"),
    [
        ("host", "dp=3", 3),
        ("gloo", "dp=2 zero=3", 2),
        ("gloo", "tp=2", 2),
        ("host", "dp=2 zero=2 micro=2", 2),
    ],
)
def test_the_slow_rank_is_named_once_and_no_other(pool: Pool, transport: str, plan: str, ranks: int) -> None:
    for notes in pool.over(transport).run(_notes, ranks, plan, 1):
        assert len(notes) == 1, notes
        assert notes[0].startswith("rank 1 (host ")
        assert "own work per step" in notes[0]


def _does_something_else() -> None:
    time.sleep(6)


def _error_of_waiting_rank(folder: Path) -> str:
    world = connect(timeout_s=2.0)
    try:
        with Heartbeat(folder, world, 10.0) as heart:
            heart.beat(4, "a step")
            if world.rank == 1:
                _does_something_else()
            else:
                all_reduce(torch.ones(1), world.group)
    except CommError as error:
        return str(error)
    return ""


def test_a_communication_that_fails_leaves_the_stacks_of_all_ranks(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    message, _ = pool.run(_error_of_waiting_rank, 2, folder)
    assert "rank 1 did not arrive within 2 s" in message
    assert f"stacks of all threads: {folder}" in message
    assert "none from" not in message
    assert "all_reduce" in (folder / "rank-00000.txt").read_text()
    assert "_does_something_else" in (folder / "rank-00001.txt").read_text()


def _nothing_wrong(folder: Path) -> bool:
    world = connect()
    for step in range(2):  # a run that goes back enters it again
        with Heartbeat(folder, world, 5.0) as heart:
            heart.beat(step, "a step")
            time.sleep(0.6)
        barrier(world.group)
    return folder.exists()


def test_a_run_in_which_nothing_hangs_leaves_no_stacks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_nothing_wrong, 2, tmp_path / "stacks") == [False, False]


RECIPE = """
plan = "dp=2 zero=2"
[run]
dir = "{here}/run"
steps = 9
batch = 4
evaluate_every = 0
checkpoint_every = 2
keep_last = 3
spike_window = 4
spike_skip = 1
device = "cpu"
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 1
[data]
dir = "{here}/data"
sources = ["{here}/text.txt"]
sequence = 16
validation = 0
workers = 0
[tokenizer]
vocab_size = 260
[optimizer]
lr = 2e-2
"""
SPIKE, BACK = 7, 2  # the number of the batch; the newest checkpoint of before the window


def _train(run: Path, ahead: int) -> None:
    """With a batch that is far off, or `ahead` in the data from where the other run goes back to."""
    read = Batches.__getitem__

    def altered(self: Batches, number: int) -> dict[str, torch.Tensor]:
        batch = read(self, number + ahead if number >= BACK else number)
        if not ahead and number == SPIKE:
            batch = {name: torch.full_like(tokens, 3) for name, tokens in batch.items()}
        return batch

    Batches.__getitem__ = altered  # type: ignore[method-assign]
    try:
        train(RunDir(run).read_recipe(), connect())
    finally:
        Batches.__getitem__ = read  # type: ignore[method-assign]


def test_ranks_go_back_together_and_around_the_batches_of_a_spike(pool: Pool, tmp_path: Path) -> None:
    words = random.Random(0).choices(["ship", "harbour", "sails", "wind"], k=2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(here=tmp_path))
    states = []
    for name, ahead, factor in (("spikes", 0, 3), ("without", SPIKE + 2 - BACK, 0)):
        run = tmp_path / name
        prepare(recipe, sets=[f"run.dir={run}", f"run.spike_factor={factor}"])
        pool.run(_train, 2, run, ahead)
        found = newest(run / "checkpoints")
        assert found is not None
        assert found.step == 9
        assert found.facts["spikes"]["skipped_batches"] == ([] if ahead else [[BACK, SPIKE + 2]])
        states.append(found.read())
    ours, theirs = states
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
