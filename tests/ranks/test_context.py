"""Context parallelism: the one-process program's numbers, for every method, mask and mix."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.plan import Plan, context
from plait.plan.context import Interval, TokenOrder
from support import hf_models, pipeline_plans, programs
from support.pool import Pool

PLANS = (
    "cp=2 zero=1",
    "cp=2 cp_method=ulysses",
    "cp=4 zero=2",
    "cp=3 zero=1 recompute=full",
    "cp=2 dp=2 zero=3",
    "cp=2 dp=2 zero=1 shard=1",
    "cp=2 pp=2 micro=2 schedule=zb-h1",
    "cp=2 tp=2 sp=true",
    "cp=2 tp=2x2 cp_method=ulysses",
    "cp=3 cp_method=ring zero=1 recompute=full",
    "cp=4 cp_method=2x2 zero=3",
    "cp=2 dp=2 tp=2 cp_method=ring pp=1",
)
FAMILIES = (
    "gpt2",
    "gemma2",
    "mistral",
    "opt",
    "gpt_neox",
    "phi",
    "mixtral",
    "deepseek_v3",
    "one_kv_llama",
    "qwen3",
    "gpt_oss",
)


@pytest.mark.parametrize("words", PLANS)
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, words: str) -> None:
    task = replace(pipeline_plans.task("llama", 3, 4), own_loss=True)
    programs.check_parity(pool, task, f"{words} precision=fp64")


@pytest.mark.parametrize("method", ["allgather", "ulysses", "ring", "2x2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_as_in_one_process(pool: Pool, family: str, method: str) -> None:
    data = functools.partial(programs.batches, sequences=2, length=21)
    task = programs.Task(hf_models.builder(family), data, steps=2, own_loss=True)
    programs.check_parity(pool, task, f"cp={4 if method == '2x2' else 2} cp_method={method} precision=fp64")


LENGTHS = ((5, 1, 6, 9, 3), (24,), (11, 2, 11))
UNEVEN = ((5, 30, 13), (36, 12), (48,))  # of different work for ranks that have two runs


def packed(steps: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> list[dict[str, Tensor]]:
    """Rows of documents: boundaries inside runs and between them, a document of one token, one row of one."""
    found = programs.batches(steps, sequences=3, length=sum(lengths[0]))
    for batch in found:
        rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
        batch["position_ids"] = torch.stack(rows)
    return found


def _in_short_runs(task: programs.Task, plan: str) -> tuple[programs.Trace, Tensor, set[int]]:
    """Training, the logits before it, and the numbers of runs of a rank, where runs may have two tokens."""
    chunks, balanced = set(), TokenOrder.balanced

    def counted(order: TokenOrder, rows: Sequence[Sequence[Interval]]) -> TokenOrder:
        found = balanced(order, rows)
        chunks.add(found.num_runs)
        return found

    with mock.patch.object(context, "SHORTEST", 2), mock.patch.object(TokenOrder, "balanced", counted):
        engine = programs.engine_of(task, plan)
        share = programs.share_of(task.data(1)[0], engine)
        logits = engine.outputs(share, lambda outputs: outputs.logits)
        return programs.train_task(task, plan), logits, chunks


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    "words",
    [
        "cp=2 cp_method=allgather",
        "cp=3 cp_method=ring",
        "cp=4 cp_method=2x2",
        "cp=2 pp=2 micro=3 recompute=full",
    ],
)
def test_documents_in_many_runs_train_as_in_one_process(pool: Pool, family: str, words: str) -> None:
    """The number of runs that balances documents differs between micro-batches."""
    data = functools.partial(packed, lengths=UNEVEN)
    task = programs.Task(hf_models.builder(family), data, steps=2, own_loss=True)
    plan = Plan.parse(f"{words} precision=fp64")
    ours, logits, chunks = pool.run(_in_short_runs, plan.num_ranks, task, str(plan))[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))
    expected = pool.run(_in_short_runs, 1, task, "dp=1 precision=fp64")[0][1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert max(chunks) > 2
    assert plan.pp == 1 or len(chunks) > 1


def padded(steps: int) -> list[dict[str, Tensor]]:
    """Rows with padding on the left, on the right, and none; on the right it has targets, which one process
    counts, too."""
    found = programs.batches(steps, sequences=3, length=19)
    for batch in found:
        mask = torch.ones(3, 19, dtype=torch.long)
        mask[0, :7], mask[1, 12:] = 0, 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][0, :7] = -100
    return found


@pytest.mark.parametrize("data", [packed, padded], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "words",
    [
        "cp=2",
        "cp=3 cp_method=ulysses",
        "cp=3 cp_method=ring",
        "cp=4 cp_method=2x2",
        "cp=2 pp=2 micro=1 recompute=full",
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_documents_and_padding_are_those_of_one_process(
    pool: Pool, family: str, words: str, data: Callable[[int], list[dict[str, Tensor]]]
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}
    build = functools.partial(hf_models.model_of, family, **heads)
    programs.check_parity(pool, programs.Task(build, data, steps=2, own_loss=True), f"{words} precision=fp64")


def test_positions_are_those_that_a_model_counts_itself(pool: Pool) -> None:
    """OPT does not count padding."""
    task = programs.Task(hf_models.builder("opt"), padded, steps=2, own_loss=True)
    programs.check_parity(pool, task, "cp=2 precision=fp64")


def _asked(words: str) -> tuple[list[float], Tensor, str]:
    """Losses of an evaluation and of single passes, the logits, and the self-check's result."""
    task = replace(pipeline_plans.task("llama", 3, 4), own_loss=True)
    (batch,) = task.data(1)
    engine = programs.engine_of(replace(task, probe=batch), f"{words} precision=fp64")
    share = programs.share_of(batch, engine)
    evaluated = engine.evaluate(share)
    logits = engine.outputs(share, lambda outputs: outputs.logits)
    assert engine.probed is not None
    assert engine.probed.difference <= 1e-9
    losses = [evaluated.loss_sum, float(evaluated.num_tokens)]
    if engine.plan.pp == 1:
        engine.backward(*engine.loss(share))
        result = engine.update()
        losses += [result.loss, result.grad_norm, float(result.num_tokens)]
    return losses, logits, str(engine.probed)


@pytest.mark.parametrize(
    "words", ["cp=2 zero=1", "cp=2 cp_method=ulysses", "cp=4 cp_method=2x2", "cp=2 pp=2"]
)
def test_evaluation_outputs_and_self_check_are_of_complete_rows(pool: Pool, words: str) -> None:
    (expected, logits, _), *_ = pool.run(_asked, 1, "dp=1")
    for losses, own, _ in pool.run(_asked, Plan.parse(words).num_ranks, words):
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-12)
        torch.testing.assert_close(own, logits, rtol=0, atol=1e-12)
