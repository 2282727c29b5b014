"""Laws of every plan: more of a resource is never slower, and sharding and recomputation never need
more memory.

A case is a random plan of a random model on a random cluster; the seeds are those of its number."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.schedule.generators import GENERATORS
from plait.planner import ModelShape, Workload, cluster, estimate_step
from plait.planner.cluster import Cluster
from plait.planner.memory import rank_layouts
from plait.planner.space import Decided, Space
from plait.planner.workload import PLAIT

MODELS = [
    ModelShape.named(name)
    for name in ("gpt2-xl", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b")
]
MODELS.append(ModelShape.named("llama-3-8b").with_adapter(16))
CLUSTERS = ("dgx-h100:1", "dgx-h100:4", "dgx-a100:8", "gb200-nvl72:1", "dgx-h100:12gpus")
ROUNDING = 1 + 1e-9
Case = tuple[ModelShape, Cluster, Workload, Plan]


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    while True:
        model, machine = draw.choice(MODELS), cluster(draw.choice(CLUSTERS))
        work = Workload(draw.choice([2048, 8192, 32768]), machine.num_devices * draw.choice([1, 2, 8]))
        space, plan = Space(model, machine.num_devices, work.batch, sequence=work.sequence), Plan()
        for level in list(Decided)[:-1]:
            children = space.expand(plan, level)
            if not children:
                break
            plan = draw.choice(children)
        else:
            yield model, machine, work, plan


@pytest.mark.parametrize(
    "seed",
    [*range(2), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 25))],
)
def test_plans_obey_the_laws_of_their_resources(seed: int) -> None:
    """20 plans of each seed."""
    for _, case in zip(range(20), cases(seed), strict=False):
        broken = list(broken_laws(*case))
        assert not broken, (case[0].name, case[1].name, case[2], str(case[3]), broken)


def broken_laws(model: ModelShape, machine: Cluster, work: Workload, plan: Plan) -> Iterator[str]:
    """Yield the names of the laws that a plan breaks."""
    base = estimate_step(model, plan, machine, work)
    device = machine.device
    faster = {
        "link": replace(machine, device=replace(device, link_bytes_per_s=2 * device.link_bytes_per_s)),
        "network": replace(machine, network_bytes_per_s=2 * machine.network_bytes_per_s),
        "memory bandwidth": replace(
            machine, device=replace(device, memory_bytes_per_s=1.5 * device.memory_bytes_per_s)
        ),
        "peak": replace(
            machine,
            device=replace(device, peak_flops={k: 1.5 * v for k, v in device.peak_flops.items()}),
        ),
    }
    for name, better in faster.items():
        if estimate_step(model, plan, better, work).step_s > base.step_s * ROUNDING:
            yield f"{name}: a faster one makes the step slower"
    yield from _memory(model, machine, work, plan)
    yield from _work(model, machine, work, plan)


def _memory(model: ModelShape, machine: Cluster, work: Workload, plan: Plan) -> Iterator[str]:
    """Laws of tensors: offloaded states have buffers, and more groups of ranks more communicators."""
    plan = replace(plan, offload="none")

    def memory(**keys: object) -> float:
        try:
            changed = plan.changed(**keys)
        except PlanError:
            return float("nan")  # compares as False
        return estimate_step(model, changed, machine, work).memory.tensors

    full, none = memory(recompute="full"), memory(recompute="none")
    if full > none * ROUNDING:
        yield "recompute=full keeps more than none"
    if plan.token_ranks > 1:
        sharding = {"accumulate": "auto", "reshard": "use"}
        of_zero = [memory(zero=zero, shard=plan.shard if zero else 0, **sharding) for zero in range(4)]
        # Of few units, as many are in buffers as there are: gradients and copies of three.
        units = [unit for layout in rank_layouts(model, plan, PLAIT) for unit in layout.units]
        in_flight = 3 * (4 + 2) * max(unit.numel for unit in units)
        for zero, (less, more) in enumerate(pairwise(of_zero), 1):
            if more > less * ROUNDING + in_flight * (zero > 1):
                yield f"zero={zero} needs more memory than {zero - 1}: {of_zero}"
    # Deferred products of weights keep more than one batch does.
    defers = plan.pp > 1 and GENERATORS[plan.schedule].splits
    if not defers and memory(micro=plan.micro, accumulate="auto") > memory(micro=1) * ROUNDING:
        yield "micro-batches keep more than one batch"


def _work(model: ModelShape, machine: Cluster, work: Workload, plan: Plan) -> Iterator[str]:
    twice = Workload(work.sequence, 2 * work.batch)
    base = estimate_step(model, plan, machine, work)
    larger = estimate_step(model, plan, machine, twice)
    if larger.step_s < base.step_s / ROUNDING:
        yield "twice the batch takes less time"
    if larger.memory_high_bytes < base.memory_high_bytes / ROUNDING:
        yield "twice the batch takes less memory"
