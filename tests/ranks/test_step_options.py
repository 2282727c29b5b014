"""Options of a step: clipping by value is as torch has it, recompute and compile change no number."""

from typing import Any

import pytest

from plait.errors import ConfigError
from support import programs
from support.compilers import compiles
from support.pool import Pool
from support.programs import Task
from support.trainings import engine_of, train

# --- clipping by value


@pytest.mark.parametrize(
    "words", ["dp=2 zero=0", "dp=2 zero=0 micro=3", "dp=2 zero=3 micro=3", "dp=2 zero=3 offload=cpu"]
)
def test_clipping_by_value_is_torchs(pool: Pool, words: str) -> None:
    task = Task(
        programs.llama,
        clip_norm=None,
        clip_value=2e-3,
    )
    ours = pool.run(programs.train_task, 2, task, f"{words} precision=fp64")[0]
    oracle = programs.one_process_task(task, ours.first_weights, micros=2)
    programs.assert_same(ours, oracle)
    clipped = [float((g.abs() == 2e-3).double().mean()) for g in oracle.gradients[0].values()]
    assert 0.01 < max(clipped) < 1.0, "clipping was not active"


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_is_by_norm_or_by_value(stage: int) -> None:
    with pytest.raises(ConfigError, match="clip_norm and clip_value") as caught:
        engine_of(f"zero={stage}", clip_norm=1.0, clip_value=0.5)
    assert "clip_norm=1.0 and clip_value=0.5" in str(caught.value)


# --- recompute and compile on ranks


@pytest.mark.parametrize("how", ["full", "selective", "every=2"])
@pytest.mark.parametrize("words", ["dp=2 zero=3", "dp=2 zero=3 micro=3 prefetch=2 accumulate=unsharded"])
def test_recompute_at_stage_3_changes_no_number(pool: Pool, words: str, how: str) -> None:
    plan = f"{words} precision=fp64"
    plain = pool.run(programs.train, 2, programs.llama, plan)[0]
    recomputed = pool.run(programs.train, 2, programs.llama, f"{plan} recompute={how}")[0]
    programs.assert_same(recomputed, plain, tolerance=1e-12)


def _trained(plans: list[str], *, in_cpp: bool = False) -> Any:
    """In one run for all plans: what is compiled for the first is found again."""
    found = []
    for plan in plans:
        with compiles(in_cpp=in_cpp):
            engine = engine_of(plan)
            found.append((train(engine, last=2), engine.full_gradients(), engine.full_parameters()))
    return found


@pytest.mark.parametrize(
    ("how", "in_cpp"),
    [("none", True), ("full", False), pytest.param("full", True, marks=pytest.mark.sweep)],
)
def test_compiled_blocks_train_as_uncompiled_ones_at_every_stage(pool: Pool, how: str, in_cpp: bool) -> None:
    plans = [f"dp=2 zero={stage} recompute={how}" for stage in (0, 1, 3)]
    if in_cpp:  # once for both ranks
        first = [f"micro=2 recompute={how} compile=true"]
        pool.run(_trained, 1, first, in_cpp=True, timeout_s=240.0)
    compiled = [f"{plan} compile=true" for plan in plans]
    found = pool.run(_trained, 2, compiled, in_cpp=in_cpp, timeout_s=240.0)[0]
    for (results, gradients, weights), (plain, *tensors) in zip(
        found, pool.run(_trained, 2, plans)[0], strict=True
    ):
        for mine, theirs in zip(results, plain, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert programs.largest_difference(gradients, tensors[0])[0] < 1e-5
        assert programs.largest_difference(weights, tensors[1])[0] < 1e-5
