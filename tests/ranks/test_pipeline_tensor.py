"""Pipelines whose stages are sharded over `tp`, with data ranks too: the numbers of one process."""

import functools
from typing import Any

import pytest
import torch

import plait
from plait.plan import Plan
from support import pipeline_models, programs
from support.pool import Pool

BUILDS = {
    "llama": programs.llama,
    "tied llama": programs.tied_llama,
    "gpt2": functools.partial(pipeline_models.gpt2, layers=2),
    "untied gpt2": functools.partial(pipeline_models.gpt2, layers=2, tied=False),
}


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", "pp=2 tp=2 micro=3"),
        ("llama", "pp=2 tp=2x1 micro=2 schedule=gpipe"),
        ("tied llama", "pp=2 tp=2 sp=true micro=3"),
        pytest.param("tied llama", "pp=2 dp=2 tp=2 zero=3 micro=3 schedule=zb-h1", marks=pytest.mark.quick),
        ("gpt2", "pp=2 tp=2 micro=3 recompute=full"),
        ("gpt2", "pp=2 tp=2x1 micro=3"),  # the last stage looks up in the tied table, whose features are cut
        ("gpt2", "pp=2 tp=2x2 sp=true micro=3"),
        ("untied gpt2", "pp=2 tp=2x1 micro=3"),  # its forward reads the shape of what a placeholder looks up
    ],
)
def test_stages_cut_over_columns_and_rows_train_as_one_process(pool: Pool, model: str, plan: str) -> None:
    build, num_ranks = BUILDS[model], Plan.parse(plan).num_ranks
    ours = pool.run(programs.train, num_ranks, build, f"{plan} precision=fp64")[0]
    programs.assert_same(ours, programs.one_process(build, ours.first_weights, 3))


def _estimated(plan: str) -> tuple[Any, Any]:
    engine = plait.parallelize(programs.rough_llama(), f"{plan} precision=fp32", seed=3)
    batch = programs.batches(1)[0]
    sequences = programs.SEQUENCES // engine.plan.micro
    estimated = engine.estimated_memory((sequences, programs.LENGTH))
    loss = engine.evaluate(batch).loss_sum
    logits = engine.outputs(batch, lambda outputs: outputs.logits)
    engine.step(batch)
    return (estimated, engine.memory()), (loss, logits)


@pytest.mark.parametrize("plan", ["pp=2 tp=2 micro=3", "pp=2 tp=2 sp=true micro=3"])
def test_their_memory_is_estimated_and_they_evaluate_alike(pool: Pool, plan: str) -> None:
    [(_, alone)] = pool.run(_estimated, 1, "micro=3")
    for (estimated, measured), (loss, logits) in pool.run(_estimated, 4, plan):
        assert estimated.activations == pytest.approx(measured.activations, rel=0.05)
        assert estimated.parameters == measured.parameters
        assert loss == pytest.approx(alone[0], rel=1e-5)
        torch.testing.assert_close(logits, alone[1], rtol=1e-4, atol=1e-5)
