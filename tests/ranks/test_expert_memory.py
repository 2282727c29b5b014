"""Memory of ranks with some of the experts: estimates, and a mixture that only several ranks can train."""

import functools
import resource
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.engine.engine import Engine
from plait.errors import ModelError
from plait.plan import Plan
from support import hf_models, programs, routed_experts
from support.pool import Pool

WIDE = {"intermediate_size": 8192, "num_hidden_layers": 7}  # 500 MB of experts with their states
MORE_BYTES = 300 << 20  # that a rank may take besides its own before


def _task(routing: str) -> programs.Task:
    build = functools.partial(
        routed_experts.model_with, routing, exact=False, experts_implementation="grouped_mm"
    )
    return programs.Task(build, own_loss=True, steps=2)


def _used(routing: str, words: str) -> tuple[int, int | None, int, int | None]:
    """Bytes of a rank, and of its activations: estimated before and measured in the second step."""
    engine = programs.engine_of(_task(routing), f"{words} precision=fp32")
    batches = [programs.share_of(each, engine) for each in programs.batches(2)]
    estimated = engine.estimated_memory(tuple(batches[0]["input_ids"].shape))
    for batch in batches:
        engine.step(batch)
    measured = engine.memory()
    return estimated.total, estimated.activations, measured.total, measured.activations


@pytest.mark.parametrize("words", ["dp=2 ep=2 zero=1", "dp=4 ep=4 zero=3", "dp=4 ep=2 zero=2"])
def test_memory_under_even_routing_is_as_estimated(pool: Pool, words: str) -> None:
    for estimated, _, measured, kept in pool.run(_used, Plan.parse(words).num_ranks, "balanced", words):
        assert kept
        assert measured == pytest.approx(estimated, rel=0.05)


def _engine(words: str, **sizes: Any) -> Engine:
    model = hf_models.model_of("mixtral", exact=False, **sizes)
    return plait.parallelize(model, f"{words} precision=fp32", seed=3)


def _loss_in_little_memory(words: str) -> float | None:
    """The loss of a step; None: out of memory. Data of a process: private, writable memory."""
    now = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MORE_BYTES, before[1]))
    try:
        engine = _engine(words, **WIDE)
        (batch,) = programs.batches(1)
        return engine.step(programs.share_of(batch, engine)).loss
    except (RuntimeError, ModelError) as error:
        if "can't allocate memory" not in str(error):
            raise
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _losses_in_little_memory(words: str) -> list[float | None]:
    """Those of ranks that have run nothing before: memory that earlier tests freed would be used first."""
    own = Pool()
    try:
        return own.run(_loss_in_little_memory, Plan.parse(words).num_ranks, words)
    finally:
        own.close()


def test_experts_too_large_for_one_rank_train_on_four() -> None:
    assert _losses_in_little_memory("dp=1") == [None]
    losses = _losses_in_little_memory("dp=4 ep=4")
    assert len({*losses}) == 1
    assert losses[0] is not None
