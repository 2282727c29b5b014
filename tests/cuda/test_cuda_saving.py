"""Background saves on CUDA ranks copy the state during the next forward and backward."""

import tempfile
import threading
from pathlib import Path

import pytest

import plait
from plait.checkpoint import Saver
from plait.comm import connect
from support import programs
from support.pool import Pool
from support.virtual_cuda.races import Findings
from support.virtual_cuda.recording import recorded

_STEPS = 3


def _save_during_a_step(plan: str, folder: str, waiting: str) -> Findings | None:
    """Save in the background between two steps; return the findings of the save and the step. `waiting`: what
    waits for the copy, `all`, `update` or `nothing`."""
    world = connect(device="cuda", timeout_s=40)
    engine = plait.parallelize(
        programs.llama(exact=False), plan, seed=3, world=world, optimizer_args=programs.ADAMW
    )
    first, *_, last = [
        {key: value.to(world.device) for key, value in programs.share_of(batch, engine).items()}
        for batch in programs.batches(_STEPS)
    ]
    engine.step(first)
    saver = Saver(folder, world, background=True)
    saver.save(0, engine.state_shards(), {})  # makes the staging memory
    saver.finish()
    ended = threading.Event()  # only then does the thread wait for the copy on the host
    saver._wait_for_directory = lambda _: ended.wait(20)  # type: ignore[method-assign, assignment]
    with recorded() as recording:
        update_after = {"all": None, "update": engine.update_after, "nothing": lambda _: None}[waiting]
        saver.save(1, engine.state_shards(), {}, update_after=update_after)
        engine.step(last)
    ended.set()
    saver.finish()
    world.close()
    return None if recording is None else recording.findings


@pytest.mark.parametrize("plan", ["dp=2 zero=1 precision=bf16", "dp=2 zero=3"])
@pytest.mark.parametrize("waiting", ["all", "update", "nothing"])
def test_the_update_waits_for_the_copy_of_a_background_save(pool: Pool, plan: str, waiting: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(_save_during_a_step, 2, plan, folder, waiting)
        assert len(list(Path(folder).glob("step-*"))) == 2
    for findings in found:
        if findings is not None:
            assert bool(findings.races) == (waiting == "nothing")
            in_copy = [text for text in findings.syncs if "checkpoint/saver.py" in text]
            assert len(in_copy) == 1, in_copy  # the number of the directory
