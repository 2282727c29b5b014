"""fp16 and its loss scale, and optimizer states in bf16: nearly what fp32 computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ConfigError
from plait.plan.loss_scaling import LossScaling
from plait.verify.model_spec import parse_source
from support import programs
from support.pool import Pool
from support.trainings import STEPS, assert_near, copied, differing, engine_of, train, trained

POISONED = "model.layers.1.mlp.up_proj.weight"


# --- states in bf16


@pytest.mark.parametrize(
    "words", ["dp=1", "dp=2 zero=0", "dp=2 zero=1 micro=3", "dp=2 zero=3", "dp=4 zero=3 shard=2"]
)
def test_states_in_bf16_train_nearly_as_in_fp32(pool: Pool, words: str, wide: Any, start: Any) -> None:
    ranks, plan = int(words[3]), f"{words} optim_dtype=bf16"
    first, second = (pool.run(trained, ranks, plan)[0] for _ in range(2))
    assert_near(first, wide, start, weights=5e-3, losses=1e-4)
    assert first[0] == second[0]
    assert differing(first[2], second[2]) == []


def _memory(plan: str) -> Any:
    engine = engine_of(plan, programs.wide_llama)
    estimated = engine.estimated_memory(
        (programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH)
    )
    train(engine, last=2)
    return estimated, engine.memory(), engine.num_parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", ["dp=1", "dp=2 zero=1", "dp=2 zero=2 micro=3", "dp=4 zero=3 shard=2"])
def test_states_in_bf16_take_half_the_memory(pool: Pool, words: str, precision: str) -> None:
    shards = plait.Plan.parse(words).shard_degree
    for estimated, held, numel in pool.run(
        _memory, int(words[3]), f"{words} precision={precision} optim_dtype=bf16"
    ):
        assert held.optimizer == pytest.approx(4 * numel / shards, rel=0.02)
        assert held.optimizer == pytest.approx(estimated.optimizer, rel=0.02)


def _saved(plan: str, options: dict[str, Any]) -> Any:
    engine = engine_of(plan, **options)
    train(engine, last=2)
    return copied(engine.state())


def _resumed(plan: str, options: dict[str, Any], state: dict[str, Tensor]) -> Any:
    engine = engine_of(plan, **options)
    train(engine, last=1)  # what it held is replaced
    engine.load_state(state)
    return train(engine, 2, STEPS), engine.full_parameters(), engine.state()


@pytest.mark.parametrize(
    "words",
    [
        "zero=0 optim_dtype=bf16",
        "zero=2 optim_dtype=bf16 precision=bf16 micro=3",
        "zero=3 optim_dtype=bf16",
        "zero=1 precision=fp16",
        "zero=3 precision=fp16 micro=3",
        "zero=3 precision=bf16 reduce=bf16 optim_dtype=bf16",
        "zero=2 precision=fp8 micro=3",
    ],
)
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(pool: Pool, words: str) -> None:
    plan, options = f"dp=2 {words}", {}
    if "fp16" in words:  # the scale moves before and after
        options = {"loss_scaling": LossScaling(initial=2.0**34, interval=2)}
    straight = pool.run(trained, 2, plan, options)[0]
    resumed = pool.run(_resumed, 2, plan, options, pool.run(_saved, 2, plan, options)[0])[0]
    assert [repr(result) for result in straight[0][2:]] == [
        repr(result) for result in resumed[0]
    ]  # NaN and all
    assert differing(straight[2], resumed[2]) == []


# --- fp16


@pytest.mark.parametrize(
    "words",
    ["dp=1 zero=0", "dp=2 zero=0", "dp=2 zero=1 micro=3", "dp=2 zero=3", "dp=4 zero=3 shard=2 micro=3"],
)
def test_fp16_trains_nearly_as_fp32(pool: Pool, words: str, wide: Any, start: Any) -> None:
    """The reported norm too: that of the mean loss, whatever the scale is."""
    found = pool.run(trained, int(words[3]), f"{words} precision=fp16")[0]
    assert_near(found, wide, start, weights=0.02, losses=1.5e-3)


def test_a_scale_that_is_far_too_large_backs_off_until_steps_are_taken(pool: Pool, start: Any) -> None:
    """These gradients overflow by themselves, on every rank."""
    options = {"loss_scaling": LossScaling(initial=2.0**22)}
    for words in ("zero=0", "zero=3 micro=3"):
        results, weights, state = pool.run(trained, 2, f"dp=2 {words} precision=fp16", options, 10)[0]
        skipped = [result.skipped for result in results]
        assert 1 <= sum(skipped) < 10
        assert skipped == sorted(skipped, reverse=True), "first skipped steps, then taken ones"
        assert state["engine/loss_scale.value"] == 2.0 ** (22 - sum(skipped))
        assert differing(weights, start)


def _poison(engine: plait.Engine, rank: int, call: int) -> Callable[[], None]:
    """From now on, the call-th gradient of a parameter overflows on one rank, and on it alone."""
    calls: list[int] = []

    def overflow(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * 1e30 if engine.data_rank == rank and len(calls) == call else gradient

    handle = dict(engine.model.named_parameters())[POISONED].register_hook(overflow)

    def remove() -> None:
        assert len(calls) >= call, "no gradient was poisoned"
        handle.remove()

    return remove


def _overflows(plan: str, options: dict[str, Any], rank: int, call: int) -> Any:
    """A clean step, one that overflows, a clean one: results and loss scales, and what the second changed."""
    engine = engine_of(plan, **options)
    batches = [programs.share_of(batch, engine) for batch in programs.batches(3)]
    found = [(engine.step(batches[0]), engine.loss_scale)]
    before = copied(engine.state())
    remove = _poison(engine, rank, call)
    found.append((engine.step(batches[1]), engine.loss_scale))
    remove()
    changed = differing(before, engine.state())
    found.append((engine.step(batches[2]), engine.loss_scale))
    return found, changed


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("dp=2 zero=0", 1),
        ("dp=2 zero=0 micro=3", 2),
        ("dp=2 zero=1 micro=3", 1),
        ("dp=2 zero=2 micro=3", 2),
        ("dp=2 zero=3", 1),
        pytest.param("dp=2 zero=3 micro=3", 1, marks=pytest.mark.quick),
        ("dp=2 zero=3 micro=3 accumulate=unsharded", 3),
        ("dp=4 zero=3 shard=2 micro=3", 2),
        ("dp=2 zero=3 micro=3 offload=cpu", 2),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    pool: Pool, words: str, call: int
) -> None:
    """In the last micro-batch or in one before it."""
    ranks = pool.run(_overflows, int(words[3]), f"{words} precision=fp16", {}, int(words[3]) - 1, call)
    for found, changed in ranks:
        assert [(result.skipped, scale) for result, scale in found] == [
            (False, 65536.0),
            (True, 32768.0),
            (False, 32768.0),
        ]
        assert set(changed) <= {"engine/num_steps", "engine/loss_scale.value", "engine/loss_scale.clean"}
        assert repr(found) == repr(ranks[0][0]), "the ranks disagree"
    assert ranks[0][1], "nothing was compared"


def test_a_scale_grows_after_its_interval_and_backs_off_with_patience(pool: Pool) -> None:
    options = {"loss_scaling": LossScaling(initial=256.0, growth=4.0, backoff=0.25, interval=2, hysteresis=2)}
    for found, _ in pool.run(_overflows, 2, "dp=2 zero=1 precision=fp16", options, 0, 1):
        assert [scale for _, scale in found] == [256.0, 256.0, 256.0]
    for results, _, state in pool.run(trained, 2, "dp=2 zero=3 precision=fp16", options)[:1]:
        assert not any(result.skipped for result in results)
        assert state["engine/loss_scale.value"] == 256.0 * 4.0**3


def test_a_fixed_scale_never_changes_and_overflows_are_skipped_all_the_same(pool: Pool) -> None:
    fixed = {"loss_scaling": LossScaling(initial=256.0, dynamic=False)}
    ranks = pool.run(_overflows, 2, "dp=2 zero=1 precision=fp16", fixed, 1, 1)
    for found, changed in ranks:
        assert [(result.skipped, scale) for result, scale in found] == [
            (False, 256.0),
            (True, 256.0),
            (False, 256.0),
        ]
        assert set(changed) <= {"engine/num_steps"}
    dynamic = {"loss_scaling": LossScaling(initial=256.0)}  # which nothing changes in so few steps
    one, other = (pool.run(trained, 2, "dp=2 precision=fp16", options)[0] for options in (fixed, dynamic))
    assert repr(one[0]) == repr(other[0])
    assert not differing(one[1], other[1])


def _scales_change_no_bit(initial: float) -> Any:
    results, weights, _ = trained(
        "dp=2 zero=3 precision=fp16", {"loss_scaling": LossScaling(initial=initial)}
    )
    return results, weights


def test_numbers_do_not_depend_on_the_scale_that_holds(pool: Pool) -> None:
    """While nothing underflows much: a power of two moves exponents only."""
    one, other = (pool.run(_scales_change_no_bit, 2, initial)[0] for initial in (2.0**14, 2.0**16))
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)


def _without_targets(plan: str) -> Any:
    engine = engine_of(plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    engine.step(batch)
    return engine.step(nothing), engine.loss_scale, engine.step(batch).skipped


def test_a_step_without_targets_is_no_overflow(pool: Pool) -> None:
    for result, scale, next_skipped in pool.run(_without_targets, 2, "dp=2 zero=1 precision=fp16"):
        assert (result.skipped, result.num_tokens, next_skipped) == (True, 0, False)
        assert scale == 65536.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_loss_scale_is_for_fp16_alone(precision: str) -> None:
    with pytest.raises(ConfigError, match="loss_scaling needs precision=fp16") as caught:
        engine_of(f"precision={precision}", loss_scaling=LossScaling())
    assert f"precision={precision}" in str(caught.value)
    assert engine_of("precision=fp16", loss_scaling=LossScaling(initial=8.0)).loss_scale == 8.0
    assert engine_of(f"precision={precision}").loss_scale is None


# --- buffers


def _in_narrow(kind: str, plan: str) -> tuple[float, float, dict[str, torch.dtype]]:
    """Losses of the first step and of the plain model in the plan's dtype; dtypes of buffers."""
    model: Any = parse_source(kind, layers=2).spec().build(torch.float32)
    engine = plait.parallelize(model, plan, loss=programs.summed_loss, seed=3)
    batch = programs.batches(1)[0]
    plain: Any = type(model)(model.config)
    plain.load_state_dict(engine.full_parameters(), strict=False)
    plain.to(torch.bfloat16 if "bf16" in plan else torch.float16)
    total, count = programs.summed_loss(plain(batch["input_ids"]), batch)
    loss = engine.step(engine.shard(batch)).loss
    dtypes = {name: b.dtype for name, b in engine.model.named_buffers()}
    return loss, (total / count).item(), dtypes


