"""Engines that are made and dropped in one process leak nothing, and do not disturb each other."""

import gc
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from plait.parallel.pipeline.executor import Pipeline
from support import programs, trainings
from support.pool import Pool

_FIRST, _ENGINES = 4, 20
_ENDING_THREADS = 2  # those of the last engine's files may not have ended yet
_MAX_GROWTH_BYTES = 6 << 20  # the heap's own noise; the states of one of these engines are 4 MB


def _counts() -> dict[str, int]:
    """Counts that a leak increases: process groups, threads, open files, mapped segments."""
    process = Path("/proc/self")
    return {
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len([*(process / "task").iterdir()]),
        "files": len([*(process / "fd").iterdir()]),
        "segments": (process / "maps").read_text().count("memfd:"),
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _made_and_dropped(plan: str, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    """Counts after the first engines and after all, and the growth of memory between."""
    first, first_bytes = {}, 0
    for number in range(_ENGINES):
        engine = trainings.engine_of(plan, programs.wide_llama, **options)
        engine.step(programs.share_of(programs.batches(1)[0], engine))
        del engine
        gc.collect()
        if number == _FIRST:
            first, first_bytes = _counts(), _resident_bytes()
    return first, _counts(), _resident_bytes() - first_bytes


@pytest.mark.parametrize(
    ("transport", "plan"),
    [
        ("host", "dp=2 zero=3 micro=2"),
        ("gloo", "dp=2 zero=2 micro=2 reduce=int8"),
        ("gloo", "pp=2 micro=2"),
        ("host", "dp=2 zero=1 offload=disk"),
    ],
)
def test_twenty_engines_in_one_process_leak_nothing(
    workers: Pool, transport: str, plan: str, tmp_path: Any
) -> None:
    options = {"offload_dir": tmp_path} if "disk" in plan else {}
    for first, last, growth in workers.over(transport).run(_made_and_dropped, 2, plan, options):
        threads = last.pop("threads") - first.pop("threads")
        assert threads <= _ENDING_THREADS
        assert last == first
        assert growth < _MAX_GROWTH_BYTES, growth


def _two_plans_in_turns() -> list[list[Any]]:
    """Losses of two engines that step in turns, the second made between two steps of the first."""
    batches = programs.batches(4)
    one = trainings.engine_of("dp=2 zero=3")
    losses: list[list[Any]] = [[one.step(programs.share_of(batches[0], one)).loss], []]
    other = trainings.engine_of("dp=2 zero=3")
    for batch in batches[1:]:
        losses[1].append(other.step(programs.share_of(batch, other)).loss)
        losses[0].append(one.step(programs.share_of(batch, one)).loss)
    return losses


def _alone(first: int) -> list[Any]:
    engine = trainings.engine_of("dp=2 zero=3")
    batches = programs.batches(4)
    return [engine.step(programs.share_of(batch, engine)).loss for batch in [*batches[first:]]]


def test_engines_that_step_in_turns_compute_what_each_computes_alone(workers: Pool) -> None:
    gloo = workers.over("gloo")
    [[one, other], _] = gloo.run(_two_plans_in_turns, 2)
    assert one == gloo.run(_alone, 2, 0)[0]
    assert other == gloo.run(_alone, 2, 1)[0]


def _after_an_interruption(fails: bool) -> tuple[int, float]:
    """The connections that the second engine adds, and its loss."""
    engine = trainings.engine_of("pp=2 micro=2")
    world, batch = engine.world, programs.share_of(programs.batches(1)[0], engine)
    if fails:
        raising = mock.patch.object(Pipeline, "run", side_effect=ZeroDivisionError)
        with raising, pytest.raises(ZeroDivisionError):
            engine.step(batch)
    before = len(world._transports)
    later = trainings.engine_of("pp=2 micro=2")
    return len(world._transports) - before, later.step(batch).loss


def test_an_engine_after_an_interrupted_pipeline_has_connections_of_its_own(workers: Pool) -> None:
    gloo = workers.over("gloo")
    (added, loss), _ = gloo.run(_after_an_interruption, 2, True)
    (kept, expected), _ = gloo.run(_after_an_interruption, 2, False)
    assert added > kept == 0
    assert loss == expected
