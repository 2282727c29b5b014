"""The speed of a rank's device while all ranks of the host work: matrix products, memory, operators."""

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from plait.bench.collectives import slowest
from plait.comm import World, barrier
from plait.plan.device_speed import DeviceSpeed

_VISIT_S = 0.03  # of one repetition of a case
_ROUNDS = 5
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # larger than caches


def measure_device(
    world: World, report_progress: Callable[[str], None] = lambda _: None, rounds: int = _ROUNDS
) -> DeviceSpeed:
    """Measure all ranks at the same time, and return the speed of the slowest. Collective."""
    device, kind = world.device, world.device.type
    cases: dict[tuple[str, int], Callable[[], object]] = {}
    for name, dtype in _DTYPES.items():
        if kind == "cpu" and name == "fp16":  # most CPUs have no fp16 arithmetic
            continue
        for size in _SIZES[kind]:
            cases[name, size] = _product(size, dtype, device)
    source = torch.ones(_COPY_BYTES[kind] // 4, device=device)
    target, small = torch.empty_like(source), torch.zeros(8, device=device)
    cases["copy", 0] = lambda: target.copy_(source)
    cases["launch", 0] = lambda: small.add_(1)
    times: list[list[float]] = []
    for number in range(rounds):
        report_progress(f"measuring: round {number + 1} of {rounds}")
        times.append([_seconds(run, world) for run in cases.values()])
    medians = map(statistics.median, zip(*slowest(world, times), strict=True))
    found = dict(zip(cases, medians, strict=True))
    rates: dict[str, tuple[tuple[float, float], ...]] = {}
    for (name, size), seconds in found.items():
        if size:
            flops = 2.0 * size**3
            rates[name] = (*rates.get(name, ()), (flops, flops / seconds))
    name, num_devices, num_sms, memory_bytes = _facts(world)
    copied = 2 * source.nbytes / found["copy", 0]
    launch_s = found["launch", 0]
    return DeviceSpeed(world.size, name, kind, num_devices, num_sms, memory_bytes, copied, launch_s, rates)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _seconds(run: Callable[[], object], world: World) -> float:
    """Seconds of one call, with all ranks at work."""
    run()
    barrier(world.group)
    count, begin_s = 0, time.perf_counter()
    elapsed_s = 0.0
    while elapsed_s < _VISIT_S:
        run()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        count += 1
        elapsed_s = time.perf_counter() - begin_s
    return elapsed_s / count


def _facts(world: World) -> tuple[str, int, int, float]:
    """Return the device's name, devices of the host, multiprocessors, bytes of memory."""
    if world.device.type == "cuda":
        facts = torch.cuda.get_device_properties(world.device)
        return facts.name, torch.cuda.device_count(), facts.multi_processor_count, float(facts.total_memory)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return platform.processor() or platform.machine(), os.cpu_count() or 1, 1, host_bytes / world.size
