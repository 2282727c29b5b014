"""compile=auto under plans of ranks: the numbers of one process, and one choice for all ranks."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

import plait
from plait.plan import Plan, compile_choice
from support import hf_models, pipeline_plans, programs
from support.changed_models import lora, task
from support.compilers import compiles
from support.pool import Pool


@contextmanager
def _choosing(*, in_cpp: bool = False, gain: float = -1e9) -> Iterator[None]:
    """Measure in runs of any length, with times in a folder of this rank. `gain`: what counts as one."""
    torch._dynamo.reset()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", XDG_CACHE_HOME=folder),
        mock.patch.object(compile_choice, "MIN_RUN_S", 0.0),
        mock.patch.object(compile_choice, "MIN_GAIN", gain),
        compiles(in_cpp=in_cpp),
    ):
        yield


def _trained(task: programs.Task, plan: str, in_cpp: bool) -> tuple[programs.Trace, bool]:
    """The trace, and whether code was compiled for it."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    with _choosing(in_cpp=in_cpp):
        trace = programs.train_task(task, plan)
    return trace, counters["stats"]["unique_graphs"] > 0


TASKS = {
    "llama": replace(pipeline_plans.task("llama", 4, 8), own_loss=True, steps=2),
    "lora": replace(task(lora, "llama"), steps=2),
    "mixtral": programs.Task(hf_models.builder("mixtral"), own_loss=True, steps=2),
}


@pytest.mark.parametrize(
    ("model", "words", "in_cpp"),
    [
        ("llama", "dp=2 zero=3 micro=2", True),
        ("llama", "dp=2 recompute=selective zero=1", False),
        ("llama", "tp=2 sp=true recompute=full", False),
        ("llama", "pp=2 micro=4 chunks=2", False),
        ("llama", "cp=2 zero=3", False),
        ("lora", "dp=2 zero=2 tp=2", False),
        ("mixtral", "dp=2 ep=2 zero=1", False),
        *(
            pytest.param("llama", words, in_cpp, marks=pytest.mark.sweep)
            for words in (
                "dp=2 zero=2 offload=cpu",
                "dp=2 tp=2 sp=true zero=3 recompute=selective",
                "dp=2 pp=2 micro=2 zero=1",
                "cp=2 tp=2 recompute=every=2",
                "tp=2x1 pp=2 micro=2",
            )
            for in_cpp in (False, True)
        ),
    ],
)
def test_blocks_that_auto_compiles_train_as_in_one_process(
    pool: Pool, model: str, words: str, in_cpp: bool
) -> None:
    trained, plan = TASKS[model], f"{words} compile=auto precision=fp64"
    found = pool.run(_trained, Plan.parse(plan).num_ranks, trained, plan, in_cpp, timeout_s=240.0)
    ours = found[0][0]
    for trace, is_compiled in found:
        assert is_compiled
        assert (trace.losses, trace.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, programs.one_process_task(trained, ours.first_weights, Plan.parse(plan).micro))


def _choice(plan: str, gains: tuple[float, ...], hidden: int = 32) -> tuple[str, bool, str, str]:
    """Return what this rank chose, the plan that it runs, and the choice's key. `gains`: by rank, what counts
    as one."""
    torch.manual_seed(0)
    model = programs.llama(on_meta=False, exact=False, hidden=hidden)
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, seed=3)
    ids = (torch.arange(64) % programs.VOCABULARY).view(4, 16)
    with _choosing(gain=gains[engine.world.rank]):
        engine.step(programs.share_of({"input_ids": ids, "labels": ids}, engine))
    choice = engine.compile_choice
    assert choice is not None
    return str(choice), choice.is_on, str(engine.plan), choice.key


@pytest.mark.parametrize("gains", [(-1e9, 1.0), (1.0, -1e9)])
def test_all_ranks_do_as_rank_0_has_measured(pool: Pool, gains: tuple[float, float]) -> None:
    ours, other = pool.run(_choice, 2, "dp=2 zero=3 compile=auto", gains)
    assert ours == other
    assert ours[1] == (gains[0] < 0)


@pytest.mark.parametrize("stages", ["0,2", "0,2,0"])
def test_ranks_without_blocks_do_as_those_with_blocks(pool: Pool, stages: str) -> None:
    """The first rank, which decides, has none; times of other models are not this one's."""
    ranks = stages.count(",") + 1
    plan = f"pp={ranks} micro=2 stages={stages} compile=auto"
    ours, *others = pool.run(_choice, ranks, plan, (-1e9,) * ranks)
    assert ours[1], ours[0]
    assert others == [ours] * (ranks - 1)
    wider = pool.run(_choice, ranks, plan, (1.0,) * ranks, 64)
    assert {key for *_, key in wider}.isdisjoint({ours[3]})


def _slow_blocks(plan: str) -> tuple[str, float]:
    """Return what this rank chose, and the processor time of its blocks in a step at least."""
    slow_s = 0.05

    def slow(*_: object) -> None:
        begin_s = time.process_time()
        while time.process_time() - begin_s < slow_s:
            pass

    model = programs.llama(on_meta=False, exact=False)
    for block in model.model.layers:  # type: ignore[union-attr]
        block.register_forward_pre_hook(slow)
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, seed=3)
    ids = (torch.arange(64) % programs.VOCABULARY).view(4, 16)
    with _choosing(gain=-1e9):
        engine.step(programs.share_of({"input_ids": ids, "labels": ids}, engine))
    assert engine.compile_choice is not None
    return str(engine.compile_choice), 2 * 2 * slow_s / torch.get_num_threads()


def test_the_times_are_those_of_the_slowest_rank(pool: Pool) -> None:
    (choice, least_s), _ = pool.run(_slow_blocks, 2, "pp=2 micro=2 stages=0,2 compile=auto")
    times = [float(word) for word in choice.replace(" s ", " ").split() if word[0].isdigit()]
    assert times[0] >= least_s, choice
    assert times[1] >= least_s, choice


def test_a_schedule_that_splits_backwards_is_not_compiled(pool: Pool) -> None:
    ours, other = pool.run(_choice, 2, "pp=2 micro=2 schedule=zb-h1 compile=auto", (0.0, 0.0))
    assert ours == other
    assert ours[0].startswith("off: schedule=zb-h1 splits backwards")
    assert "compile" not in ours[2]
