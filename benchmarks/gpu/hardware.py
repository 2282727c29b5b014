"""The machine's own speed: copies, matrix products, launches, collectives.

Every function returns JSON, runs in a process of its own, and takes the device; on the CPU, sizes are those
of a test. Operands are random: products of zeros draw less power and run at higher clocks.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from plait.__main__ import main as plait_main
from plait.comm.shm import native_lib
from plait.plan.cost_model import fit

Json = dict[str, Any]
GIB = 2**30
_REPEATS, _WARM_UP = 10, 3
_SUSTAINED_S = 3.0
_TOOLS = ("nvidia-smi", "gcc", "g++", "nvcc", "ncu")
_SMI_FACTS = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"
_VARIABLES = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "TRITON_", "NVIDIA_")


def selected(name: str) -> torch.device:
    """The device, which is from now on the current one."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of `run` on the device's current stream."""
    times = []
    for number in range(_WARM_UP + _REPEATS):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            elapsed_s = begin.elapsed_time(end) / 1e3
        else:
            start_s = time.perf_counter()
            run()
            elapsed_s = time.perf_counter() - start_s
        if number >= _WARM_UP:
            times.append(max(elapsed_s, 1e-9))
    return statistics.median(times)


def versions(device: str) -> Json:
    """Software, devices, links between them, and the tools that are there."""
    is_cuda = torch.device(device).type == "cuda"
    found: Json = {
        "host": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "tools": {tool: shutil.which(tool) for tool in _TOOLS},
        "environment": {key: value for key, value in os.environ.items() if key.startswith(_VARIABLES)},
        "shared_memory_library": native_lib.unavailable_reason() or "there",
    }
    count = torch.cuda.device_count() if is_cuda else 0
    found["devices"] = [_device_facts(index) for index in range(count)]
    found["peer_access"] = [
        [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
        for one in range(count)
    ]
    if shutil.which("nvidia-smi"):
        found["nvidia_smi"] = _output("nvidia-smi", f"--query-gpu={_SMI_FACTS}", "--format=csv")
        found["topology"] = _output("nvidia-smi", "topo", "-m")
    return found


def _device_facts(index: int) -> Json:
    properties = torch.cuda.get_device_properties(index)
    names = ("name", "total_memory", "multi_processor_count", "major", "minor", "L2_cache_size", "pci_bus_id")
    return {name: getattr(properties, name, None) for name in names}


def _output(*command: str) -> list[str]:
    """The lines that a program prints; none if it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return done.stdout.splitlines()


def transfers(device: str) -> Json:
    """Copies between host and device, from and to pinned and pageable memory."""
    on = selected(device)
    sizes = [2**12, 2**16, 2**20, 2**24, 2**28, GIB] if on.type == "cuda" else [2**12, 2**16]
    rows, lines = [], {}
    for pinned in (True, False):
        host = torch.empty(sizes[-1], dtype=torch.uint8, pin_memory=pinned and on.type == "cuda").fill_(1)
        there = torch.empty(sizes[-1], dtype=torch.uint8, device=on).fill_(2)
        for to_device in (True, False):
            source, target = (host, there) if to_device else (there, host)
            kind = (
                f"{'host to device' if to_device else 'device to host'}, {'pinned' if pinned else 'pageable'}"
            )
            points = []
            for size in sizes:
                into, of = target[:size], source[:size]
                points.append((size, seconds(partial(into.copy_, of, non_blocking=pinned), on)))
            line = fit(points)
            assert line is not None, "several sizes determine a line"
            lines[kind] = {"latency_s": line.latency_s, "bytes_per_s": line.bytes_per_s, "error": line.error}
            rows += [
                {"copy": kind, "bytes": size, "GB/s": size / s / 1e9, "us": 1e6 * s} for size, s in points
            ]
    return {"rows": rows, "lines": lines}


def products(device: str) -> Json:
    """FLOP/s of square matrix products, by dtype and size; of bf16 also for seconds without a pause."""
    on = selected(device)
    rows = []
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("tf32", torch.float32),
        ("fp32", torch.float32),
    ):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        for size in (1024, 2048, 4096, 8192, 16384) if on.type == "cuda" else (64,):
            left, right = (torch.randn(size, size, device=on, dtype=dtype) for _ in range(2))
            out = torch.empty_like(left)
            elapsed_s = seconds(partial(torch.mm, left, right, out=out), on)
            rows.append(
                {
                    "dtype": name,
                    "size": size,
                    "TFLOP/s": 2 * size**3 / elapsed_s / 1e12,
                    "ms": 1e3 * elapsed_s,
                }
            )
    torch.set_float32_matmul_precision("highest")
    peaks = {
        name: max(1e12 * row["TFLOP/s"] for row in rows if row["dtype"] == name)
        for name in ("bf16", "fp16", "tf32", "fp32")
    }
    sustained = _sustained(on)
    rows.append({"dtype": f"bf16, for {_SUSTAINED_S:g} s", "TFLOP/s": sustained / 1e12})
    return {"rows": rows, "peak_flops": peaks | {"bf16_sustained": sustained}}


def _sustained(device: torch.device) -> float:
    """FLOP/s of bf16 products in the last half of some seconds: at the clocks of a long run."""
    size, limit_s = (8192, _SUSTAINED_S) if device.type == "cuda" else (64, 0.02)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates, start_s = [], time.perf_counter()
    while time.perf_counter() - start_s < limit_s or not rates:
        begin_s = time.perf_counter()
        for _ in range(20):
            torch.mm(left, right)
        synchronize(device)
        rates.append(20 * 2 * size**3 / (time.perf_counter() - begin_s))
    return statistics.median(rates[len(rates) // 2 :])


def memory(device: str) -> Json:
    """Bytes per second of the device's memory: copied (read and written), written, and read."""
    on = selected(device)
    numel = GIB if on.type == "cuda" else 2**12
    source, target = (torch.randn(numel, device=on) for _ in range(2))
    num_bytes = source.nbytes
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(source), 2 * num_bytes),
        "write": (lambda: target.fill_(1.0), num_bytes),
        "read (sum)": (source.sum, num_bytes),
        "add in place": (lambda: target.add_(source), 3 * num_bytes),
    }
    rows = [{"access": name, "GB/s": moved / seconds(run, on) / 1e9} for name, (run, moved) in runs.items()]
    return {"rows": rows, "bytes_per_s": 1e9 * rows[0]["GB/s"]}


