"""Parameters that are one memory for the ranks of a host: who writes them when, and when it is free again."""

import gc
import time
from typing import Any

import pytest
import torch

import plait
from plait.comm import connect
from support import programs
from support.pool import Pool


def _state_of(engine: plait.Engine) -> dict[str, torch.Tensor]:
    """The full state as a rank would read it from a file, on every rank."""
    found = [engine.state()]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def _loads_while_another_reads() -> bool:
    engine = programs.engine_of(programs.Task(programs.llama), "dp=2 zero=1 precision=fp32")
    batches = [programs.share_of(batch, engine) for batch in programs.batches(2)]
    state = _state_of(engine)
    engine.step(batches[0])
    if engine.world.rank == 0:
        with torch.no_grad():
            before = engine.model(batches[1]["input_ids"])
            time.sleep(0.5)  # the other rank is loading by now
            after = engine.model(batches[1]["input_ids"])
        unchanged = torch.equal(_first(before), _first(after))
        engine.load_state(state)
        with torch.no_grad():
            loaded = engine.model(batches[1]["input_ids"])
        return unchanged and not torch.equal(_first(after), _first(loaded))
    engine.load_state(state)
    return True


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def test_loaded_weights_wait_for_ranks_that_still_read_the_old_ones(pool: Pool) -> None:
    assert pool.run(_loads_while_another_reads, 2) == [True, True]


def _dropped(plan: str) -> list[int]:
    """Bytes of the arena in use while an engine lives, and when several have come and gone."""
    world = connect()
    used = []
    for _ in range(3):
        engine = programs.engine_of(programs.Task(programs.llama), plan)
        engine.step(programs.share_of(programs.batches(1)[0], engine))
        used.append(world._host_peers.arena.used_bytes)
        del engine
        gc.collect()
    return [*used, world._host_peers.arena.used_bytes]


@pytest.mark.parametrize("words", ["zero=0", "zero=1", "zero=3 micro=3"])
def test_the_memory_of_a_dropped_engine_comes_back(pool: Pool, words: str) -> None:
    for *used, left in pool.run(_dropped, 2, f"dp=2 {words} precision=bf16"):
        assert used[0] > 0
        assert used == [used[0]] * 3
        assert left == 0


def _looks_between(plan: str) -> tuple[list[float], list[float]]:
    """Losses of steps with a look at whole weights between backward and update, and without."""
    losses = []
    for looks in (True, False):
        engine = programs.engine_of(programs.Task(programs.llama), plan)
        found = []
        for batch in programs.batches(3):
            share = programs.share_of(batch, engine)
            outputs = engine.model(share["input_ids"])
            loss, num_targets = programs.summed_loss(outputs, share)
            engine.backward(loss, num_targets)
            if looks:
                engine.full_parameters()
                engine.state()
            found.append(engine.update().loss)
        losses.append(found)
    return losses[0], losses[1]


@pytest.mark.parametrize(
    "words", ["zero=1 reduce=int8", "zero=1", "zero=2 algorithm=ring", "zero=3 reduce=powersgd"]
)
def test_a_look_at_weights_while_gradients_travel_changes_nothing(pool: Pool, words: str) -> None:
    for looking, plain in pool.run(_looks_between, 2, f"dp=2 {words} precision=fp32"):
        assert looking == plain
