"""The training state on a grid: saved under any plan it goes on under any other, and is rank 0's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import plait
from plait.comm import connect
from support import hf_models, programs
from support.pool import Pool
from support.programs import Task
from support.trainings import copied, differing

PLANS = [
    "dp=1",
    "tp=2",
    "tp=3",
    "tp=2x2",
    "tp=2 sp=true dp=2 zero=3",
    "dp=2 zero=2 tp=2x1",
]
TASKS = {
    "tied llama": Task(hf_models.builder("tied_llama")),
    "gpt2": Task(hf_models.builder("gpt2"), own_loss=True),
}
STEPS, STEPS_BEFORE = 3, 2


def num_ranks(plan: str) -> int:
    return plait.Plan.parse(plan).num_ranks


def _steps(engine: plait.Engine, first: int, last: int) -> list[Any]:
    batches = programs.batches(last)[first:]
    return [engine.step(programs.share_of(batch, engine)) for batch in batches]


def _straight(task: str, plan: str) -> Any:
    """A training that is never interrupted, and its state after two steps: of every rank."""
    engine = programs.engine_of(TASKS[task], plan)
    _steps(engine, 0, STEPS_BEFORE)
    saved = copied(engine.state())
    results = _steps(engine, STEPS_BEFORE, STEPS)
    return saved, results, engine.full_parameters(), copied(engine.state())


def _continued(task: str, plan: str, states: list[dict[str, Tensor]]) -> Any:
    """Loads each state into one engine, first of other weights, and trains on; what came of each."""
    engine, found = programs.engine_of(TASKS[task], plan, seed=99), []
    for state in states:
        engine.load_state(state)
        results = _steps(engine, STEPS_BEFORE, STEPS)
        found.append((results, engine.full_parameters(), copied(engine.state())))
    return found


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.sweep if task == "gpt2" else ()) for task in TASKS]
)
def test_a_state_saved_under_any_plan_goes_on_under_any_other(pool: Pool, task: str) -> None:
    plans = [f"{plan} precision=fp64" for plan in PLANS]
    straight = [pool.run(_straight, num_ranks(plan), task, plan) for plan in plans]
    for ranks in straight:
        assert all(not saved and not weights for saved, _, weights, _ in ranks[1:]), "they are rank 0's"
        assert all(results == ranks[0][1] for _, results, _, _ in ranks), "ranks disagree"
    states = [ranks[0][0] for ranks in straight]
    assert all(state.keys() == states[0].keys() for state in states)
    _, expected, weights, _ = straight[0][0]
    for plan, ranks in zip(plans, straight, strict=True):
        for source, (results, found, state) in zip(
            plans, pool.run(_continued, num_ranks(plan), task, plan, states)[0], strict=True
        ):
            difference, name = programs.largest_difference(found, weights)
            assert difference < 1e-9, f"{source} -> {plan}: {name}"
            for mine, theirs in zip(results, expected, strict=True):
                assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
                assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)
            if source == plan:
                assert results == ranks[0][1]
                assert differing(state, ranks[0][3]) == []


# --- what is not this model's


def _refuses(plan: str, change: str) -> Any:
    """The error, and what loading changed."""
    engine = programs.engine_of(TASKS["tied llama"], plan)
    _steps(engine, 0, 1)
    before = copied(engine.state())
    held: list[Any] = [before]
    dist.broadcast_object_list(held)
    state = dict(held[0])
    key = "weights/model.layers.1.mlp.up_proj.weight"
    if change == "a rank's piece":
        state[key] = state[key][: len(state[key]) // 2]
    elif change == "missing":
        del state[key]
    else:
        state["exp_avg/model.layers.2.mlp.up_proj.weight"] = state[key]
    with pytest.raises(plait.errors.CheckpointError, match="of another model or optimizer") as caught:
        engine.load_state(state)
    return str(caught.value), differing(before, engine.state())


@pytest.mark.parametrize("change", ["a rank's piece", "missing", "one too many"])
def test_a_state_of_another_model_is_refused_by_all_before_anything_changes(pool: Pool, change: str) -> None:
    messages = pool.run(_refuses, 4, "tp=2x2 precision=fp64", change)
    assert all(changed == [] for _, changed in messages)
    assert len({message for message, _ in messages}) == 1
    assert "mlp.up_proj.weight" in messages[0][0]


# --- who is given what is whole


def _given_whole(plan: str) -> Any:
    engine = programs.engine_of(TASKS["gpt2"], plan)
    _steps(engine, 0, 1)
    shapes = {key: tuple(p.shape) for key, p in hf_models.model_of("gpt2").named_parameters()}
    found = engine.full_parameters(), engine.full_gradients(), engine.state()
    weights, gradients, _ = found
    if engine.world.rank == 0:
        assert {key: tuple(t.shape) for key, t in weights.items()} == shapes
        assert {key: tuple(t.shape) for key, t in gradients.items()} == shapes
    assert engine.weight_shapes() == {f"weights/{key}": shape for key, shape in shapes.items()}
    return [len(each) for each in found]


@pytest.mark.parametrize("plan", ["dp=2 tp=2 zero=3", "dp=2 tp=2x1 zero=1", "tp=2x2"])
def test_full_states_are_given_to_rank_0_only(pool: Pool, plan: str) -> None:
    ranks = pool.run(_given_whole, 4, plan)
    assert min(ranks[0]) > 10
    assert ranks[1:] == [[0, 0, 0]] * 3


# --- models that come with their weights


def _with_own_weights(plan: str) -> Any:
    """This rank's own weights, the engine's, and a step's loss."""
    torch.manual_seed(7 + connect().rank)
    own = hf_models.model_of("gpt2", on_meta=False)
    before = {name: p.detach().clone() for name, p in own.named_parameters()}
    engine = plait.parallelize(own, plan, loss=programs.summed_loss, optimizer_args=programs.ADAMW)
    weights = engine.full_parameters()
    return before, weights, _steps(engine, 0, 2)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2x1", "dp=2 tp=2 zero=3"])
def test_models_with_weights_take_rank_0s(pool: Pool, plan: str) -> None:
    ranks = pool.run(_with_own_weights, num_ranks(plan), f"{plan} precision=fp64")
    (mine, taken, results), other = ranks[0], ranks[-1][0]
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(mine[name], other[name]), "ranks agree by themselves"
    assert differing({key: taken[key] for key in mine}, mine) == []
    oracle = pool.run(_with_own_weights, 1, "dp=1 precision=fp64")[0]
    assert differing(oracle[1], taken) == []
    for found, expected in zip(results, oracle[2], strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-9)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-9)
