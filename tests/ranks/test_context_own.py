"""Context parallelism of modules of one's own: `plait.attention`, and a loss that is a sum over tokens."""

import functools
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.comm import connect
from plait.parallel import activation_checkpoint
from plait.plan import Plan
from support import own_context, programs
from support.pool import Pool, RankError


def check_parity(pool: Pool, words: str, task: programs.Task) -> None:
    plan = f"{words} precision=fp64"
    ours, *others = pool.run(programs.train_task, Plan.parse(plan).num_ranks, task, plan)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def task(data: Any = own_context.shifted, **options: Any) -> programs.Task:
    build = own_context.builder(**options)
    return programs.Task(build, data, steps=2, loss=own_context.summed_loss)


@pytest.mark.parametrize(
    "words",
    [
        "dp=1",
        "cp=2 zero=1",
        "cp=2 cp_method=ring recompute=full",
        "cp=2 cp_method=ulysses",
        "cp=3 zero=3",
        "cp=3 cp_method=ring recompute=selective",
        "cp=3 cp_method=ulysses recompute=full",
        "cp=4 cp_method=2x2 zero=2",
        "cp=2 pp=2 micro=2 recompute=full schedule=1f1b",
        "cp=2 dp=2 pp=2 micro=1 zero=1 schedule=zb-h1",
    ],
)
def test_a_module_of_ones_own_trains_as_in_one_process(pool: Pool, words: str) -> None:
    check_parity(pool, words, task(kv_heads=6 if "2x2" not in words else 2))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"kv_heads": 3, "window": 5},
    "softcap": {"kv_heads": 6, "softcap": 0.3, "scale": 0.7},
    "bidirectional": {"kv_heads": 6, "causal": False},
    "window on both sides": {"kv_heads": 3, "causal": False, "window": 4, "softcap": 2.0},
}


@pytest.mark.parametrize(
    "words", ["dp=1", "cp=3", "cp=3 cp_method=ring", "cp=3 cp_method=ulysses recompute=full"]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_attention_are_those_of_its_definition(pool: Pool, options: str, words: str) -> None:
    check_parity(pool, words, task(**OPTIONS[options]))


@pytest.mark.parametrize("given", [True, False], ids=["tensor plan", "derived"])
@pytest.mark.parametrize(
    "words",
    [
        "tp=2",
        "cp=2 tp=2",
        "cp=2 tp=2 sp=true cp_method=ulysses",
        "cp=2 tp=2 cp_method=ring",
        "cp=2 tp=2 pp=2 micro=2 zero=1 recompute=full",
    ],
)
def test_columns_have_their_own_heads(pool: Pool, words: str, given: bool) -> None:
    plan = own_context.TENSOR_PLAN if given else None
    check_parity(pool, words, replace(task(kv_heads=2, head=6, window=9, softcap=1.0), tensor_plan=plan))


@pytest.mark.parametrize(
    "words", ["dp=1", "pp=2 micro=1 recompute=full", "cp=3 cp_method=ring", "cp=2 recompute=full"]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("data", [own_context.packed, own_context.padded])
def test_documents_and_padding_are_those_of_the_definition(
    pool: Pool, data: Any, causal: bool, words: str
) -> None:
    check_parity(pool, words, task(data, kv_heads=3, causal=causal))


@pytest.mark.parametrize("words", ["cp=2", "cp=3 cp_method=ring", "cp=3 cp_method=ulysses pp=2 micro=1"])
def test_tokens_that_fill_up_a_rank_are_not_in_the_loss(pool: Pool, words: str) -> None:
    """Rows of 19 tokens, of which a loss counts all."""
    data = functools.partial(own_context.shifted, length=19)
    check_parity(pool, words, replace(task(data), loss=own_context.squares))


def _without_handler(given: programs.Task, plan: str) -> programs.Trace:
    with mock.patch.object(activation_checkpoint, "active_handler", return_value=None):
        return programs.train_task(given, plan)


def test_a_recomputed_block_needs_the_attention_of_its_micro_batch(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"CheckpointError|returned other values"):
        pool.run(_without_handler, 2, task(), "cp=2 recompute=full precision=fp64")


def _asked(words: str, data: Any) -> tuple[list[float], Tensor, str]:
    """The loss of an evaluation, the logits, and the self-check's result."""
    given = task(data, kv_heads=3)
    (batch,) = given.data(1)
    engine = programs.engine_of(replace(given, probe=batch), f"{words} precision=fp64")
    evaluated = engine.evaluate(batch)
    assert engine.probed is not None
    assert engine.probed.difference <= 1e-9
    return [evaluated.loss_sum, float(evaluated.num_tokens)], engine.outputs(batch), str(engine.probed)


@pytest.mark.parametrize("data", [own_context.packed, own_context.shifted])
@pytest.mark.parametrize("words", ["dp=1", "cp=2 zero=1", "cp=3 cp_method=ulysses"])
def test_evaluation_outputs_and_self_check_are_of_complete_rows(pool: Pool, words: str, data: Any) -> None:
    (expected, logits, _), *_ = pool.run(_asked, 1, "dp=1", data)
    for losses, own, _ in pool.run(_asked, Plan.parse(words).num_ranks, words, data):
        assert losses == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(own, logits, rtol=0, atol=1e-12)


def _on_hosts(sizes: list[int], given: programs.Task, plan: str) -> tuple[str, int | None, programs.Trace]:
    """Train as ranks of which a launcher says that so many share their host; with the method of `auto`."""
    rank = int(os.environ["RANK"])
    local = {"LOCAL_WORLD_SIZE": str(sizes[rank]), "LOCAL_RANK": str(rank % sizes[rank])}
    with mock.patch.dict(os.environ, local):
        return (
            programs.engine_of(given, plan).plan.cp_method,
            connect().host_size(),
            programs.train_task(given, plan),
        )


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        ([2, 2, 2, 2], "2x2"),
        ([4, 4, 4, 4], "allgather"),
        ([2, 2, 4, 4], "allgather"),
        ([1, 1, 1, 1], "allgather"),
    ],
)
def test_ranks_take_the_method_for_their_hosts(pool: Pool, sizes: list[int], method: str) -> None:
    given = task(kv_heads=2)
    results = pool.run(_on_hosts, 4, sizes, given, "cp=4 zero=1 precision=fp64")
    assert {taken for taken, _, _ in results} == {method}
    assert {size for _, size, _ in results} == {sizes[0] if len({*sizes}) == 1 else None}
    ours = results[0][2]
    programs.assert_same(ours, programs.one_process_task(given, ours.first_weights, 1))
