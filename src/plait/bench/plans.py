"""Seconds of a step under a plan, on local ranks: what the planner's predictions are compared with."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from plait.api import parallelize
from plait.bench.collectives import slowest, synchronize
from plait.bench.device import measure_device
from plait.comm import World, barrier, connect
from plait.comm.launch_function import launch
from plait.models import causal_lm_on_meta
from plait.plan import Plan
from plait.plan.device_speed import DeviceSpeed

STEPS, _WARM_UP = 5, 2


def step_seconds(
    config: Mapping[str, Any], plan: Plan, *, sequence: int, batch: int, steps: int = STEPS
) -> float:
    """Start the plan's ranks here, and return the median time of a step of AdamW on random tokens.

    `config`: of a causal language model of transformers. Raises PlaitError.
    """
    causal_lm_on_meta(dict(config))  # imported here, its code need not be imported by every rank
    return launch(_steps, plan.num_ranks, dict(config), plan, sequence, batch, steps)


def speed_of_ranks(num_ranks: int, rounds: int = 3) -> DeviceSpeed:
    """Measure the devices with so many ranks at work. See `measure_device`."""
    return launch(lambda: measure_device(connect(), rounds=rounds), num_ranks)


def _steps(config: dict[str, Any], plan: Plan, sequence: int, batch: int, steps: int) -> float:
    engine = parallelize(causal_lm_on_meta(config), plan, clip_norm=1.0)
    world: World = engine.world
    generator = torch.Generator().manual_seed(engine.data_rank)
    shape = (batch // engine.data_ranks, sequence)
    ids = torch.randint(0, config["vocab_size"], shape, generator=generator).to(world.device)
    times = []
    for _ in range(_WARM_UP + steps):
        barrier(world.group)
        begin_s = time.perf_counter()
        engine.step({"input_ids": ids, "labels": ids})
        synchronize(world)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(slowest(world, [times])[0][_WARM_UP:])
