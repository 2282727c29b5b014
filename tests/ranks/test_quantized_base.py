"""Training over a frozen base of codes: as in one process with the same dequantized weights."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import PlaitError
from plait.parallel import quantized_base
from plait.plan.quantized import FORMATS
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


_CASES = [(build, plan, base) for build in (lora_llama, frozen_llama) for plan in PLANS for base in FORMATS]
# Adapters do not know hidden features that are sharded over rows.
_CASES = [case for case in _CASES if (case[0], case[1]) != (lora_llama, "tp=2x2")]


def _is_selected(build: Callable[..., nn.Module], plan: str, base: str) -> bool:
    """Each plan once, in turn with adapters and without, in 4 and 8 bits."""
    number = PLANS.index(plan)
    by_turn = (lora_llama, frozen_llama)[number % 2] if plan != "tp=2x2" else frozen_llama
    return build is by_turn and base == ("nf4", "int8")[number // 2 % 2]


@pytest.mark.parametrize(
    ("build", "plan", "base"),
    [pytest.param(*case, marks=() if _is_selected(*case) else pytest.mark.sweep) for case in _CASES],
)
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


def _weights(plan: str, *, splits: bool = False) -> dict[str, Tensor]:
    """The dequantized weights; with `splits`, each shard quantized by itself where it splits blocks."""
    with mock.patch.object(quantized_base, "splits_blocks", return_value=False) if splits else nullcontext():
        return programs.engine_of(task(frozen_llama), f"{plan} precision=fp64 base=nf4").full_parameters()


@pytest.mark.parametrize("plan", ["dp=3 zero=3", "tp=2", "tp=2x2", "dp=2 pp=2 zero=1"])
def test_codes_are_the_same_under_every_plan(pool: Pool, plan: str) -> None:
    parsed = plait.Plan.parse(plan)
    ours, alone = pool.run(_weights, parsed.num_ranks, plan)[0], _weights("dp=1")
    assert ours.keys() == alone.keys()
    assert all(torch.equal(ours[name], alone[name]) for name in alone)


def test_shards_that_are_quantized_by_themselves_have_other_values(pool: Pool) -> None:
    """A plan that is refused: its shards have halves of blocks."""
    ours, alone = pool.run(_weights, 4, "tp=4", splits=True)[0], _weights("dp=1")
    changed = {name.rpartition(".layers.0.")[2] for name in alone if not torch.equal(ours[name], alone[name])}
    assert "self_attn.o_proj.weight" in changed


def _checks(plan: str) -> tuple[float, float]:
    """Loss of a step after a checked first gradient, and in evaluation; ranks are compared."""
    batch = programs.batches(1)[0]
    engine = programs.engine_of(task(lora_llama, probe=batch), f"{plan} precision=fp64")
    engine.check_replicas()
    own = programs.share_of(batch, engine)
    return engine.step(own).loss, engine.evaluate(own).loss_sum


def test_gradients_are_checked_and_replicas_compared(pool: Pool) -> None:
    alone = _checks("base=nf4")
    for found in pool.run(_checks, 4, "dp=4 zero=3 shard=2 base=nf4"):
        assert found == pytest.approx(alone, rel=1e-9)
