"""Seconds of a step under a plan, on local ranks or those of a cluster: what the planner's predictions are
compared with.

[Note: undisturbed steps]
Other programs slow a step down by more than the planner's error. Their processor time during each step is
that of the host without that of the ranks. Of all steps, the half with the least of it counts: chosen by
what others did, not by the step's own time.
"""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.api import parallelize
from plait.bench.collectives import slowest, synchronize
from plait.comm import World, all_reduce, barrier, ranks_by_host
from plait.comm.launch_function import launch
from plait.comm.objects import broadcast_text
from plait.models import causal_lm_on_meta
from plait.plan import Plan

STEPS, _WARM_UP = 5, 2


def step_seconds(
    config: Mapping[str, Any], plan: Plan, *, sequence: int, batch: int, world: World | None = None
) -> float:
    """Return the time of an undisturbed step of AdamW on random tokens, on ranks that are started here, or on
    those of `world`, which `follow`.

    `config`: of a causal language model of transformers. Raises PlaitError.
    """
    if world is None:
        return typical_step(run_steps(config, plan, sequence=sequence, batch=batch)).seconds
    _tell(world, [config, str(plan), sequence, batch])
    rows = _steps(dict(config), plan, sequence, batch, STEPS, None)
    return typical_step([MeasuredStep(*row) for row in rows]).seconds


def follow(world: World) -> None:
    """Take part in the steps that rank 0 measures, until it ends them with `finish`."""
    while received := json.loads(broadcast_text(0, "", world.group, world.device)):
        config, plan, sequence, batch = received
        _steps(config, Plan.parse(plan), sequence, batch, STEPS, None)


def finish(world: World) -> None:
    _tell(world, [])


def _tell(world: World, what: list[Any]) -> None:
    broadcast_text(0, json.dumps(what), world.group, world.device)


def run_steps(
    config: Mapping[str, Any],
    plan: Plan,
    *,
    sequence: int,
    batch: int,
    steps: int = STEPS,
    threads: int | None = None,
) -> "list[MeasuredStep]":
    """Return the steps that `step_seconds` chooses from. `threads`: of a rank; None: the host's cores by
    the ranks."""
    causal_lm_on_meta(dict(config))  # imported here, its code need not be imported by every rank
    rows = launch(_steps, plan.num_ranks, dict(config), plan, sequence, batch, steps, threads)
    return [MeasuredStep(*row) for row in rows]


def typical_step(steps: "Sequence[MeasuredStep]") -> "MeasuredStep":
    """Return the medians of the least disturbed half of these steps. See [Note: undisturbed steps]."""
    kept = sorted(steps, key=lambda step: step.others)[: (len(steps) + 1) // 2]
    return MeasuredStep(*(statistics.median(values) for values in zip(*kept, strict=True)))


class MeasuredStep(NamedTuple):
    """A step. `core_s`: processor time of the rank that needs most. `others`: share of the host's cores that
    other programs took."""

    seconds: float
    core_s: float
    others: float


def _steps(
    config: dict[str, Any], plan: Plan, sequence: int, batch: int, steps: int, threads: int | None
) -> list[tuple[float, float, float]]:
    if threads is not None:
        torch.set_num_threads(threads)
    engine = parallelize(causal_lm_on_meta(config), plan, clip_norm=1.0)
    world: World = engine.world
    generator = torch.Generator().manual_seed(engine.data_rank)
    shape = (batch // engine.data_ranks, sequence)
    ids = torch.randint(0, config["vocab_size"], shape, generator=generator).to(world.device)
    measured = []  # seconds by the clock, of this process's cores, of all cores of the host
    for _ in range(_WARM_UP + steps):
        barrier(world.group)
        begin_s, core_s, host_s = time.perf_counter(), time.process_time(), _host_s()
        engine.step({"input_ids": ids, "labels": ids})
        synchronize(world)
        ends = time.perf_counter(), time.process_time(), _host_s()
        measured.append((ends[0] - begin_s, ends[1] - core_s, ends[2] - host_s))
    times, cores, hosts = ([*each] for each in zip(*measured, strict=True))
    step_s, rank_s, others_s = slowest(world, [times, cores, _others_s(world, cores, hosts)])
    num_cores = os.cpu_count() or 1
    others = [each / (elapsed * num_cores) for each, elapsed in zip(others_s, step_s, strict=True)]
    return list(zip(step_s, rank_s, others, strict=True))[_WARM_UP:]


def _others_s(world: World, cores: Sequence[float], hosts: Sequence[float]) -> list[float]:
    """Seconds of other programs on this rank's host, in each step. `cores`: of this rank, `hosts`: of its
    host. Collective."""
    all_hosts = ranks_by_host(world.group, world.device)
    number = next(number for number, ranks in enumerate(all_hosts) if world.rank in ranks)
    of_hosts = torch.zeros(len(all_hosts), len(cores), dtype=torch.float64, device=world.device)
    of_hosts[number] = torch.tensor(cores, dtype=torch.float64)
    all_reduce(of_hosts, world.group)
    return [max(0.0, host - own) for host, own in zip(hosts, of_hosts[number].tolist(), strict=True)]


def _host_s() -> float:
    """Processor time that all programs of the host have had, and that its hypervisor took; 0 if unknown."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft_interrupts, steal = map(int, words[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + steal
    return ticks / os.sysconf("SC_CLK_TCK")
