"""A run in which one rank's copy of a weight is no longer the others' ends, and says whose."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait import checkpoint
from plait.comm import connect
from plait.engine.engine import Engine
from plait.errors import RunError
from plait.train.prepare import prepare
from plait.train.run_dir import RunDir
from plait.train.trainer import train
from support.cli_runs import write_recipe
from support.pool import Pool

HOW = ("run.steps=6", "run.checkpoint_every=1", "run.evaluate_every=0", "sample.tokens=0")


def _train_with_a_bit_changed_in_step_3(run: Path) -> str:
    world, step = connect(), Engine.step

    def faulty(engine: Engine, batch: Any) -> Any:
        result = step(engine, batch)
        if engine.num_steps == 3 and world.rank == 1:
            next(engine.model.parameters()).data.view(torch.int32)[0] ^= 1
        return result

    with mock.patch.object(Engine, "step", faulty):
        try:
            train(RunDir(run).read_recipe(), world)
        except RunError as error:
            return error.message()
    return "finished"


@pytest.mark.parametrize(("every", "last", "said"), [(4, 2, "RunError: copies of"), (0, 6, "finished")])
def test_a_run_ends_where_it_looks_at_replicas_that_differ_before_it_saves_them(
    pool: Pool, tmp_path: Path, every: int, last: int, said: str
) -> None:
    sets = [*HOW, f"run.check_replicas_every={every}"]
    run = prepare(write_recipe(tmp_path), sets=sets).dir.path
    messages = pool.run(_train_with_a_bit_changed_in_step_3, 2, run)
    assert messages == [messages[0]] * 2
    assert messages[0].startswith(said)
    if every:
        assert "different bits on rank 1 (replicate=1) than on rank 0 (replicate=0)" in messages[0]
    assert checkpoint.steps(RunDir(run).checkpoints)[-1].name.endswith(str(last))
