"""Events between and inside an engine's steps, at every stage, that must not change a number."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError, RunError
from support import edge_case_models, programs
from support.pool import Pool, PoolOver
from support.programs import Task


@pytest.fixture(params=["host", "gloo"])
def pool(request: pytest.FixtureRequest, workers: Pool) -> PoolOver:
    """Both ways: at stage 3 parameters are memory that ranks share, or are gathered."""
    return workers.over(request.param)


STAGES = [
    "dp=2 micro=3 zero=1",
    "dp=2 micro=3 zero=2",
    "dp=2 micro=3 zero=3",
    "dp=2 micro=3 zero=3 reshard=step prefetch=2 accumulate=unsharded",
]
every_stage = pytest.mark.parametrize("plan", STAGES)
STEPS = 3


def fresh(plan: str, build: Any = programs.llama) -> plait.Engine:
    return programs.engine_of(Task(build), plan)


def run(engine: plait.Engine, between: Callable[[plait.Engine], object] | None = None) -> Any:
    """A few steps, with something between them; all that they computed."""
    results = []
    for batch in programs.batches(STEPS):
        results.append(engine.step(programs.share_of(batch, engine)))
        if between is not None:
            between(engine)
    return results, engine.full_parameters(), engine.full_gradients()


def same(one: Any, other: Any) -> bool:
    assert one[0] == other[0], (one[0], other[0])
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        assert mine.keys() == theirs.keys()
        differing = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not differing, differing
    return True


# --- exceptions


def _fail_at(call: int) -> Callable[..., None]:
    """A hook that raises at its n-th call."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError("the user's own")

    return fail


def _raises(plan: str, where: str, call: int) -> bool:
    engine = fresh(plan)
    block: nn.Module = engine.model.model.layers[1]
    batch = programs.share_of(programs.batches(1)[0], engine)
    if where == "forward":
        handle = block.register_forward_pre_hook(_fail_at(call))
    elif where == "after forward":
        handle = block.register_forward_hook(_fail_at(call))
    else:
        parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        handle = parameter.register_hook(_fail_at(call))
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        engine.step(batch)
    handle.remove()
    return same(run(engine), run(fresh(plan)))


@pytest.mark.parametrize("where", ["forward", "after forward", "backward"])
@pytest.mark.parametrize("call", [1, 3])
@every_stage
def test_after_an_exception_the_step_gives_what_a_fresh_engine_gives(
    pool: Pool, plan: str, where: str, call: int
) -> None:
    """In the first micro-batch and in the last, when reductions are under way."""
    assert pool.run(_raises, 2, f"{plan} precision=fp64", where, call) == [True, True]


