"""Training with compressed gradients: compared with uncompressed, with skipped steps, at every stage."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.plan.loss_scaling import LossScaling
from support import programs
from support.pool import Pool
from support.trainings import assert_near, differing, distance, engine_of, train, trained

PLANS = [
    "dp=2 zero=0",
    "dp=3 zero=0 micro=2",
    "dp=2 zero=1",
    "dp=2 zero=1 micro=3",
    "dp=2 zero=2 micro=3",
    "dp=4 zero=2 shard=2 micro=3",
    "dp=2 zero=3 micro=3 accumulate=unsharded",
    "dp=4 zero=3",
    "dp=2 zero=3 shard=1 offload=cpu micro=3",
    "dp=4 zero=3 shard=2 offload=cpu",
]


Runs = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Runs:
    """`runs(function, plan, *arguments)`: the first rank's result; of one run for all claims about it."""
    return functools.cache(lambda fn, plan, *args: pool.run(fn, int(plan[3]), plan, *args)[0])


@pytest.mark.parametrize("words", PLANS)
@pytest.mark.parametrize(("way", "weights"), [("fp16", 0.01), ("int8", 0.2)])
def test_codes_train_nearly_the_same_under_every_plan(
    runs: Runs, words: str, way: str, weights: float, wide: Any, start: Any
) -> None:
    found = runs(trained, f"{words} reduce={way}")
    assert_near(found, wide, start, weights=weights, losses=5e-3)


@pytest.mark.parametrize("words", [words for words in PLANS if "micro" not in words or "unsharded" in words])
def test_factors_do_not_depend_on_how_a_unit_is_cut(runs: Runs, words: str, start: Any) -> None:
    """Factors are of whole matrices, whichever ranks own their parts."""
    ranks, micro = int(words[3]), "micro=3" if "micro=3" in words else ""
    found = runs(trained, f"{words} reduce=powersgd")
    plain = runs(trained, f"dp={ranks} {micro} reduce=powersgd")
    assert not any(result.skipped for result in found[0])
    assert distance(found[1], plain[1], start) < 0.01


@pytest.mark.parametrize(
    "words", [words for words in PLANS if "micro=3" in words and "unsharded" not in words]
)
def test_factors_of_each_micro_batch_train_as_well_as_those_of_their_sum(
    pool: Pool, words: str, wide: Any
) -> None:
    found = pool.run(trained, int(words[3]), f"{words} reduce=powersgd:8")[0]
    for mine, theirs in zip(found[0], wide[0], strict=True):
        assert not mine.skipped
        assert mine.loss == pytest.approx(theirs.loss, rel=0.01)


ROUNDS = 60


def _losses(plan: str, *, error_feedback: bool = True) -> list[float]:
    """Losses on four batches, over and over: random tokens, which take all directions to learn."""
    engine = engine_of(
        plan, optimizer=torch.optim.SGD, optimizer_args={"lr": 0.2, "momentum": 0.9}, clip_norm=1.0
    )
    shares = [programs.share_of(batch, engine) for batch in programs.batches(4)]
    losses = []
    for number in range(ROUNDS):
        losses.append(engine.step(shares[number % 4]).loss)
        if not error_feedback:
            for residual in _residuals(engine):
                residual.zero_()
    return losses


def _residuals(engine: plait.Engine) -> list[Tensor]:
    return [compressor.state[0] for compressor in engine._parts.sharded.stages[0].reduction.compressors]


def _fall(losses: list[float]) -> float:
    """How far the loss has come in the last round over the four batches."""
    return losses[0] - sum(losses[-4:]) / 4


def test_compressed_training_converges_like_uncompressed(pool: Pool, runs: Runs) -> None:
    """The loss falls from 4.1 to 0.9: with codes as far, with factors of rank 8 (of 32) nearly as far, with
    rank 4 four fifths of it; half of that without error feedback."""
    plain, fp16, int8, rank_8, rank_4 = (
        _fall(runs(_losses, f"dp=2 reduce={way}"))
        for way in ("fp32", "fp16", "int8", "powersgd:8", "powersgd:4")
    )
    assert plain > 3
    assert fp16 == pytest.approx(plain, rel=0.03)
    assert int8 == pytest.approx(plain, rel=0.05)
    assert rank_8 > 0.9 * plain
    assert rank_4 > 0.7 * plain
    deaf = _fall(pool.run(_losses, 2, "dp=2 reduce=powersgd:4", error_feedback=False)[0])
    assert deaf < 0.6 * rank_4


def test_first_steps_are_uncompressed_if_asked_for(runs: Runs) -> None:
    """As many as given are those of fp32; then the curve is the better for it."""
    exact, started, compressed = (
        runs(_losses, f"dp=2 reduce={way}") for way in ("fp32", "powersgd:4:20", "powersgd:4")
    )
    assert started[:21] == pytest.approx(exact[:21], rel=1e-5)  # the loss of step 21 is before its update
    assert started[21:] != pytest.approx(exact[21:], rel=1e-3)
    assert _fall(started) > 1.05 * _fall(compressed)


