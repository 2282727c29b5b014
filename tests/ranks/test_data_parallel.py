"""Data parallelism computes what the one-process program computes, in float64 to 1e-9."""

import time
from typing import Any

import pytest
import torch

import plait
import plait.parallel.zero.rank_context
import plait.parallel.zero.reduce_ops
from plait.comm import PartialReduceWork, Work
from support import programs
from support.pool import Pool, RankError


@pytest.mark.parametrize("build", [programs.llama, programs.tied_llama, programs.branches])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.quick), 4])
def test_every_gradient_and_weight_equals_the_one_process_programs(
    pool: Pool, dp: int, micro: int, build: Any
) -> None:
    ours = pool.run(programs.train, dp, build, f"dp={dp} micro={micro} precision=fp64")[0]
    oracle = programs.one_process(build, ours.first_weights, micros=dp * micro)
    programs.assert_same(ours, oracle)
    assert all(norm > 2 * programs.CLIP for norm in oracle.norms), "clipping was not active"


def test_recompute_changes_no_number(pool: Pool) -> None:
    plan = "dp=2 micro=3 precision=fp64"
    plain = pool.run(programs.train, 2, programs.llama, plan)[0]
    recomputed = pool.run(programs.train, 2, programs.llama, f"{plan} recompute=full")[0]
    programs.assert_same(recomputed, plain, tolerance=1e-12)


def test_sgd_sees_the_gradients_scale_and_agrees(pool: Pool) -> None:
    """AdamW's update hardly depends on the gradient's scale; SGD's is proportional to it."""
    ours = pool.run(programs.train, 2, programs.llama, "dp=2 micro=3 precision=fp64", "SGD")[0]
    oracle = programs.one_process(programs.llama, ours.first_weights, micros=6, optimizer="SGD")
    programs.assert_same(ours, oracle)


def _train_deaf(plan: str) -> Any:
    """The parallel program whose ranks do not receive each other's gradients."""
    plait.parallel.zero.reduce_ops.start_all_reduce = lambda *_, **__: Work()
    try:
        return programs.train(programs.llama, plan)
    finally:
        plait.parallel.zero.reduce_ops.start_all_reduce = plait.comm.start_all_reduce


def test_without_the_all_reduce_parity_fails(pool: Pool) -> None:
    ours = pool.run(_train_deaf, 2, "dp=2 precision=fp64")[0]
    oracle = programs.one_process(programs.llama, ours.first_weights, micros=2)
    with pytest.raises(AssertionError, match="gradient of"):
        programs.assert_same(ours, oracle)


def _initial_weights(plan: str) -> Any:
    return plait.parallelize(programs.llama(), plan, seed=7).full_parameters()


def test_initial_weights_are_the_same_under_every_plan(pool: Pool) -> None:
    alone = pool.run(_initial_weights, 1, "dp=1")[0]
    for plan in ("dp=2", "dp=2 precision=bf16", "dp=2 precision=fp64"):
        together = pool.run(_initial_weights, 2, plan)[0]
        assert all(torch.equal(alone[name], together[name].float()) for name in alone), plan


def _bf16(plan: str, steps: int) -> Any:
    engine = plait.parallelize(programs.llama(exact=False), plan, optimizer_args=programs.ADAMW, seed=3)
    results = [engine.step(programs.share_of(b, engine)) for b in programs.batches(steps)]
    return [r.loss for r in results], engine.full_parameters(), engine.full_gradients()


def test_bf16_keeps_fp32_master_weights_and_sums_micro_batches_in_fp32(pool: Pool) -> None:
    losses, weights, gradients = pool.run(_bf16, 2, "dp=2 micro=3 precision=bf16", 3)[0]
    reference, close, exact = pool.run(_bf16, 1, "dp=1 precision=fp32", 3)[0]
    assert losses == pytest.approx(reference, rel=2e-3)
    for name, weight in weights.items():
        assert weight.dtype == gradients[name].dtype == torch.float32
        assert (weight - close[name]).abs().max() <= 3.1 * 2 * programs.ADAMW["lr"]
        norm = torch.linalg.vector_norm(exact[name])
        assert torch.linalg.vector_norm(gradients[name] - exact[name]) <= 0.05 * norm, name
    # a sum of bf16 gradients that was kept in bf16 would have at most 8 significant bits
    head = gradients["lm_head.weight"]
    assert not torch.equal(head, head.bfloat16().float())