def launches(device: str) -> Json:
    """Seconds for the host to launch a small kernel, of that kernel, and for the host to read a result."""
    on = selected(device)
    tensor, number = torch.zeros(32, device=on), 2000
    for _ in range(100):
        tensor.add_(1)
    synchronize(on)
    start_s = time.perf_counter()
    for _ in range(number):
        tensor.add_(1)
    launched_s = time.perf_counter() - start_s
    synchronize(on)
    done_s = time.perf_counter() - start_s
    reads = []
    for _ in range(100):
        start_s = time.perf_counter()
        tensor[0].item()
        reads.append(time.perf_counter() - start_s)
    row = {"launch_s": launched_s / number, "kernel_s": done_s / number, "read_s": statistics.median(reads)}
    return {"rows": [row], **row}


def collectives(device: str, ranks: int) -> Json:
    """`plait bench collectives` on several ranks; returns its times, and the lines of a host profile."""
    is_cuda = torch.device(device).type == "cuda"
    sizes = ["--sizes", "4K:256M", "--budget", "40"] if is_cuda else ["--sizes", "4K,16K", "--rounds", "1"]
    with tempfile.TemporaryDirectory() as folder:
        files = {"--json": Path(folder) / "rows.json", "--profile": Path(folder) / "profile.json"}
        words = [
            "bench",
            "collectives",
            "--transport",
            "nccl" if is_cuda else "auto",
            "--ranks",
            str(ranks),
            *sizes,
        ]
        words += [str(word) for pair in files.items() for word in pair]
        with mock.patch.object(sys, "argv", ["plait", *words]):
            try:
                plait_main()
            except SystemExit as end:
                if end.code:
                    raise
        found = json.loads(files["--json"].read_text())
        lines = json.loads(files["--profile"].read_text())["lines"]
    rows = [
        {
            "ranks": ranks,
            "collective": row["verb"],
            "bytes": row["num_bytes"],
            "us": 1e6 * row["median_s"],
            "bus GB/s": (row["bus_bytes_per_s"] or 0.0) / 1e9 or None,
        }
        for row in found["rows"]
    ]
    return {"rows": rows, "lines": lines}
