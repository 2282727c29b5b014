"""A pipeline's state is the one-process program's: it goes on under any plan, and is refused likewise."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import plait
from plait.errors import CheckpointError
from support import pipeline_plans, programs, trainings
from support.pool import Pool

LAYERS, SEQUENCES = 5, 12
STEPS, STEPS_BEFORE = 3, 2
MODELS = ("tied_llama", "pair", "frozen")
PLANS = (
    "micro=12",
    "pp=2 schedule=1f1b micro=4",
    "pp=3 schedule=zb-h1 micro=2",
    "pp=2 schedule=interleaved micro=3",
    "pp=2 schedule=zbv micro=3 dp=2 zero=3",
    "pp=2 schedule=gpipe micro=2 dp=2 zero=1 stages=1,4",
    "dp=2 zero=3 micro=2",
)


def task_of(model: str) -> programs.Task:
    return pipeline_plans.task(model, LAYERS, SEQUENCES, STEPS)


def ranks_of(plan: str) -> int:
    return plait.Plan.parse(plan).num_ranks


def _through(model: str, plan: str) -> Any:
    engine = programs.engine_of(task_of(model), plan)
    saved: dict[str, Tensor] = {}
    results = []
    for step, batch in enumerate(task_of(model).data(STEPS)):
        if step == STEPS_BEFORE:
            saved = trainings.copied(engine.state())
        results.append(engine.step(programs.share_of(batch, engine)))
    return saved, results[STEPS_BEFORE:], engine.full_parameters(), trainings.copied(engine.state())


def _goes_on(model: str, plan: str, state: dict[str, Tensor]) -> Any:
    engine = programs.engine_of(task_of(model), plan, seed=99)
    first = task_of(model).data(1)[0]
    engine.step(programs.share_of(first, engine))  # what it held is replaced
    engine.load_state(state)
    assert engine.num_steps == STEPS_BEFORE
    batches = task_of(model).data(STEPS)[STEPS_BEFORE:]
    results = [engine.step(programs.share_of(batch, engine)) for batch in batches]
    return results, engine.full_parameters(), trainings.copied(engine.state())


@pytest.mark.parametrize("model", MODELS)
def test_state_saved_by_a_pipeline_goes_on_under_any_other_plan_and_back(pool: Pool, model: str) -> None:
    """From every plan to the next one, and from the last to the first; the same bits under the same one."""
    plans = [f"{words} precision=fp64" for words in PLANS]
    found = {plan: pool.run(_through, ranks_of(plan), model, plan) for plan in plans}
    alone_saved, alone, expected, _ = found[plans[0]][0]
    for plan, ranks in found.items():
        assert not any(state or weights for state, _, weights, _ in ranks[1:]), "whole tensors are rank 0's"
        saved, results, weights, _ = ranks[0]
        assert list(saved) == list(alone_saved), plan
        assert {key: (t.shape, t.dtype) for key, t in saved.items()} == {
            key: (t.shape, t.dtype) for key, t in alone_saved.items()
        }
        assert list(weights) == list(expected), plan
        check_same(weights, results, expected, alone)
    for source, plan in zip(plans, [*plans[1:], plans[0]], strict=True):
        saved = found[source][0][0]
        results, weights, _ = pool.run(_goes_on, ranks_of(plan), model, plan, saved)[0]
        check_same(weights, results, expected, alone)


def check_same(weights: Any, results: Any, expected: Any, alone: Any) -> None:
    difference, name = programs.largest_difference(weights, expected)
    assert difference < 1e-9, name
    for mine, theirs in zip(results, alone, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", PLANS[1:6:2])
def test_state_given_back_to_the_same_pipeline_goes_on_bit_for_bit(
    pool: Pool, words: str, precision: str
) -> None:
    plan = f"{words} precision={precision}"
    saved, results, weights, state = pool.run(_through, ranks_of(plan), "tied_llama", plan)[0]
    found = pool.run(_goes_on, ranks_of(plan), "tied_llama", plan, saved)[0]
    assert found[0] == results
    assert trainings.differing(found[1], weights) == trainings.differing(found[2], state) == []


def _tells(model: str, plan: str) -> Any:
    """Names in order, and shapes, of all that an engine tells of its weights."""
    engine = programs.engine_of(task_of(model), plan)
    engine.step(programs.share_of(task_of(model).data(1)[0], engine))
    return (
        engine.weight_shapes(),
        [(name, tuple(t.shape)) for name, t in engine.full_parameters().items()],
        [(name, tuple(t.shape)) for name, t in engine.full_gradients().items()],
        engine.num_parameters,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("words", ["pp=2 schedule=zbv", "pp=3 dp=2 zero=3 schedule=bfs chunks=1"])
def test_a_pipeline_lists_all_weights_in_the_models_order(pool: Pool, words: str, model: str) -> None:
    first, *others = pool.run(_tells, ranks_of(words), model, f"{words} micro=3")
    assert first == _tells(model, "micro=3")
    named = dict(task_of(model).build().named_parameters())
    assert first[1] == [(name, tuple(p.shape)) for name, p in named.items()]
    assert first[2] == [(name, tuple(p.shape)) for name, p in named.items() if p.requires_grad]
    for other in others:
        assert other == (first[0], [], [], first[3])


def _refuses(words: str) -> Any:
    """The engine's errors for states of other models, and the names that loading changed."""
    engine = programs.engine_of(task_of("tied_llama"), words)
    engine.step(programs.share_of(task_of("tied_llama").data(1)[0], engine))
    held = [trainings.copied(engine.state())]
    dist.broadcast_object_list(held)
    state, messages = held[0], []
    others: list[dict[str, Tensor]] = [
        {key: t for key, t in state.items() if key != "engine/num_steps"},
        {key: t for key, t in state.items() if key != "weights/model.layers.4.mlp.up_proj.weight"},
        {**state, "weights/model.layers.9.mlp.up_proj.weight": torch.zeros(3)},
        {**state, "exp_avg/model.embed_tokens.weight": torch.zeros(3)},
    ]
    for other in others:
        with pytest.raises(CheckpointError) as caught:
            engine.load_state(other)
        messages.append(str(caught.value))
    return messages, trainings.differing(state, engine.state()) if engine.world.rank == 0 else engine.state()


def test_a_state_that_is_not_the_models_is_refused_on_every_rank_before_anything_changes(pool: Pool) -> None:
    """Also of blocks that are not this rank's."""
    ranks = pool.run(_refuses, 4, "pp=2 dp=2 zero=2 schedule=interleaved precision=fp64 micro=3")
    assert [changed or [] for _, changed in ranks] == [[]] * 4
    messages = ranks[0][0]
    assert all(found == messages for found, _ in ranks)
    assert [message.splitlines()[0] for message in messages] == [
        "this is not the state of an engine",
        *["the checkpoint is of another model or optimizer"] * 3,
    ]
    assert "weights/model.layers.4.mlp.up_proj.weight: missing" in messages[1]
    assert "weights/model.layers.9.mlp.up_proj.weight: nothing" in messages[2]
    assert "exp_avg/model.embed_tokens.weight: (3,)" in messages[3]