def _fp32_twice(plan: str) -> Any:
    trace = [_bf16(plan, 3) for _ in range(2)]
    return trace[0], trace[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_plan_and_seed_give_the_same_bits(pool: Pool, precision: str) -> None:
    first, second = pool.run(_fp32_twice, 2, f"dp=2 micro=3 precision={precision}")[0]
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def _own_loop() -> Any:
    """The loop that users write: a mean loss per micro-batch, one backward each, one update."""
    engine = plait.parallelize(
        programs.llama(), "dp=2 micro=3 precision=fp64", optimizer_args=programs.ADAMW, seed=3
    )
    batch = programs.share_of(programs.batches(1)[0], engine)
    for ids in batch["input_ids"].chunk(3):
        engine.backward(engine.model(input_ids=ids, labels=ids, use_cache=False).loss)
    result = engine.update()
    return result, engine.full_gradients()


def test_a_custom_loop_averages_its_losses_over_micro_batches_and_ranks(pool: Pool) -> None:
    result, gradients = pool.run(_own_loop, 2)[0]
    engine = plait.parallelize(programs.llama(), "dp=1 precision=fp64", seed=3)
    ids = programs.batches(1)[0]["input_ids"]
    loss = engine.model(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    assert result.loss == pytest.approx(loss.item(), rel=1e-7)  # transformers' own loss is float32
    engine.update()
    difference, name = programs.largest_difference(gradients, engine.full_gradients())
    assert difference < 1e-6, name


def _poisoned() -> Any:
    engine = plait.parallelize(programs.llama(), "dp=2", optimizer_args=programs.ADAMW, seed=3)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    before = engine.state()
    before = {key: tensor.clone() for key, tensor in before.items()}
    first = next(iter(engine.model.parameters()))
    handle = first.register_hook(lambda g: g * float("nan") if engine.data_rank == 1 else g)
    result = engine.step(batch)
    handle.remove()
    after = engine.state()
    same = all(torch.equal(before[key], after[key]) for key in before if key != "engine/num_steps")
    return result.skipped, same, engine.step(batch).skipped


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(pool: Pool) -> None:
    assert pool.run(_poisoned, 2) == [(True, True, False)] * 2


def _raises_in_the_middle() -> Any:
    engine = plait.parallelize(programs.llama(), "dp=2 micro=3 precision=fp64", seed=3)
    batch = programs.share_of(programs.batches(1)[0], engine)
    fresh = plait.parallelize(programs.llama(), "dp=2 micro=3 precision=fp64", seed=3)
    expected = fresh.step(batch)
    block = engine.model.model.layers[1]
    calls: list[int] = []

    def fail_in_the_third_micro_batch(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    handle = block.register_forward_pre_hook(fail_in_the_third_micro_batch)
    with pytest.raises(ZeroDivisionError):
        engine.step(batch)
    handle.remove()
    return engine.step(batch) == expected


def test_after_an_exception_in_forward_the_engine_goes_on_as_if_nothing_had_been(pool: Pool) -> None:
    assert pool.run(_raises_in_the_middle, 2) == [True, True]


def test_ranks_that_do_not_fit_the_plan_are_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match="do not multiply to the 2 ranks"):
        pool.run(_initial_weights, 2, "dp=3")


def _bf16_by(all_reduce: bool, ranks: int, build: Any) -> Any:
    """Three bf16 steps of one micro-batch each; with `all_reduce`, gradients are widened first."""
    if all_reduce:
        plait.parallel.zero.rank_context.sends_narrow = lambda *_: False
    try:
        engine = plait.parallelize(
            build(),
            f"dp={ranks} precision=bf16",
            optimizer_args=programs.ADAMW,
            clip_norm=programs.CLIP,
            loss=programs.summed_loss,
            seed=3,
        )
        results = [engine.step(programs.share_of(b, engine)) for b in programs.batches(3)]
        return results, engine.full_parameters()
    finally:
        plait.parallel.zero.rank_context.sends_narrow = plait.comm.sends_narrow


@pytest.mark.parametrize("build", [programs.rough_llama, programs.branches])
def test_gradients_that_travel_as_bf16_have_the_sum_of_those_widened_before(pool: Pool, build: Any) -> None:
    """Two addends have one sum, whatever moved them: the same bits. Three may be added in any order."""
    narrow, wide = (pool.run(_bf16_by, 2, flag, 2, build)[0] for flag in (False, True))
    assert narrow[0] == wide[0]
    assert all(torch.equal(narrow[1][name], wide[1][name]) for name in wide[1])
    narrow, wide = (pool.run(_bf16_by, 3, flag, 3, build)[0] for flag in (False, True))
    assert [r.loss for r in narrow[0]] == pytest.approx([r.loss for r in wide[0]], rel=1e-3)
    difference, name = programs.largest_difference(narrow[1], wide[1])
    assert difference < 1e-3, name


def _deaf_exchange(mine: torch.Tensor, *_: Any, **__: Any) -> PartialReduceWork:
    return PartialReduceWork([mine], Work())


def _bf16_deaf() -> Any:
    plait.parallel.zero.reduce_ops.start_exchange = _deaf_exchange
    try:
        return _bf16_by(False, 2, programs.rough_llama)
    finally:
        plait.parallel.zero.reduce_ops.start_exchange = plait.comm.start_exchange


def test_without_the_exchange_the_bf16_run_is_another(pool: Pool) -> None:
    exchanged, muted = pool.run(_bf16_by, 2, False, 2, programs.rough_llama)[0], pool.run(_bf16_deaf, 2)[0]
    assert exchanged[0] != muted[0]


class _Running(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def _running_statistics() -> Any:
    with programs.ignoring_batch_statistics():
        engine = plait.parallelize(_Running(), "dp=2", loss=lambda out, _: (out.square().sum(), len(out)))
    for step in range(3):
        engine.step({"x": torch.randn(6, 4) + engine.data_rank + step})
    return engine.model.norm.running_mean, engine.model.norm.num_batches_tracked


def test_running_statistics_are_the_same_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(_running_statistics, 2)
    assert torch.equal(first[0], second[0])
    assert first[0].abs().max() > 0
    assert first[1] == second[1] == 3


def _one_rank_raises() -> None:
    engine = plait.parallelize(programs.llama(), "dp=2 micro=3", seed=3)
    batch = programs.share_of(programs.batches(1)[0], engine)
    if engine.data_rank == 1:
        engine.model.model.layers[1].register_forward_pre_hook(_divide_by_zero)
    engine.step(batch)


def _divide_by_zero(*_: Any) -> None:
    raise ZeroDivisionError("on rank 1 alone")


def test_a_rank_that_raises_alone_ends_the_others_within_seconds(pool: Pool) -> None:
    begin_s = time.monotonic()
    with pytest.raises(RankError, match="on rank 1 alone"):
        pool.run(_one_rank_raises, 2)
    assert time.monotonic() - begin_s < 20
