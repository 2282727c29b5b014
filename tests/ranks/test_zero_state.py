"""Memory of a rank at every stage, estimated and measured, and state that resumes under any other plan."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import plait
from plait.plan import MemoryUse
from support import edge_case_models, programs
from support.pool import Pool, Ranks
from support.programs import Task

# --- memory

MODEL_STATE = ("parameters", "gradients", "master", "optimizer", "host", "disk")


def _memory(plan: str, build: Any = programs.wide_llama) -> Any:
    """Estimated before a step, measured after two, and the number of elements."""
    engine = plait.parallelize(
        build(), plan, optimizer_args=programs.ADAMW, loss=programs.summed_loss, seed=3
    )
    micro_batch = programs.SEQUENCES // engine.plan.dp // engine.plan.micro
    predicted = engine.estimated_memory((micro_batch, programs.LENGTH))
    for batch in programs.batches(2):
        engine.step(programs.share_of(batch, engine))
    return predicted, engine.memory(), engine.num_parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "words",
    [
        "dp=2",
        "dp=2 micro=3",
        "dp=3 zero=1",
        "dp=2 zero=1 micro=3",
        "dp=2 zero=2",
        "dp=4 zero=2 micro=3",
        "dp=2 zero=2 micro=3 accumulate=unsharded",
        pytest.param("dp=2 zero=3", marks=pytest.mark.quick),
        "dp=4 zero=3 micro=3 prefetch=0",
        "dp=2 zero=3 micro=3 reshard=step accumulate=unsharded",
        "dp=4 zero=3 shard=2 prefetch=2 recompute=full",
    ],
)
def test_bytes_of_model_state_are_estimated_within_2_percent(pool: Pool, words: str, precision: str) -> None:
    """For the rank that holds most; where a rank's range ends in padding it may hold less."""
    ranks = pool.run(_memory, int(words[3]), f"{words} precision={precision}")
    for category in MODEL_STATE:
        estimated = [getattr(predicted, category) for predicted, _, _ in ranks]
        held = [getattr(measured, category) for _, measured, _ in ranks]
        assert max(held) == pytest.approx(max(estimated), rel=0.02), category
        assert all(mine <= 1.02 * said for mine, said in zip(held, estimated, strict=True)), category
    for predicted, measured, _ in ranks:
        assert measured.buffers == predicted.buffers


