"""Training with gradients summed by a named algorithm: the one-process program's numbers."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.comm import World
from plait.comm import algorithms as by
from plait.errors import PlanError
from plait.plan.collectives import ALGORITHMS, Hosts
from support import programs
from support.pool import Pool
from support.trainings import assert_near, differing, engine_of, train, trained

PLANS = [
    "dp=2 zero=0 algorithm=ring",
    "dp=3 zero=0 algorithm=naive micro=2",
    "dp=3 zero=0 algorithm=halving",
    "dp=4 zero=0 algorithm=tree",
    "dp=4 zero=0 algorithm=two-level",
    "dp=3 zero=2 algorithm=ring micro=2",
    "dp=2 zero=2 algorithm=naive",
    "dp=3 zero=2 algorithm=tree",
    "dp=4 zero=2 algorithm=halving micro=3 accumulate=unsharded",
    "dp=3 zero=2 algorithm=two-level",
    "dp=4 zero=2 shard=2 algorithm=ring micro=3",
    "dp=4 zero=1 shard=2 algorithm=tree",
    "dp=2 zero=2 shard=1 offload=cpu algorithm=ring micro=3",
    "dp=4 zero=3 shard=2 algorithm=halving micro=3",
    "dp=3 zero=3 algorithm=two-level",
]


def _train(task: programs.Task, plan: str, cut: dict[int, Hosts]) -> programs.Trace:
    """On simulated hosts: by the size of a group, how it is cut."""
    with mock.patch.object(by, "ranks_by_host", lambda group: cut[group.size]):
        return programs.train_task(task, plan)


CUTS: dict[int, Hosts] = {3: ((0, 1), (2,)), 4: ((0, 2), (1, 3))}


@pytest.mark.parametrize("build", [programs.tied_llama, programs.branches])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_and_weights_equal_the_one_process_programs(pool: Pool, plan: str, build: Any) -> None:
    parsed = plait.Plan.parse(plan)
    task = programs.Task(build)
    ours = pool.run(_train, parsed.dp, task, f"{plan} precision=fp64", CUTS)[0]
    oracle = programs.one_process_task(task, ours.first_weights, parsed.dp * parsed.micro)
    programs.assert_same(ours, oracle)


def _deaf(task: programs.Task, plan: str) -> programs.Trace:
    with mock.patch.object(by, "run_steps"):
        return programs.train_task(task, plan)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 zero=0 algorithm=ring",
        "dp=3 zero=2 algorithm=halving",
        "dp=2 zero=0 micro=3 algorithm=two-level",
        "dp=2 zero=2 shard=1 micro=3 offload=cpu algorithm=ring",
    ],
)
def test_without_its_messages_parity_fails(pool: Pool, plan: str) -> None:
    task = programs.Task(programs.llama)
    parsed = plait.Plan.parse(plan)
    ours = pool.run(_deaf, parsed.dp, task, f"{plan} precision=fp64")[0]
    oracle = programs.one_process_task(task, ours.first_weights, parsed.dp * parsed.micro)
    with pytest.raises(AssertionError, match="differs by"):
        programs.assert_same(ours, oracle)


def _weights_everywhere(plan: str) -> dict[str, Tensor]:
    engine = engine_of(plan)
    train(engine, last=3)
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("words", ["", "precision=bf16", "reduce=bf16", "zero=2 precision=bf16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_keep_the_same_bits(pool: Pool, algorithm: str, words: str) -> None:
    first, *others = pool.run(_weights_everywhere, 3, f"dp=3 algorithm={algorithm} {words}")
    assert all(differing(other, first) == [] for other in others)


@pytest.mark.parametrize(
    "words", ["dp=3 zero=0 algorithm=ring", "dp=4 zero=3 shard=2 micro=3 algorithm=halving"]
)
def test_partial_sums_in_bf16_train_nearly_the_same(pool: Pool, words: str, wide: Any, start: Any) -> None:
    found = pool.run(trained, int(words[3]), f"{words} reduce=bf16")[0]
    assert_near(found, wide, start, weights=0.04, losses=1e-3)


def _buffers(plan: str) -> tuple[int, int]:
    engine = engine_of(plan, programs.wide_llama)
    shape = programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH
    estimated = engine.estimated_memory(shape).buffers
    train(engine, last=1)
    return estimated, engine.memory().buffers


@pytest.mark.parametrize(
    "words",
    [
        "dp=2 zero=0 algorithm=ring",
        "dp=2 zero=0 micro=3 algorithm=tree reduce=bf16",
        "dp=3 zero=2 algorithm=halving precision=bf16",
        "dp=4 zero=3 shard=2 algorithm=ring",
        "dp=4 zero=1 shard=2 micro=3 algorithm=naive reduce=bf16",
    ],
)
def test_bytes_held_for_peers_are_estimated(pool: Pool, words: str) -> None:
    for estimated, held in pool.run(_buffers, int(words[3]), words):
        assert 0.95 * estimated <= held <= estimated


def _scratch(plan: str) -> tuple[int, int]:
    engine = engine_of(plan)
    taken = engine._parts.sharded.stages[0].reduction.scratch_bytes
    reserved = by.AlgorithmReduce.reserve
    with mock.patch.object(by.AlgorithmReduce, "reserve", autospec=True, side_effect=reserved) as grows:
        train(engine, last=1)
    return taken, grows.call_count


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_takes_no_more_memory_for_what_it_receives(pool: Pool, algorithm: str, zero: int) -> None:
    """The reserve is the largest unit's."""
    found = pool.run(_scratch, 3, f"dp=3 zero={zero} algorithm={algorithm} precision=bf16")
    assert [grown for _, grown in found] == [0] * 3
    assert found[0][0] > 0


def test_a_gpu_is_refused_a_named_algorithm() -> None:
    world = World.alone(torch.device("cuda", 0))
    with pytest.raises(PlanError, match="need CPU ranks") as caught:
        plait.parallelize(programs.llama(), "algorithm=ring", world=world)
    assert "algorithm=auto" in str(caught.value)
