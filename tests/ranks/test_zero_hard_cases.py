"""Models, optimizers and options that make it hard to cut state over ranks: the same numbers all the same.

Every case is compared with the one-process program: losses, norms, all gradients, the weights after the last
step; float64, clipping and weight decay active, labels masked unevenly.
"""

import warnings
from typing import Any

import pytest
import torch

from plait.train.optimizer import param_groups
from plait.train.sections import OptimizerConfig
from support import edge_case_models, programs
from support.pool import Pool, PoolOver
from support.programs import Task


@pytest.fixture(params=["host", "gloo"])
def pool(request: pytest.FixtureRequest, workers: Pool) -> PoolOver:
    """Both ways: at stage 3 parameters are memory that ranks share, or are gathered."""
    return workers.over(request.param)


# One plan per stage and one hybrid; what else there is to vary varies along.
PLANS = [
    "dp=3 zero=1",
    "dp=2 micro=3 zero=2",
    "dp=2 micro=3 zero=3 prefetch=2",
    "dp=4 zero=3 shard=2 recompute=full",
]
every_stage = pytest.mark.parametrize("plan", PLANS)
# Where the stages between these run the same lines: how an optimizer updates a range, how blocks are named.
first_and_last_stage = pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(plan, marks=pytest.mark.sweep) for plan in PLANS[1:3]), PLANS[3]]
)


def check_parity(pool: Pool, task: Task, plan: str) -> programs.Trace:
    words = dict(word.split("=") for word in plan.split())
    ours = pool.run(programs.train_task, int(words["dp"]), task, f"{plan} precision=fp64")[0]
    oracle = programs.one_process_task(
        task, ours.first_weights, micros=int(words["dp"]) * int(words.get("micro", 1))
    )
    programs.assert_same(ours, oracle)
    first, last = ours.first_weights, ours.weights
    trained = {name for name in oracle.gradients[0] if not torch.equal(first[name], last[name])}
    assert trained, "nothing was trained"
    assert all(torch.equal(first[name], last[name]) for name in first.keys() - oracle.gradients[0].keys())
    return ours


# --- parameters


@pytest.mark.quick
@every_stage
def test_tied_weights_train_as_one(pool: Pool, plan: str) -> None:
    ours = check_parity(pool, Task(programs.tied_llama), plan)
    assert "lm_head.weight" not in ours.weights


@every_stage
def test_a_weight_that_another_module_uses_trains_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.borrowed), plan)


@every_stage
def test_a_weight_inside_a_block_that_the_root_reads_trains_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.reached), plan)


@every_stage
def test_frozen_blocks_before_and_between_trained_ones_change_nothing(pool: Pool, plan: str) -> None:
    ours = check_parity(pool, Task(edge_case_models.frozen_blocks), plan)
    assert not any(name.startswith(("embedding.", "blocks.0.", "blocks.2.")) for name in ours.gradients[0])
    torch.set_default_dtype(torch.float64)
    try:
        original = dict(edge_case_models.frozen_blocks().named_parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(ours.first_weights[name], p) for name, p in original.items())


@every_stage
def test_a_frozen_model_with_trained_corrections_of_low_rank_trains_the_same(pool: Pool, plan: str) -> None:
    ours = check_parity(pool, Task(edge_case_models.adapted), plan)
    assert {name.rpartition(".")[2] for name in ours.gradients[0]} == {"a", "b"}


def _held(plan: str) -> Any:
    engine = programs.engine_of(Task(edge_case_models.wide_adapted), plan)
    engine.step(programs.share_of(programs.batches(1)[0], engine))
    return engine.memory(), sum(w.numel() for w in engine.full_parameters().values())


@pytest.mark.parametrize(("plan", "share"), [("dp=2 zero=2", 1), ("dp=2 zero=3", 2), ("dp=4 zero=3", 4)])
def test_frozen_weights_are_cut_where_parameters_are(pool: Pool, plan: str, share: int) -> None:
    ranks = pool.over("gloo").run(_held, int(plan[3]), f"{plan} precision=fp32")
    num_elements = ranks[0][1]
    for memory, _ in ranks:
        assert memory.parameters == pytest.approx(4 * num_elements / share, rel=0.03)
        assert memory.optimizer < 0.2 * 8 * num_elements


@every_stage
def test_parameters_unused_in_a_step_or_on_a_rank_count_as_zero_gradients(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(programs.branches), plan)


@every_stage
def test_a_block_that_all_ranks_leave_out_in_some_steps_trains_the_same(pool: Pool, plan: str) -> None:
    task = Task(edge_case_models.skipping, data=edge_case_models.numbered_batches, steps=4)
    ours = check_parity(pool, task, plan)
    used = [float(gradients["blocks.1.up.weight"].abs().max()) > 0 for gradients in ours.gradients]
    assert used == [False, True, False, True]


@every_stage
def test_a_block_that_one_rank_leaves_out_trains_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.choosing), plan)


@every_stage
def test_parameters_and_units_smaller_than_the_shard_degree_train_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.tiny), plan)


