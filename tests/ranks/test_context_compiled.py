"""Compiled blocks whose attention is over ranks: the numbers of one process, in parts that layers share."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from plait.models.attention import UNCOMPILED
from plait.plan import Plan
from support import hf_models, pipeline_plans, programs
from support.compilers import compiles
from support.pool import Pool


@contextmanager
def _compiling(*, in_cpp: bool = False) -> Iterator[list[str]]:
    """Yield a list that is filled with the warnings of compiled code."""
    messages: list[str] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with compiles(in_cpp=in_cpp), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    messages += [text for each in found if "compile" in (text := str(each.message))]


def _trained(task: programs.Task, plan: str, in_cpp: bool) -> tuple[programs.Trace, int, bool, list[str]]:
    """The trace, the number of graphs, whether attention was between them, and warnings."""
    counters = torch._dynamo.utils.counters
    with _compiling(in_cpp=in_cpp) as messages:
        trace = programs.train_task(task, plan)
    breaks = any(UNCOMPILED in reason for reason in counters["graph_break"])
    return trace, counters["stats"]["unique_graphs"], breaks, messages


def _llama() -> programs.Task:
    return replace(pipeline_plans.task("llama", 3, 4), own_loss=True)


def _mistral() -> programs.Task:
    data = functools.partial(programs.batches, sequences=2, length=21)
    return programs.Task(hf_models.builder("mistral"), data, steps=2, own_loss=True)


TASKS = {"llama": _llama, "mistral": _mistral}


@pytest.mark.parametrize(
    ("family", "words", "in_cpp"),
    [
        ("llama", "cp=2 zero=1", True),
        ("llama", "cp=2 cp_method=ring recompute=full", False),
        ("llama", "cp=2 cp_method=ulysses zero=3", False),
        ("llama", "cp=2 tp=2 recompute=full", False),
        ("mistral", "cp=2 recompute=every=2", False),
        pytest.param("llama", "cp=4 cp_method=2x2", False, marks=pytest.mark.sweep),
        pytest.param("mistral", "cp=2 cp_method=ulysses tp=2 sp=true", False, marks=pytest.mark.sweep),
    ],
)
def test_compiled_blocks_train_as_in_one_process(pool: Pool, family: str, words: str, in_cpp: bool) -> None:
    """Without a warning: attention between two graphs is what `cp` means."""
    task = TASKS[family]()
    plan = f"{words} compile=true precision=fp64"
    found = pool.run(_trained, Plan.parse(plan).num_ranks, task, plan, in_cpp, timeout_s=240.0)
    ours = found[0][0]
    for trace, num_graphs, breaks, messages in found:
        assert (trace.losses, trace.norms) == (ours.losses, ours.norms)
        assert breaks
        if family == "llama":  # others are in float64 by a mode that torch.compile does not trace
            assert 3 <= num_graphs <= 8, "three layers have graphs of their own"
            assert messages == []
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def _forgetful(plan: str) -> list[float]:
    """Losses and gradient norms; one rank compiles again in each step, and in the middle of a forward."""
    with _compiling():
        engine = programs.engine_of(_llama(), plan)
        if engine.world.rank == 1:
            middle = engine.model.get_submodule("model.layers.1")
            middle.register_forward_pre_hook(lambda *_: torch._dynamo.reset())
        results = [engine.step(programs.share_of(batch, engine)) for batch in _llama().data(2)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_a_rank_that_compiles_again_makes_the_same_calls(pool: Pool, method: str) -> None:
    words = f"cp=2 cp_method={method} compile=true recompute=full precision=fp64"
    ours, other = pool.run(_forgetful, 2, words, timeout_s=240.0)
    assert ours == other
    trace, *_ = pool.run(programs.train_task, 2, _llama(), words.replace(" compile=true", ""))
    expected = [number for pair in zip(trace.losses, trace.norms, strict=True) for number in pair]
    assert ours == pytest.approx(expected[:4], rel=1e-9)
