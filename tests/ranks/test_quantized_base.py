"""Training over a frozen base of codes: as in one process with the same dequantized weights."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import plait
from plait.errors import PlaitError
from support import programs
from support.pool import Pool
from support.quantized_models import frozen_llama, lora_llama, lora_mixtral, task

PLANS = [
    "dp=1",
    "dp=2 micro=2",
    "dp=2 zero=1",
    "dp=2 zero=2 micro=2",
    "dp=2 zero=3",
    "dp=4 zero=3 shard=2 micro=3 prefetch=2",
    "tp=2",
    "tp=2x1",
    "tp=2x2",
    "tp=2 sp=true",
    "pp=2 micro=2",
    "pp=2 micro=2 schedule=zb-h1",
    "cp=2",
    "cp=2 zero=3",
    "dp=2 tp=2 zero=3 recompute=full",
    "recompute=selective",
    "dp=2 zero=3 offload=cpu",
]


def _trained(task: programs.Task, plan: str) -> programs.Trace | str:
    try:
        return programs.train_task(task, f"{plan} precision=fp64")
    except PlaitError as error:
        return str(error)


def _differs(pool: Pool, task: programs.Task, plan: str) -> None:
    parsed = plait.Plan.parse(plan)
    ours = pool.run(_trained, parsed.num_ranks, task, plan)[0]
    assert not isinstance(ours, str), ours
    oracle = programs.one_process_task(task, ours.first_weights, 1)
    programs.assert_same(ours, oracle)


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("build", [lora_llama, frozen_llama])
def test_a_plan_trains_as_one_process(
    pool: Pool, build: Callable[..., nn.Module], plan: str, base: str
) -> None:
    _differs(pool, task(build, own_loss="cp" in plan), f"{plan} base={base}")


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 ep=2", "dp=2 ep=2 zero=3", "dp=2 ep=2 tp=2 zero=1"])
def test_experts_of_codes_train_as_one_process(pool: Pool, plan: str) -> None:
    _differs(pool, task(lora_mixtral), f"{plan} base=nf4")


def _memory(plan: str) -> Any:
    engine = plait.parallelize(frozen_llama(), plan, loss=programs.summed_loss)
    rows = programs.SEQUENCES // engine.data_ranks // engine.plan.micro
    predicted = engine.estimated_memory((rows, programs.LENGTH))
    for batch in programs.batches(2):
        engine.step(programs.share_of(batch, engine))
    return predicted, engine.memory()


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=2 micro=3", "dp=2 zero=1", "dp=2 zero=3", "dp=2 zero=3 micro=3", "dp=2 zero=3 tp=2"]
)
@pytest.mark.parametrize("base", ["none", "nf4", "int8"])
def test_memory_is_within_3_percent_of_the_estimate(pool: Pool, plan: str, base: str) -> None:
    parsed = plait.Plan.parse(f"{plan} precision=bf16 base={base}")
    for predicted, measured in pool.run(_memory, parsed.num_ranks, str(parsed)):
        assert measured.total == pytest.approx(predicted.total, rel=0.03), (str(predicted), str(measured))
        assert (measured.parameters, measured.buffers) == (predicted.parameters, predicted.buffers)
