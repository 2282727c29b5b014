"""Dropout of attention over ranks: the same pairs for every degree and method, those of one process that
computes with a mask of all pairs."""

import functools
import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from plait.models.attention import AttentionCall, attention_by, dispatch_attention
from plait.models.mask_decisions import install_decisions
from plait.parallel.context.dropout import Dropout, DropoutStream
from plait.plan import Plan
from support import hf_models, programs
from support.compilers import compiles
from support.pool import Pool

RATES = {
    "gpt2": {"attn_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},  # two kv heads for four heads
    "gemma2": {"attention_dropout": 0.2},  # soft caps, windows
}

ALL = slice(None)


def task_of(family: str, **options: Any) -> programs.Task:
    data = functools.partial(programs.batches, sequences=2, length=21)
    build = functools.partial(hf_models.model_of, family, **(RATES[family] | options))
    return programs.Task(build, data, steps=2, own_loss=True)


class _Eager:
    """Attention with a mask of all pairs of tokens."""

    def __init__(self, stream: DropoutStream) -> None:
        self._stream = stream

    def attend(self, call: AttentionCall) -> Tensor:
        k, v = (t.repeat_interleave(call.q.shape[1] // t.shape[1], 1) for t in (call.k, call.v))
        at = torch.arange(call.q.shape[2])
        distance, before = at[:, None] - at, call.rule.before
        s_BHQN = call.q @ k.mT * (call.q.shape[-1] ** -0.5 if call.scale is None else call.scale)
        s_BHQN = s_BHQN if call.softcap is None else call.softcap * torch.tanh(s_BHQN / call.softcap)
        hidden = (distance < 0) | (distance >= (len(at) if before is None else before))
        p_BHQN = s_BHQN.masked_fill(hidden, -torch.inf).softmax(-1)
        size_B, size_H = call.q.shape[:2]
        indices = torch.arange(size_B), torch.arange(size_H), at, at
        dropout = Dropout(call.dropout, self._stream.draw(), *indices)
        return p_BHQN * dropout.factors(ALL, ALL, p_BHQN.dtype) @ v


def _drop_in_one_process(model: nn.Module) -> None:
    dispatch_attention(model)
    install_decisions()
    stream, steps, forward = DropoutStream({}), itertools.count(), model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        stream.seed(3, next(steps), 0, 0)  # the seed, the step, the micro-batch, the data rank
        with attention_by(_Eager(stream)):
            return forward(*args, **kwargs)

    model.train().forward = run


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "cp=2"),
        ("gpt2", "cp=2 cp_method=ring zero=1"),
        ("gpt2", "cp=2 cp_method=ulysses recompute=full"),
        ("gpt2", "cp=3 zero=3 recompute=full"),
        ("gpt2", "cp=4 cp_method=2x2 recompute=selective"),
        ("llama", "cp=2 tp=2 sp=true"),
        ("llama", "cp=3 cp_method=ring recompute=every=2"),
        ("llama", "cp=2 tp=2 cp_method=ulysses recompute=full"),
        ("gemma2", "cp=2"),
        ("gemma2", "cp=2 cp_method=ulysses"),
    ],
)
def test_every_degree_and_method_drops_the_pairs_of_one_process(pool: Pool, family: str, words: str) -> None:
    task, plan = task_of(family), f"{words} precision=fp64"
    ours, *others = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, plan)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    reference = replace(task, prepare=_drop_in_one_process)
    programs.assert_same(ours, programs.one_process_task(reference, ours.first_weights, 1))
    without = programs.one_process_task(
        task_of(family, **dict.fromkeys(RATES[family], 0.0)), ours.first_weights, 1
    )
    assert abs(ours.losses[0] / without.losses[0] - 1) > 1e-6


def _compiled(task: programs.Task, plan: str) -> programs.Trace:
    with compiles(in_cpp=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch.compile does not trace the test's float64 mode
        return programs.train_task(task, plan)


def test_compiled_blocks_drop_the_same_pairs(pool: Pool) -> None:
    task, plan = task_of("gpt2"), "cp=2 compile=true recompute=full precision=fp64"
    ours, _ = pool.run(_compiled, 2, task, plan, timeout_s=240.0)
    reference = replace(task, prepare=_drop_in_one_process)
    programs.assert_same(ours, programs.one_process_task(reference, ours.first_weights, 1))


def _seeds(plan: str) -> tuple[int, list[int]]:
    """The data rank, and the seeds of two steps."""
    drawn: list[int] = []

    def draw(stream: DropoutStream) -> int:
        drawn.append(original(stream))
        return drawn[-1]

    original, task = DropoutStream.draw, task_of("gpt2")
    with mock.patch.object(DropoutStream, "draw", draw):
        engine = programs.engine_of(task, f"{plan} precision=fp64")
        for batch in programs.batches(2, sequences=4, length=12):
            engine.step(programs.share_of(batch, engine))
    return engine.data_rank, drawn


def test_seeds_differ_by_step_micro_batch_layer_stage_and_data_rank_alone(pool: Pool) -> None:
    by_data_rank: dict[int, list[int]] = {}
    for data_rank, drawn in pool.run(_seeds, 4, "dp=2 cp=2 micro=2"):
        assert len({*drawn}) == len(drawn) == 2 * 2 * 2  # steps, micro-batches, layers
        assert by_data_rank.setdefault(data_rank, drawn) == drawn
    assert {*by_data_rank[0]}.isdisjoint(by_data_rank[1])
    stages = [drawn for _, drawn in pool.run(_seeds, 4, "cp=2 pp=2 micro=2")]
    assert stages[0] == stages[1] != stages[2] == stages[3]
    assert len({*stages[0], *stages[2]}) == 2 * 2 * 2


def test_a_recomputed_block_draws_the_seeds_of_its_forward(pool: Pool) -> None:
    for _, drawn in pool.run(_seeds, 2, "cp=2 micro=2 recompute=full"):
        passes = [drawn[at : at + 4] for at in range(0, len(drawn), 4)]  # two layers, forward and backward
        assert [one[2:] for one in passes] == [one[1::-1] for one in passes]


def _evaluated(rate: float) -> list[float]:
    task = task_of("gpt2", attn_pdrop=rate)
    engine = programs.engine_of(task, "cp=2 precision=fp64")
    (batch,) = task.data(1)
    result = engine.evaluate(programs.share_of(batch, engine))
    return [result.loss_sum, float(engine.outputs(batch, lambda outputs: outputs.logits).sum())]


def test_evaluation_drops_nothing(pool: Pool) -> None:
    assert pool.run(_evaluated, 2, 0.3) == pool.run(_evaluated, 2, 0.0)


def _resumed(folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the second step: after the first, and after its checkpoint."""
    task = task_of("gpt2")
    first, second = task.data(2)
    plan = "cp=2 zero=1 precision=fp64"
    engine = programs.engine_of(task, plan)
    engine.step(first)
    path = engine.save(folder)
    expected = engine.step(second)
    resumed = programs.engine_of(task, plan)
    resumed.load(path)
    found = resumed.step(second)
    return [found.loss, found.grad_norm], [expected.loss, expected.grad_norm]


def test_a_resumed_run_drops_the_same_pairs(pool: Pool, tmp_path: Path) -> None:
    for found, expected in pool.run(_resumed, 2, tmp_path):
        assert found == expected
