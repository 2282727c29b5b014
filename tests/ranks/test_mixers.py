"""State-space and recurrent mixers, sharded by channels or heads, compute what one process computes."""

from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
from torch import Tensor

from plait.parallel.tensor import functional
from plait.plan import Plan
from support import hf_models, mixer_configs, programs
from support.pool import Pool, RankError

STEPS = 2
WITH_EXPERTS = {"lfm2_moe", "jamba", "granitemoehybrid", "nemotron_h", "qwen3_next", "kimi_linear"}
LINEAR_BETWEEN_BLOCKS = {"zamba", "zamba2"}


def check_parity(pool: Pool, family: str, plan: str) -> None:
    task = programs.Task(hf_models.builder(family), steps=STEPS)
    ours = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, f"{plan} precision=fp64")[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.sweep), 4])
@pytest.mark.parametrize("family", mixer_configs.CONFIGS)
def test_columns_train_as_one_process(pool: Pool, family: str, tp: int) -> None:
    check_parity(pool, family, f"tp={tp}")


@pytest.mark.parametrize("family", sorted({*mixer_configs.CONFIGS} - WITH_EXPERTS - LINEAR_BETWEEN_BLOCKS))
def test_columns_of_sharded_tokens_train_as_one_process(pool: Pool, family: str) -> None:
    check_parity(pool, family, "tp=3 sp=true")


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("lfm2", "tp=2x2 sp=true recompute=full"),
        ("mamba", "dp=2 tp=2 zero=3 sp=true recompute=full"),
        ("bamba", "pp=2 dp=2 tp=2 zero=1 micro=3"),
        ("qwen3_5_text", "pp=2 tp=2 micro=3 schedule=gpipe"),
    ],
)
def test_with_other_parallelism_columns_train_as_one_process(pool: Pool, family: str, plan: str) -> None:
    check_parity(pool, family, plan)


def _changed(family: str, plan: str, path: str, change: Any) -> programs.Trace:
    with mock.patch(path, change):
        return programs.train_task(programs.Task(hf_models.builder(family), steps=1), plan)


def _unsummed(y: Any, *_: Any) -> Any:
    return y


@pytest.mark.parametrize(
    ("family", "path", "change"),
    [
        ("mamba", "plait.parallel.tensor.linear.copy_ranges_to_group", _unsummed),
        ("mamba2", "plait.parallel.tensor.functional.gather_summed", functional.gather),
        ("bamba", "plait.parallel.tensor.norm.differentiable_all_reduce", _unsummed),
    ],
)
def test_gradients_differ_without_the_sums(pool: Pool, family: str, path: str, change: Any) -> None:
    ours = pool.run(_changed, 2, family, "tp=2 precision=fp64", path, change)[0]
    task = programs.Task(hf_models.builder(family), steps=1)
    with pytest.raises(AssertionError, match="differs by"):
        programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def _kernel(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a fused kernel reads the weights of several layers")


FUSED = {"mamba": "mamba_inner_fn", "mamba2": "mamba2_split_conv1d_scan_combined"}


@pytest.mark.parametrize("family", FUSED)
def test_fused_kernels_that_leave_out_sums_are_not_called(pool: Pool, family: str) -> None:
    path = f"transformers.models.{family}.modeling_{family}.{FUSED[family]}"
    pool.run(_changed, 2, family, "tp=2 precision=fp64", path, _kernel)
    with pytest.raises(RankError, match="reads the weights"):
        pool.run(_changed, 1, family, "tp=1 precision=fp64", path, _kernel)


def _saved(family: str, plan: str, folder: Path) -> dict[str, Tensor]:
    engine = programs.engine_of(programs.Task(hf_models.builder(family)), plan)
    first, second = programs.batches(2)
    engine.step(programs.share_of(first, engine))
    engine.save(folder)
    engine.step(programs.share_of(second, engine))
    return engine.full_parameters()


def _resumed(family: str, plan: str, checkpoint: Path) -> dict[str, Tensor]:
    engine = programs.engine_of(programs.Task(hf_models.builder(family)), plan, seed=99)
    engine.load(checkpoint)
    engine.step(programs.share_of(programs.batches(2)[1], engine))
    return engine.full_parameters()


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_a_checkpoint_resumes_on_other_numbers_of_columns(pool: Pool, tmp_path: Path, family: str) -> None:
    """Parts of unequal width, and what every column has whole, are put together and taken apart again."""
    expected = pool.run(_saved, 2, family, "tp=2 precision=fp64", tmp_path)[0]
    for plan in ("tp=1", "tp=3", "tp=4 zero=1"):
        ranks = Plan.parse(plan).num_ranks
        found = pool.run(_resumed, ranks, family, f"{plan} precision=fp64", tmp_path / "step-00000001")[0]
        difference, name = programs.largest_difference(found, expected)
        assert difference < 1e-9, (plan, name)