@pytest.mark.parametrize("plan", ["dp=2 precision=bf16", "dp=2 zero=3 precision=fp16"])
def test_a_table_of_positions_has_the_dtype_of_the_weights(pool: Pool, plan: str) -> None:
    loss, expected, dtypes = pool.run(_in_narrow, 2, "xglm", plan)[0]
    assert loss == pytest.approx(expected, rel=1e-2)
    assert set(dtypes.values()) == {torch.bfloat16 if "bf16" in plan else torch.float16}


class Tables(nn.Module):
    """A table that is saved, one that is not, statistics, and a number that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("positions", torch.randn(4, 8))
        self.register_buffer("angles", torch.randn(4, 8), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(self.norm.weight.dtype) + self.positions
        self.calls += 1
        for layer in self.layers:
            x = layer(x) * self.angles.cos().to(x.dtype)
        result: Tensor = self.norm(x.flatten(0, 1))
        return result


def test_tables_of_angles_and_numbers_stay_wide_and_saved_buffers_are_stored_as_weights_are() -> None:
    def loss(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
        return outputs.float().square().sum(), outputs.numel()

    engine = plait.parallelize(Tables(), "precision=bf16", loss=loss)
    assert engine.step({"input": torch.randn(2, 4, 8)}).loss > 0
    wide = {name for name, b in engine.model.named_buffers() if b.dtype == torch.float32}
    assert wide == {"angles", "calls"}
    llama: Any = plait.parallelize(programs.llama(), "precision=bf16", loss=programs.summed_loss).model
    assert {b.dtype for b in llama.buffers()} == {torch.float32}
