"""Pipelines with data parallelism at every ZeRO stage: one process's numbers, in any precision."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.plan.loss_scaling import LossScaling
from support import hybrid_plans, pipeline_models, pipeline_plans, programs
from support.covering import Case
from support.pool import Pool

LAYERS = 5


def check_parity(pool: Pool, case: Case) -> None:
    task = _task(case["model"])
    ranks = pool.over(case["transport"]).run(programs.train_task, 4, task, pipeline_plans.data_plan_of(case))
    oracle = _oracle(case["model"])
    assert programs.largest_difference(ranks[0].first_weights, oracle.first_weights)[0] == 0
    programs.assert_same(ranks[0], oracle)
    assert all((rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms) for rank in ranks)
    assert not any(rank.weights for rank in ranks[1:]), "whole tensors are rank 0's"


def _task(model: str, data_ranks: int = 2) -> programs.Task:
    sequences = pipeline_plans.SEQUENCES_EACH * data_ranks * pipeline_plans.DATA_MICRO
    return pipeline_plans.task(model, LAYERS, sequences)


@functools.cache
def _oracle(model: str, data_ranks: int = 2) -> programs.Trace:
    task = _task(model, data_ranks)
    first = programs.engine_of(task, "precision=fp64").full_parameters()
    return programs.one_process_task(task, first, 1)


FEW = pipeline_plans.few_data_cases(hybrid_plans.pairs_in(pipeline_plans.DATA_FACTORS))


@pytest.mark.parametrize("case", FEW, ids=pipeline_plans.name_of)
def test_stages_on_two_data_ranks_train_as_the_one_process_program_does(pool: Pool, case: Case) -> None:
    check_parity(pool, case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", pipeline_plans.many_data_cases(), ids=pipeline_plans.name_of)
def test_under_many_data_plans_stages_train_as_the_one_process_program_does(pool: Pool, case: Case) -> None:
    check_parity(pool, case)


@pytest.mark.parametrize("zero", [1, 3])
def test_hybrid_shards_over_stages_train_as_the_one_process_program_does(pool: Pool, zero: int) -> None:
    """Eight ranks: two stages, two copies of what is cut, each over two."""
    plan = f"pp=2 dp=4 shard=2 zero={zero} schedule=zbv micro={pipeline_plans.DATA_MICRO} precision=fp64"
    ours = pool.run(programs.train_task, 8, _task("tied_llama", 4), plan)[0]
    programs.assert_same(ours, _oracle("tied_llama", 4))


@pytest.mark.parametrize(
    "words",
    [
        "zero=3 prefetch=0 schedule=1f1b",
        "zero=3 prefetch=2 reshard=step schedule=interleaved",
        "zero=2 algorithm=ring schedule=interleaved",
    ],
)
def test_however_stages_gather_and_add_up_the_numbers_are_the_same(pool: Pool, words: str) -> None:
    plan = f"pp=2 dp=2 {words} micro={pipeline_plans.DATA_MICRO} precision=fp64"
    ours = pool.over("gloo").run(programs.train_task, 4, _task("gpt2"), plan)[0]
    programs.assert_same(ours, _oracle("gpt2"))


@pytest.mark.parametrize("verb", ["start_scattered_sum", "start_all_gather"])
def test_without_messages_between_data_ranks_the_numbers_are_others(pool: Pool, verb: str) -> None:
    plan = f"pp=2 dp=2 zero=3 schedule=1f1b micro={pipeline_plans.DATA_MICRO} precision=fp64"
    ours = pool.over("gloo").run(programs.train_task, 4, _task("llama"), plan, (verb,))[0]
    with pytest.raises(AssertionError, match="differs by"):
        programs.assert_same(ours, _oracle("llama"))


# --- narrow precisions


def _narrow_batches(steps: int) -> list[dict[str, Tensor]]:
    sequences = pipeline_plans.SEQUENCES_EACH * 2 * pipeline_plans.DATA_MICRO
    return programs.batches(steps, sequences=sequences, length=pipeline_plans.LENGTH)


def _trained(plan: str, scaling: LossScaling | None = None, steps: int = 6, tied: bool = True) -> Any:
    """Results, loss scales and weights."""
    engine = _narrow_engine(plan, scaling, tied)
    results, scales = [], []
    for batch in _narrow_batches(steps):
        results.append(engine.step(programs.share_of(batch, engine)))
        scales.append(engine.loss_scale)
    return results, scales, engine.full_parameters()


def _narrow_engine(plan: str, scaling: LossScaling | None = None, tied: bool = True) -> plait.Engine:
    return plait.parallelize(
        pipeline_models.llama(layers=LAYERS, tied=tied, exact=False),
        f"{plan} micro={pipeline_plans.DATA_MICRO}",
        optimizer_args=programs.ADAMW,
        clip_norm=programs.CLIP,
        loss=programs.summed_loss,
        loss_scaling=scaling,
        seed=3,
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "words", ["schedule=1f1b", "schedule=zbv zero=2", "schedule=zb-h1 zero=3", "schedule=bfs zero=1"]
)
def test_narrow_stages_train_nearly_as_one_wide_process(pool: Pool, words: str, precision: str) -> None:
    wide, _, _ = pool.run(_trained, 1, "precision=fp32")[0]
    scaling = LossScaling(initial=2.0**12) if precision == "fp16" else None
    ranks = pool.run(_trained, 4, f"pp=2 dp=2 {words} precision={precision}", scaling)
    rel = {"bf16": 1e-2, "fp16": 1.5e-3}[precision]
    for results, _, _ in ranks:
        assert results == ranks[0][0]
    for mine, theirs in zip(ranks[0][0], wide, strict=True):
        assert not mine.skipped
        assert mine.loss == pytest.approx(theirs.loss, rel=rel)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=10 * rel)
        assert mine.num_tokens == theirs.num_tokens


def test_two_stages_compute_in_bf16_the_bits_of_one(pool: Pool) -> None:
    """A pipeline alone changes no sum over tokens or micro-batches: roundings are the same."""
    one, _, weights = pool.run(_trained, 1, "precision=bf16 schedule=gpipe", tied=False)[0]
    two, _, theirs = pool.run(_trained, 2, "pp=2 precision=bf16 schedule=gpipe", tied=False)[0]
    assert one == two
    assert programs.largest_difference(weights, theirs)[0] == 0


@pytest.mark.parametrize("words", ["schedule=1f1b", "schedule=interleaved zero=1", "schedule=zb-h1 zero=3"])
def test_a_loss_scale_that_overflows_backs_off_on_every_stage_alike(pool: Pool, words: str) -> None:
    scaling = LossScaling(initial=2.0**26)
    ranks = pool.run(_trained, 4, f"pp=2 dp=2 {words} precision=fp16", scaling, 12)
    for results, scales, _ in ranks:
        assert repr(results) == repr(ranks[0][0])
        assert scales == ranks[0][1]
    skipped = [result.skipped for result in ranks[0][0]]
    assert 1 <= sum(skipped) < 12
    assert skipped == sorted(skipped, reverse=True), "first skipped steps, then taken ones"
    assert ranks[0][1][-1] == 2.0 ** (26 - sum(skipped))


def _overflows_on(plan: str, rank: int) -> Any:
    """A step in which a gradient of one rank is infinite, and one after it."""
    engine = _narrow_engine(plan)
    before = {name: tensor.clone() for name, tensor in engine.full_parameters().items()}
    batches = [programs.share_of(batch, engine) for batch in _narrow_batches(2)]
    if engine.world.rank == rank:
        parameter = next(p for p in engine.model.parameters() if not p.is_meta)
        handle = parameter.register_hook(lambda gradient: gradient * torch.inf)
    results = [engine.step(batches[0])]
    after = engine.full_parameters()
    if engine.world.rank == rank:
        handle.remove()
    results.append(engine.step(batches[1]))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return [result.skipped for result in results], engine.loss_scale, changed


@pytest.mark.parametrize("rank", [0, 3])
def test_an_overflow_on_one_stage_alone_skips_the_step_on_all(pool: Pool, rank: int) -> None:
    """The first stage's, where no loss is, or the last one's."""
    for skipped, scale, changed in pool.run(_overflows_on, 4, "pp=2 dp=2 zero=1 precision=fp16", rank):
        assert (skipped, scale, changed) == ([True, False], 32768.0, [])