@pytest.mark.parametrize("plan", [*PLANS, "dp=4 zero=3", "dp=4 zero=3 prefetch=9 reshard=step"])
def test_units_of_unequal_size_train_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.uneven), plan)


@every_stage
def test_weights_of_three_dtypes_in_one_unit_become_the_plans(pool: Pool, plan: str) -> None:
    ours = check_parity(pool, Task(edge_case_models.many_dtypes), plan)
    assert {w.dtype for w in ours.weights.values()} == {torch.float64}
    narrow = ours.first_weights["blocks.0.up.weight"]
    assert torch.equal(narrow, narrow.bfloat16().double()), "the first weights are not the model's own"


@pytest.mark.parametrize("plan", [plan.replace(" recompute=full", "") for plan in PLANS])
def test_a_model_that_is_one_linear_trains_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.bare_linear, data=edge_case_models.float_batches), plan)


@every_stage
def test_modules_registered_in_another_order_than_they_run_train_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(edge_case_models.disordered), plan)


@pytest.mark.parametrize(
    "blocks", [edge_case_models.by_class, edge_case_models.by_classes, edge_case_models.by_list]
)
@first_and_last_stage
def test_blocks_can_be_named_by_class_and_by_list(pool: Pool, plan: str, blocks: Any) -> None:
    check_parity(pool, Task(edge_case_models.separate, blocks=blocks), plan)


def _unit_names(blocks: Any) -> Any:
    engine = programs.engine_of(Task(edge_case_models.separate, blocks=blocks), "dp=2 zero=3")
    return [unit.name for unit in engine.layout.units]


@pytest.mark.parametrize("blocks", [edge_case_models.by_class, edge_case_models.by_list])
def test_named_blocks_are_units_of_their_own(pool: Pool, blocks: Any) -> None:
    names = pool.run(_unit_names, 2, blocks)[0]
    assert {"first", "second", "third"} <= set(names)


@every_stage
def test_hooks_of_the_user_see_whole_gradients_and_what_they_return_counts(pool: Pool, plan: str) -> None:
    for build in (programs.llama, edge_case_models.uneven):
        check_parity(pool, Task(build, prepare=edge_case_models.hook_gradients), plan)


# --- optimizers and clipping


def recipe_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    groups = [{"match": "*o_proj*", "lr": 2e-3}, {"match": "*norm.weight", "weight_decay": 0.1}]
    config = OptimizerConfig.model_validate({"lr": 1e-3, "groups": groups})
    return param_groups(config, model) or []


@every_stage
def test_groups_of_a_recipe_train_the_same(pool: Pool, plan: str) -> None:
    check_parity(pool, Task(programs.llama, groups=recipe_groups), plan)


@pytest.mark.parametrize("groups", [edge_case_models.two_groups, edge_case_models.interleaved_groups])
@every_stage
def test_groups_with_options_of_their_own_train_the_same(pool: Pool, plan: str, groups: Any) -> None:
    check_parity(pool, Task(programs.llama, groups=groups), plan)
    check_parity(pool, Task(edge_case_models.uneven, groups=groups), plan)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("SGD", {"lr": 0.3}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        ("Adagrad", {"lr": 1e-2, "weight_decay": 0.01}),
        ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
        ("NAdam", {"lr": 1e-3, "weight_decay": 0.01}),
        ("Adam", {"lr": 1e-3, "amsgrad": True}),
        ("Lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ],
)
@first_and_last_stage
def test_element_wise_optimizers_train_the_same(
    pool: Pool, plan: str, kind: str, arguments: dict[str, Any]
) -> None:
    check_parity(pool, Task(programs.llama, optimizer=kind, arguments=arguments), plan)


@every_stage
def test_gradients_clipped_by_value_are_those_of_one_process(pool: Pool, plan: str) -> None:
    """SGD, whose update is proportional to what clipping leaves of a gradient."""
    limit = 1e-3
    task = Task(programs.llama, optimizer="SGD", arguments={"lr": 0.3}, clip_norm=None, clip_value=limit)
    ours = check_parity(pool, task, plan)
    largest = [float(g.abs().max()) for gradients in ours.gradients for g in gradients.values()]
    assert max(largest) == pytest.approx(limit), "clipping was not active"


def _sparse_llama() -> Any:
    model: Any = programs.llama()
    model.model.embed_tokens.sparse = True
    return model


def _trained_with_sparse_gradients(plan: str) -> tuple[programs.Trace, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trace = programs.train(_sparse_llama, plan)
    return trace, [str(warning.message) for warning in said]


@pytest.mark.parametrize("plan", ["dp=3 zero=1", "dp=2 micro=3 zero=3 prefetch=2"])
def test_sparse_gradients_of_embeddings_are_made_dense_and_it_is_said(pool: Pool, plan: str) -> None:
    ranks = int(plan[3])
    ours, said = pool.run(_trained_with_sparse_gradients, ranks, f"{plan} precision=fp64")[0]
    micros = ranks * (3 if "micro" in plan else 1)
    programs.assert_same(ours, programs.one_process_task(Task(programs.llama), ours.first_weights, micros))
    assert [text for text in said if "model.embed_tokens: sparse=True saves nothing" in text]