def _llamas_memory(plan: str) -> tuple[MemoryUse, MemoryUse]:
    engine = programs.engine_of(programs.Task(programs.rough_llama), plan)
    shape = (programs.SEQUENCES // engine.data_ranks // engine.plan.micro, programs.LENGTH)
    predicted = engine.estimated_memory(shape)
    for batch in programs.batches(2):
        engine.step(programs.share_of(batch, engine))
    return predicted, engine.memory()


@pytest.mark.parametrize("words", ["zero=1", "zero=2 recompute=selective", "zero=3", "zero=3 recompute=full"])
def test_activations_and_buffers_are_estimated_to_the_byte_at_every_stage(pool: Pool, words: str) -> None:
    for predicted, measured in pool.run(_llamas_memory, 2, f"dp=2 {words} precision=bf16"):
        assert predicted.activations == pytest.approx(measured.activations, rel=0.02)
        assert (predicted.buffers, predicted.parameters) == (measured.buffers, measured.parameters)


def per_element(pool: Ranks, plan: str) -> list[tuple[MemoryUse, dict[str, float]]]:
    """Each rank's measured bytes, and the same per element of the whole model."""
    found = []
    for _, measured, num_elements in pool.run(_memory, int(plan[3]), plan):
        shares = {c: getattr(measured, c) / num_elements for c in MODEL_STATE}
        found.append((measured, shares))
    return found


@pytest.mark.parametrize("transport", ["host", "gloo"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("words", "cut"),  # over how many ranks the stage cuts what it cuts
    [
        ("dp=2 micro=3", 1),
        ("dp=2 micro=3 zero=1", 2),
        ("dp=4 micro=3 zero=1", 4),
        ("dp=2 micro=3 zero=2", 2),
        ("dp=4 micro=3 zero=2", 4),
        ("dp=4 micro=3 zero=2 shard=2", 2),
        ("dp=2 micro=3 zero=3", 2),
        ("dp=4 micro=3 zero=3", 4),
        ("dp=4 micro=3 zero=3 shard=2", 2),
    ],
)
def test_bytes_per_element_are_those_of_zeros_table(
    pool: Pool, words: str, cut: int, precision: str, transport: str
) -> None:
    """Rajbhandari et al. 1910.02054, figure 1, with sums of gradients in 4 bytes: 2 + 4 + 12 in bf16.

    Parameters in memory that ranks share are each rank's range from stage 1 on.
    """
    narrow = precision == "bf16"
    compute, stage = 2 if narrow else 4, int(words.partition("zero=")[2][:1] or 0)
    is_cut = stage == 3 or (stage and transport == "host")
    for measured, held in per_element(pool.over(transport), f"{words} precision={precision}"):
        assert held["parameters"] == pytest.approx(compute / (cut if is_cut else 1), rel=0.02)
        assert held["optimizer"] == pytest.approx(8 / cut, rel=0.02)
        assert held["master"] == pytest.approx((4 / cut) if narrow else 0, rel=0.02)
        if stage >= 2:
            assert held["gradients"] == pytest.approx(4 / cut, rel=0.02)
        elif stage == 1:  # whole sums of micro-batches, and the range they are reduced into
            assert 0.98 * 4 <= held["gradients"] <= 1.02 * (4 + 4 / cut)
        else:
            assert held["gradients"] == pytest.approx(4, rel=0.02)
        assert measured.host == measured.disk == 0


INNER = 640


def _deep() -> torch.nn.Module:
    return edge_case_models.Stack([edge_case_models.Block(INNER) for _ in range(12)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_parameters_in_use_are_few_units_at_a_time(pool: Pool, prefetch: int, precision: str) -> None:
    """The unit in use, the one before it, those ahead and two whose gradients travel, of 12 and two ends."""
    plan = f"dp=2 zero=3 prefetch={prefetch} precision={precision}"
    _, measured, num_elements = pool.over("gloo").run(_memory, 2, plan, _deep)[0]
    _, kept, _ = pool.over("gloo").run(_memory, 2, f"dp=2 zero=3 reshard=step precision={precision}", _deep)[
        0
    ]
    compute = 2 if precision == "bf16" else 4
    block = 2 * edge_case_models.WIDTH * INNER + edge_case_models.WIDTH + INNER
    ends = num_elements - 12 * block
    gathered, travelling = (ends + (2 + prefetch) * block) * compute, (ends + 2 * block) * 4
    assert 0 < measured.buffers <= 1.05 * (gathered + 2 * travelling)
    assert kept.buffers >= 0.98 * num_elements * compute
    assert measured.buffers < kept.buffers


# --- state under other plans

# Always 12 micro-batches of a sequence: `branches` looks at each one's first token.
PLANS = [
    "dp=2 micro=6",
    "dp=2 micro=6 zero=1",
    "dp=2 micro=6 zero=3",
    "dp=4 micro=3 zero=3 shard=2",
    "dp=3 micro=4 zero=2",
    "dp=1 micro=12 zero=3",
]
TASKS = {
    "llama": Task(programs.tied_llama),
    "branches": Task(programs.branches),
    "frozen": Task(edge_case_models.frozen_blocks),
    "momentum": Task(edge_case_models.tiny, optimizer="SGD", arguments={"lr": 0.1, "momentum": 0.9}),
}
STEPS, STEPS_BEFORE = 3, 2


def _train_from(task: str, plan: str, states: list[dict[str, Tensor]]) -> Any:
    """Loads each state into one engine, first of other weights, and trains on; what came of each."""
    engine, found = programs.engine_of(TASKS[task], plan, seed=99), []
    for state in states:
        engine.load_state(state)
        assert engine.num_steps == STEPS_BEFORE
        batches = programs.batches(STEPS)[STEPS_BEFORE:]
        results = [engine.step(programs.share_of(batch, engine)) for batch in batches]
        found.append((engine.full_parameters(), results, _copied(engine.state())))
    return found


def _train_and_save(task: str, plan: str) -> Any:
    engine = programs.engine_of(TASKS[task], plan)
    for batch in programs.batches(STEPS_BEFORE):
        engine.step(programs.share_of(batch, engine))
    return _copied(engine.state()), engine.world.rank


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in state.items()}


def _train_through(task: str, plan: str) -> Any:
    engine = programs.engine_of(TASKS[task], plan)
    batches = programs.batches(STEPS)
    results = [engine.step(programs.share_of(batch, engine)) for batch in batches]
    return engine.full_parameters(), results[STEPS_BEFORE:], _copied(engine.state())


@pytest.mark.parametrize("task", TASKS)
def test_state_saved_under_any_plan_goes_on_under_any_other(pool: Pool, task: str) -> None:
    plans = [f"{plan} precision=fp64" for plan in PLANS]
    expected, results, _ = pool.run(_train_through, 1, task, "dp=1 micro=12 precision=fp64")[0]
    saved = [pool.run(_train_and_save, int(plan[3]), task, plan) for plan in plans]
    for ranks in saved:
        assert all(not state for state, rank in ranks if rank), "whole tensors are rank 0's"
        assert ranks[0][0].keys() == saved[0][0][0].keys()
        assert {k: t.shape for k, t in ranks[0][0].items()} == {k: t.shape for k, t in saved[0][0][0].items()}
    states = [ranks[0][0] for ranks in saved]
    for plan in plans:
        for source, (weights, continued, _) in zip(
            plans, pool.run(_train_from, int(plan[3]), task, plan, states)[0], strict=True
        ):
            difference, name = programs.largest_difference(weights, expected)
            assert difference < 1e-9, f"{source} -> {plan}: {name}"
            for mine, theirs in zip(continued, results, strict=True):
                assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
                assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "words",
    [
        "dp=2",
        "dp=3 zero=1",
        "dp=2 zero=2 micro=3",
        "dp=2 zero=3 micro=3",
        "dp=4 zero=3 shard=2",
        "dp=2 zero=3 reshard=step",
    ],
)
@pytest.mark.parametrize("task", ["llama", "branches"])
def test_state_given_back_to_the_same_plan_goes_on_bit_for_bit(
    pool: Pool, words: str, precision: str, task: str
) -> None:
    plan, ranks = f"{words} precision={precision}", int(words[3])
    weights, results, state = pool.run(_train_through, ranks, task, plan)[0]
    saved = pool.run(_train_and_save, ranks, task, plan)[0][0]
    found = pool.run(_train_from, ranks, task, plan, [saved])[0][0]
    assert found[1] == results
    assert all(torch.equal(found[0][name], weights[name]) for name in weights)
    assert found[2].keys() == state.keys()
    assert all(torch.equal(found[2][key], state[key]) for key in state)


def _first_state(plan: str) -> Any:
    """A state of before the first step, when the optimizer remembers nothing."""
    engine = programs.engine_of(TASKS["llama"], plan)
    return _copied(engine.state())


def test_a_state_of_before_the_first_step_can_be_loaded(pool: Pool) -> None:
    state = pool.run(_first_state, 2, "dp=2 zero=3 precision=fp64")[0]
    assert int(state["engine/num_steps"]) == 0
    loaded, fresh = pool.run(_from_first_state, 3, "dp=3 zero=1 precision=fp64", state)[0]
    difference, name = programs.largest_difference(loaded, fresh)
    assert difference == 0, name


def _from_first_state(plan: str, state: dict[str, Tensor]) -> Any:
    engines = [programs.engine_of(TASKS["llama"], plan, seed=seed) for seed in (99, 3)]
    engines[0].load_state(state)
    for engine in engines:
        engine.step(programs.share_of(programs.batches(1)[0], engine))
    return [engine.full_parameters() for engine in engines]


def _refuses(plan: str) -> bool:
    engine = programs.engine_of(TASKS["llama"], plan)
    before = _copied(engine.full_parameters())
    state = {"engine/num_steps": torch.tensor(1), "weights/nothing": torch.zeros(3)}
    with pytest.raises(plait.errors.CheckpointError, match="another model"):
        engine.load_state(state)
    after = engine.full_parameters()
    return all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("plan", ["dp=2 zero=1", "dp=2 zero=3"])
def test_state_of_another_model_is_refused_by_all_before_anything_changes(pool: Pool, plan: str) -> None:
    assert pool.run(_refuses, 2, plan) == [True, True]


def _loss_with_other_frozen_weights(plan: str) -> Any:
    engine = programs.engine_of(TASKS["frozen"], plan)
    batches = programs.batches(2)
    engine.step(programs.share_of(batches[0], engine))
    trains = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    held: list[Any] = [_copied(engine.state())]
    if engine.world.size > 1:
        dist.broadcast_object_list(held)
    other = {
        key: tensor * 1.5
        if key.startswith("weights/") and key.removeprefix("weights/") not in trains
        else tensor
        for key, tensor in held[0].items()
    }
    engine.load_state(other)
    return engine.evaluate(programs.share_of(batches[1], engine)).loss_sum


def test_frozen_weights_that_are_loaded_are_seen_by_all_ranks(pool: Pool) -> None:
    alone = pool.run(_loss_with_other_frozen_weights, 1, "dp=1 precision=fp64")[0]
    for plan in ("dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=4 zero=1 shard=2"):
        losses = pool.run(_loss_with_other_frozen_weights, int(plan[3]), f"{plan} precision=fp64")
        assert losses == pytest.approx([alone] * len(losses), rel=1e-9), plan