def _parameters(plan: str) -> dict[str, Tensor]:
    engine = engine_of(plan)
    train(engine)
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd"])
@pytest.mark.parametrize(
    "words", ["dp=3 micro=2", "dp=4", pytest.param("dp=4 zero=1 shard=2", marks=pytest.mark.quick)]
)
def test_replicas_stay_the_same_bits(pool: Pool, words: str, way: str) -> None:
    first, *others = pool.run(_parameters, int(words[3]), f"{words} reduce={way}")
    for other in others:
        assert differing(first, other) == []


@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd"])
@pytest.mark.parametrize("words", ["dp=3 zero=0 micro=2", "dp=4 zero=3 shard=2 micro=3"])
def test_a_run_repeats_bit_by_bit(pool: Pool, runs: Runs, words: str, way: str) -> None:
    plan = f"{words} reduce={way}"
    one, other = runs(trained, plan), pool.run(trained, int(words[3]), plan)[0]
    assert differing(one[2], other[2]) == []


def _after_a_skip(plan: str, name: str, bad: float) -> Any:
    """Results and weights of a training whose second step is `bad` on one rank, and of one without that step,
    in which nothing that was kept reaches the third step either."""
    found = []
    for poisoned in (True, False):
        engine = engine_of(plan, optimizer=torch.optim.SGD, optimizer_args={"lr": 0.3})
        shares = [programs.share_of(batch, engine) for batch in programs.batches(4)]
        results = [engine.step(shares[0])]
        if poisoned:
            weight = engine.model.get_parameter(f"model.layers.1.{name}.weight")
            factor = bad if engine.data_rank == 1 else 1.0
            handle = weight.register_hook(lambda g, factor=factor: g * factor)
            results.append(engine.step(shares[1]))
            handle.remove()
        else:
            engine.load_state({key: t.clone() for key, t in _shared(engine).items()})
        results += [engine.step(share) for share in shares[2:]]
        found.append(([result.skipped for result in results], engine.full_parameters()))
    return found


def _shared(engine: plait.Engine) -> dict[str, Tensor]:
    """The state, on every rank."""
    box: list[Any] = [engine.state()]
    torch.distributed.broadcast_object_list(box)
    return box[0]


@pytest.mark.parametrize(
    ("name", "bad"),  # a matrix, and a vector that has padding in its block
    [("mlp.up_proj", float("nan")), ("post_attention_layernorm", float("inf"))],
)
@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd"])
@pytest.mark.parametrize("words", ["dp=2", "dp=2 zero=1", "dp=4 zero=3 shard=2 micro=3"])
def test_a_step_that_one_rank_cannot_take_is_skipped_as_if_it_had_not_been(
    pool: Pool, words: str, way: str, name: str, bad: float
) -> None:
    answers = pool.run(_after_a_skip, int(words[3]), f"{words} reduce={way}", name, bad)
    for (skips, _), (plain_skips, _) in answers:
        assert skips == [False, True, False, False]
        assert plain_skips == [False] * 3
    (_, after), (_, plain) = answers[0]
    assert differing(after, plain) == []


def _scaled(plan: str, interval: int) -> Any:
    scaling = LossScaling(initial=2.0**8, interval=interval)
    results, weights, _ = trained(plan, {"loss_scaling": scaling}, steps=8)
    return [result.skipped for result in results], weights


def test_compression_errors_follow_the_loss_scale(pool: Pool, start: Any) -> None:
    """A scale that doubles every second step trains as one that stays."""
    plan = "dp=2 precision=fp16 reduce=powersgd"
    growing, constant = (pool.run(_scaled, 2, plan, interval)[0] for interval in (2, 1000))
    assert not any(growing[0] + constant[0])
    assert distance(growing[1], constant[1], start) < 0.02


def _memory(plan: str) -> Any:
    engine = engine_of(plan, programs.wide_llama)
    shape = programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH
    estimated = engine.estimated_memory(shape)
    train(engine, last=2)
    return estimated, engine.memory()


@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd:1"])
@pytest.mark.parametrize(
    "words",
    [
        "dp=2",
        "dp=3 micro=2",
        "dp=2 zero=1 precision=bf16",
        "dp=4 zero=2 shard=2 micro=3",
        "dp=4 zero=3 shard=2",
        "dp=2 zero=2 offload=cpu",
    ],
)
def test_bytes_held_by_compression_are_estimated_exactly(pool: Pool, words: str, way: str) -> None:
    for estimated, held in pool.run(_memory, int(words[3]), f"{words} reduce={way}"):
        assert held.gradients == estimated.gradients
        assert held.buffers == estimated.buffers


def _of_branches(plan: str) -> Any:
    return trained(plan, {"build": programs.branches})


@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd:2"])
@pytest.mark.parametrize("words", ["dp=2", "dp=4 zero=3 shard=2 micro=3"])
def test_parameters_that_only_some_ranks_use_are_summed_too(runs: Runs, words: str, way: str) -> None:
    found = runs(_of_branches, f"{words} reduce={way}")
    plain = runs(_of_branches, words)
    for mine, theirs in zip(found[0], plain[0], strict=True):
        assert not mine.skipped
        assert mine.loss == pytest.approx(theirs.loss, rel=0.02)