def _raises_in_step_2(plan: str) -> bool:
    """With moments and gradients of an earlier step in place."""
    engine, other = fresh(plan), fresh(plan)
    batches = [programs.share_of(batch, engine) for batch in programs.batches(3)]
    assert engine.step(batches[0]) == other.step(batches[0])
    for register in ("register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(engine.model.model.layers[0], register)(_fail_at(2))
        with pytest.raises(ZeroDivisionError):
            engine.step(batches[1])
        handle.remove()
    assert engine.step(batches[1]) == other.step(batches[1])
    return same(run(engine), run(other))


@every_stage
def test_an_exception_in_a_later_step_leaves_the_state_of_the_one_before(pool: Pool, plan: str) -> None:
    assert pool.run(_raises_in_step_2, 2, f"{plan} precision=fp64") == [True, True]


def _raises_in_evaluation(plan: str) -> bool:
    engine = fresh(plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    handle = engine.model.model.layers[1].register_forward_pre_hook(_fail_at(1))
    with pytest.raises(ZeroDivisionError):
        engine.evaluate(batch)
    handle.remove()
    return same(run(engine), run(fresh(plan)))


@every_stage
def test_an_exception_in_evaluation_leaves_training_as_it_was(pool: Pool, plan: str) -> None:
    assert pool.run(_raises_in_evaluation, 2, f"{plan} precision=fp64") == [True, True]


def _raises_on_one_rank(plan: str, folder: Path) -> str:
    """Rank 1's program catches the error of its first step and goes on, as rank 0's does."""
    engine = fresh(plan)
    saved = engine.save(folder)
    if engine.world.rank == 1:
        handle = engine.model.model.layers[0].register_forward_pre_hook(_fail_at(1))
        with pytest.raises(ZeroDivisionError):
            engine.step(programs.share_of(programs.batches(1)[0], engine))
        handle.remove()
    with pytest.raises(RunError) as failure:
        engine.step(programs.share_of(programs.batches(1)[0], engine))
    engine.load(saved)
    assert math.isfinite(engine.step(programs.share_of(programs.batches(1)[0], engine)).loss)
    return str(failure.value.given)


@pytest.mark.parametrize("plan", ["dp=2 zero=0", "dp=2 zero=2"])
def test_ranks_in_different_steps_raise_an_error_that_names_both(
    pool: Pool, plan: str, tmp_path: Path
) -> None:
    given = "rank 0 is in its step 1, rank 1 in its step 2"
    assert pool.run(_raises_on_one_rank, 2, f"{plan} precision=fp64", tmp_path) == [given] * 2


# --- forwards that no update follows


def _evaluate(engine: plait.Engine) -> None:
    result = engine.evaluate(programs.share_of(programs.batches(1)[0], engine))
    assert result.num_tokens > 0


def _look(engine: plait.Engine) -> None:
    """Forwards of the user's own, with and without a graph that is then not walked."""
    ids = programs.share_of(programs.batches(1)[0], engine)["input_ids"]
    engine.model(input_ids=ids, use_cache=False)
    with torch.no_grad():
        engine.model(input_ids=ids[:2], use_cache=False)


_kept: list[Any] = []


def _look_and_keep(engine: plait.Engine) -> None:
    """As `_look`; the graph lives on through the next step."""
    ids = programs.share_of(programs.batches(1)[0], engine)["input_ids"]
    _kept[:] = [engine.model(input_ids=ids, use_cache=False).logits.sum()]


def _collect(engine: plait.Engine) -> None:
    """The collective calls that read state."""
    engine.full_gradients()
    engine.full_parameters()
    engine.state()
    engine.memory()


_BETWEEN = {"evaluation": _evaluate, "forward": _look, "kept forward": _look_and_keep, "reading": _collect}


def _with_and_without(plan: str, between: str) -> bool:
    return same(run(fresh(plan), _BETWEEN[between]), run(fresh(plan)))


@pytest.mark.parametrize("between", _BETWEEN)
@every_stage
def test_calls_between_steps_change_no_bit_of_them(pool: Pool, plan: str, between: str) -> None:
    assert pool.run(_with_and_without, 2, f"{plan} precision=fp32", between) == [True, True]


def _looks_between_micro_batches(plan: str, build: Any = programs.llama) -> Any:
    """A loop of the user's own that also looks at a prediction before each backward."""
    engine = fresh(plan, build)
    batch = programs.share_of(programs.batches(1)[0], engine)
    for piece in range(3):
        micro = {key: value.chunk(3)[piece] for key, value in batch.items()}
        total, count = programs.summed_loss(engine.model(input_ids=micro["input_ids"]), micro)
        with torch.no_grad():
            engine.model(input_ids=micro["input_ids"])
        engine.backward(total, count)
    engine.update()
    return engine.full_gradients()


def _two_forwards_one_backward(plan: str) -> Any:
    engine = fresh(plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    halves = [{key: value.chunk(2)[half] for key, value in batch.items()} for half in range(2)]
    found = [programs.summed_loss(engine.model(input_ids=half["input_ids"]), half) for half in halves]
    engine.backward(found[0][0] + found[1][0], found[0][1] + found[1][1])
    engine.update()
    return engine.full_gradients()


def _two_forwards_two_backwards(plan: str) -> Any:
    engine = fresh(plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    halves = [{key: value.chunk(2)[half] for key, value in batch.items()} for half in range(2)]
    found = [programs.summed_loss(engine.model(input_ids=half["input_ids"]), half) for half in halves]
    for total, count in found:
        engine.backward(total, count)
    engine.update()
    return engine.full_gradients()


def _one_step(plan: str, build: Any = programs.llama) -> Any:
    engine = fresh(plan, build)
    engine.step(programs.share_of(programs.batches(1)[0], engine))
    return engine.full_gradients()


@pytest.mark.parametrize(
    ("loop", "micro"),
    [
        (_looks_between_micro_batches, 3),
        (_two_forwards_one_backward, 1),
        (_two_forwards_two_backwards, 2),
    ],
)
@pytest.mark.parametrize("words", ["zero=1", "zero=2", "zero=3", "zero=3 prefetch=2 reshard=step"])
def test_a_custom_loop_has_the_steps_gradients(pool: Pool, words: str, loop: Any, micro: int) -> None:
    ours = pool.run(loop, 2, f"dp=2 {words} micro={micro} precision=fp64")[0]
    plain = pool.run(_one_step, 1, "dp=1 precision=fp64")[0]
    difference, name = programs.largest_difference(ours, plain)
    assert difference < 1e-9, name


# --- what must not reach the weights


@pytest.mark.parametrize("words", ["zero=1", "zero=3", "zero=3 prefetch=0", "zero=3 reshard=step"])
def test_looking_before_backward_leaves_weights_that_are_used_elsewhere(pool: Pool, words: str) -> None:
    """The head reads the embedding's weight, which no hook of the embedding announces in backward."""
    build = edge_case_models.borrowed
    plan = f"dp=2 {words} micro=3 precision=fp64"
    ours = pool.run(_looks_between_micro_batches, 2, plan, build)[0]
    plain = pool.run(_one_step, 1, "dp=1 precision=fp64", build)[0]
    difference, name = programs.largest_difference(ours, plain)
    assert difference < 1e-9, name


def _poisoned(plan: str) -> Any:
    engine = fresh(plan)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    before = {key: tensor.clone() for key, tensor in engine.state().items()}
    parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    calls: list[int] = []

    def poison(gradient: Tensor) -> Tensor:
        calls.append(1)
        worst = float("nan") if len(calls) == 1 else 0.0
        return gradient + worst if engine.data_rank == 1 else gradient

    handle = parameter.register_hook(poison)
    result = engine.step(batch)
    handle.remove()
    assert calls, "the gradient was not poisoned"
    after = engine.state()
    differing = [k for k in before if k != "engine/num_steps" and not torch.equal(before[k], after[k])]
    return result.skipped, differing, engine.step(batch).skipped


@every_stage
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(pool: Pool, plan: str) -> None:
    assert pool.run(_poisoned, 2, f"{plan} precision=fp32") == [(True, [], False)] * 2
    assert pool.run(_poisoned, 2, f"{plan} precision=bf16") == [(True, [], False)] * 2


def _loads_directly(plan: str) -> None:
    engine = fresh(plan, edge_case_models.uneven)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    state = {key: torch.ones_like(value) for key, value in edge_case_models.uneven().state_dict().items()}
    engine.model.load_state_dict(state)
    engine.step(batch)


def _replaces_directly(plan: str) -> None:
    engine = fresh(plan, edge_case_models.uneven)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    weight = engine.model.blocks[1].up.weight
    weight.data = torch.ones(97, edge_case_models.WIDTH, dtype=weight.dtype)
    engine.step(batch)


def _reassigns_directly(plan: str) -> None:
    engine = fresh(plan, edge_case_models.uneven)
    batch = programs.share_of(programs.batches(1)[0], engine)
    engine.step(batch)
    up: nn.Module = engine.model.blocks[1].up
    up.weight = nn.Parameter(torch.ones(97, edge_case_models.WIDTH, dtype=up.weight.dtype))
    engine.step(batch)


def _refused(change: Any, plan: str) -> str:
    with pytest.raises(ModelError) as caught:
        change(plan)
    return str(caught.value)


@pytest.mark.parametrize("change", [_loads_directly, _replaces_directly, _reassigns_directly])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 precision=bf16", *STAGES[:3], "dp=2 zero=3 precision=bf16"])
def test_parameters_changed_outside_the_engine_are_refused(pool: Pool, plan: str, change: Any) -> None:
    for message in pool.run(_refused, 2, change, plan):
        assert "\n  given   : " in message
        assert "\n  try     : " in message


# --- buffers


class _Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _running_statistics(plan: str) -> Any:
    with programs.ignoring_batch_statistics():
        engine = plait.parallelize(_Running(), plan, loss=lambda out, _: (out.square().sum(), len(out)))
    for step in range(3):
        engine.step({"x": torch.randn(6, 4) + engine.data_rank + step})
    norm = engine.model.blocks[1]
    return norm.running_mean, norm.num_batches_tracked


@every_stage
def test_running_statistics_follow_rank_0s(pool: Pool, plan: str) -> None:
    first, second = pool.run(_running_statistics, 2, plan)
    assert torch.equal(first[0], second[0])
    assert first[0].abs().max() > 0
    assert first[1] == second[1] == 9
