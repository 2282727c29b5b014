"""Training steps of Llamas: speed next to plain torch and FSDP2, memory next to its estimate, a trace.

[Note: contenders]
A contender is a text: `torch`, `FSDP2` or `plait`, then its options. plait's are a plan. The others' are
`compile` (each block, as in torchtitan), `whole` (the whole model compiled), `recompute` (each block) and
`bf16` (weights and states in bfloat16 instead of autocast with float32 ones). `FSDP2 compile` is torchtitan's
recipe on one device. All start from the same weights and take the same batch; their first losses are equal
but for rounding.

[Note: rounds]
Contenders of a case are in one process and take turns, so that clocks and temperature are the same for all. A
contender that fails, or finds too little memory, is reported and leaves; the others go on. When the case's
time would not suffice to build another one, the rest is left out, and those that were built are measured.
"""

import gc
import json
import resource
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import common
import peers
import plait
from case import failure, left_s
from hardware import Json, selected, synchronize
from llama import TOY, Batch, Llama
from plait.comm import World
from plait.engine.spec import Arguments
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import explain
from plait.models import FlopFacts
from plait.train.metrics import PeakFlops
from traces import kernel_summary

GIB = 2**30
_WARM_UP = 3  # steps of a contender before its rounds: the first one compiles
_MOST_ROUNDS, _STEPS_A_ROUND = 10, 2
_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def _llama(
    vocabulary: int, hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> Json:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


# The shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B; the smallest has 317 M parameters.
SIZES = {
    "0.3B": _llama(32_000, 1024, 4096, 16, 16, 8, False),
    "1B": _llama(128_256, 2048, 8192, 16, 32, 8, True),
    "3B": _llama(128_256, 3072, 8192, 28, 24, 8, True),
    "8B": _llama(128_256, 4096, 14336, 32, 32, 8, False),
    "toy": TOY.config,
}


def model_of(size: str, sequence: int) -> Llama:
    return Llama(SIZES[size] | {"max_position_embeddings": sequence}, sequence)


def step_of(contender: str, llama: Llama, device: torch.device) -> peers.Step:
    """The contender's training step. See [Note: contenders]."""
    kind, *options = contender.split()
    if kind == "plait":
        engine = engine_of(" ".join(options), llama, device)
        return lambda batch: engine.step(batch).loss
    model: Any = llama.with_weights(device)
    if "bf16" in options:
        model = model.bfloat16()
    if "recompute" in options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "compile" in options:
        for number, block in enumerate(model.model.layers):
            model.model.layers[number] = torch.compile(block)
    if "whole" in options:
        model.compile()
    if kind == "FSDP2":
        return peers.fsdp2(reshard=True)(model, 1)
    if "bf16" in options:
        optimizer = torch.optim.AdamW(peers.groups(model), fused=True, **peers.ADAMW)
        return peers.autocast_step(model, optimizer, None)
    return peers.ddp(model, 1)


def engine_of(plan: str, llama: Llama, device: torch.device) -> plait.Engine:
    return plait.parallelize(llama.on_meta(), plan, optimizer_args=peers.ADAMW, world=World.alone(device))


def batch_of(llama: Llama, sequences: int, device: torch.device) -> Batch:
    torch.manual_seed(0)
    return {name: tensor.to(device) for name, tensor in llama.batch(sequences).items()}


def join_alone(device: torch.device) -> None:
    """Create a process group of this process, without a port: FSDP2 needs one."""
    if not dist.is_initialized():
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=device if is_cuda else None,
        )


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Run it; return the bytes that it allocated at most, above those allocated before."""
    synchronize(device)
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0


@dataclass
class Contender:
    """A contender, its times per step, and its row of the table. `step`: None once it has failed."""

    name: str
    row: Json = field(default_factory=dict)
    step: peers.Step | None = None
    times: list[float] = field(default_factory=list)
    last_loss: Any = None

    def build(self, llama: Llama, batch: Batch, device: torch.device) -> None:
        """Build it and take its first steps: their memory is that of all others."""
        before = allocated(device)
        start_s = time.perf_counter()
        self.step = step_of(self.name, llama, device)
        synchronize(device)
        built_s = time.perf_counter()
        self.row["first_loss"] = float(self.step(batch))
        self.row |= {"build_s": built_s - start_s, "first_step_s": time.perf_counter() - built_s}
        for _ in range(_WARM_UP - 1):
            self.step(batch)
        synchronize(device)
        own = allocated(device) - before
        more = peak_of(lambda: self.steps(batch, 1), device)
        self.row |= {"own_gib": own / GIB, "peak_gib": (own + more) / GIB}

    def steps(self, batch: Batch, number: int) -> None:
        assert self.step is not None, f"{self.name} has left"
        for _ in range(number):
            self.last_loss = self.step(batch)

    def measure(self, batch: Batch, device: torch.device) -> None:
        """A round: some steps, of which the host may issue one while the device runs another."""
        synchronize(device)
        start_s = time.perf_counter()
        self.steps(batch, _STEPS_A_ROUND)
        synchronize(device)
        self.times.append((time.perf_counter() - start_s) / _STEPS_A_ROUND)

    def attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the measurement; on an error, free all that the contender holds."""
        try:
            work(*arguments)
        except Exception as error:
            self.row |= {key: value for key, value in failure(error).items() if key != "traceback"}
            print(f"{self.name}:\n{traceback.format_exc()}", flush=True)
            traceback.clear_frames(error.__traceback__)
            self.step = self.last_loss = None
        if self.step is None:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def train(
    device: str, size: str, sequence: int, batch: int, contenders: list[str], budget_s: float = 60.0
) -> Json:
    """Milliseconds, tokens per second, MFU and memory of the contenders' steps. See [Note: rounds].

    `mfu`: model FLOP/s with causal attention over the device's data sheet (or, if it is unknown, a measured
    matrix product); `mfu_full_attention`: attention counted as if it were not causal, as other reports do;
    `mfu_of_matmul`: over a measured product.
    `budget_s`: seconds of rounds, of which there are two at least.
    """
    on, llama = selected(device), model_of(size, sequence)
    torch._dynamo.config.recompile_limit = 64  # contenders share the code of the blocks
    if any(name.startswith("FSDP2") for name in contenders):
        join_alone(on)
    data = batch_of(llama, batch, on)
    entrants, longest_s = [], 0.0
    for name in contenders:
        if entrants and 2 * longest_s > left_s():
            break
        start_s = time.perf_counter()
        entrants.append(one := Contender(name))
        one.attempt(one.build, llama, data, on)
        print(f"{one.name}: {one.row}", flush=True)
        longest_s = max(longest_s, time.perf_counter() - start_s)
    end_s = time.perf_counter() + min(budget_s, left_s() / 2)
    for number in range(_MOST_ROUNDS):
        left = [one for one in entrants if one.step is not None]
        for one in left if number % 2 else reversed(left):
            one.attempt(one.measure, data, on)
        if number and time.perf_counter() > end_s:
            break
    found: Json = {"rows": _rows(entrants, llama, batch, on), "reserved_gib": reserved(on) / GIB}
    if missing := contenders[len(entrants) :]:
        found["unfinished"] = f"no time for {', '.join(missing)}"
    return found


def _rows(entrants: list[Contender], llama: Llama, batch: int, device: torch.device) -> list[Json]:
    facts, tokens = FlopFacts.from_model(llama.on_meta()), batch * llama.sequence
    causal, full = (tokens * facts.per_token(llama.sequence, causal=causal) for causal in (True, False))
    peaks = PeakFlops.of_device(device, torch.bfloat16)
    done = {one.name: one.times for one in entrants if one.step is not None}
    others = [name for name in done if not name.startswith("plait")]
    made = common.rows("", done, yardstick=next(iter(done)), peers=others) if done else []
    found = {row.pop("contender"): row for row in made}
    rows = []
    for one in entrants:
        row: Json = {"contender": one.name, **one.row}
        rows.append(row)
        if one.name not in found:
            continue
        step_s = found[one.name]["median_ms"] / 1e3
        row |= {key: value for key, value in found[one.name].items() if key != "case"}
        row |= {"tokens_per_s": tokens / step_s, "last_loss": float(one.last_loss)}
        row |= {"mfu": causal / step_s / peaks.for_mfu, "mfu_full_attention": full / step_s / peaks.for_mfu}
        row["mfu_of_matmul"] = causal / step_s / peaks.measured
    return rows


def reserved(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def memory(device: str, size: str, sequence: int, batch: int, plan: str) -> Json:
    """The estimate of a plan's memory, and its measurements over some steps.

    estimated   by `plait explain`, without a rank; `tensors_estimated`: of it, tensors alone
    counted     by `engine.memory()`, the tensors that plait knows of
    peak        allocated at most, by torch, for tensors
    used        on the whole device now: with the allocator's cache and the driver's context
    retries     of the allocator, when the device was full
    """
    on, llama = selected(device), model_of(size, sequence)
    micro = batch // plait.Plan.parse(plan).micro
    ids = torch.zeros(micro, sequence, dtype=torch.long, device="meta")
    cluster = HypotheticalRanks("nccl" if on.type == "cuda" else "host", None, on)
    explained = explain(Arguments(llama.on_meta(), plan), {"input_ids": ids, "labels": ids}, cluster)
    estimate = explained.rank_classes[0].memory
    engine = engine_of(plan, llama, on)
    data = batch_of(llama, batch, on)
    peak = allocated(on) + peak_of(lambda: [engine.step(data) for _ in range(_WARM_UP)], on)
    tensors = estimate.total - estimate.runtime - estimate.allocator
    counted = engine.memory()
    row: Json = {
        "plan": plan,
        "tensors_estimated_gib": tensors / GIB,
        "counted_gib": (counted.total - counted.runtime - counted.allocator) / GIB,
        "peak_gib": peak / GIB,
        "peak_of_estimate": peak / max(tensors, 1),
        "estimated_gib": estimate.total / GIB,
        "host_estimated_gib": estimate.host / GIB,
        "host_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }
    if on.type == "cuda":
        free, total = torch.cuda.mem_get_info(on)
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        row |= {"reserved_gib": reserved(on) / GIB, "used_gib": (total - free) / GIB}
        row |= {"used_of_estimate": (total - free) / estimate.total, "host_pinned_gib": pinned / GIB}
        row["retries"] = torch.cuda.memory_stats(on).get("num_alloc_retries")
    by_category = {"estimated": asdict(estimate), "counted": asdict(counted)}
    return {"rows": [row], **by_category, "engine": asdict(engine.estimated_memory((micro, sequence)))}


# --- a trace


def trace(device: str, size: str, sequence: int, batch: int, contender: str) -> Json:
    """The kernels of one step, the gaps between them, and the places where the host waits for the device."""
    on, llama = selected(device), model_of(size, sequence)
    if contender.startswith("FSDP2"):
        join_alone(on)
    step, data = step_of(contender, llama, on), batch_of(llama, batch, on)
    for _ in range(_WARM_UP):
        step(data)
    synchronize(on)
    waits = host_syncs(lambda: step(data), on)
    # Without the host's operators, whose recording would slow it down and widen the gaps.
    activity = ProfilerActivity.CUDA if on.type == "cuda" else ProfilerActivity.CPU
    for _ in range(2):  # the first profile of a process includes the start of the profiler
        with profile(activities=[activity]) as profiler:
            step(data)
            synchronize(on)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    kinds = _DEVICE_WORK if on.type == "cuda" else {"cpu_op"}
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in kinds and e.get("dur", 0) > 0]
    row, lines = kernel_summary([(e["name"], float(e["ts"]), float(e["dur"])) for e in work])
    places = [f"{count:>5}  {place}" for place, count in waits.most_common()]
    lines += ["", f"{sum(waits.values())} waits of the host for the device in a step:", *places]
    return {"rows": [{"contender": contender, "host_waits": sum(waits.values()), **row}], "text": lines}


def host_syncs(run: Callable[[], object], device: torch.device) -> "Counter[str]":
    """Run it, and count the operations in which the host waits for the device, by the innermost line and the
    innermost ones of plait. torch does not report explicit `synchronize`."""
    places: Counter[str] = Counter()

    def count(message: object, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            frames = [f for f in traceback.extract_stack() if "/warnings.py" not in f.filename][:-1]
            names = [f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno}" for f in frames[-8:]]
            own = [n for n, f in zip(names, frames[-8:], strict=True) if "/plait/" in f.filename]
            places[" < ".join(dict.fromkeys([names[-1], *own[::-1][:2]]))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return places


def offload(words: list[str]) -> Json:
    """`benchmarks/offload.py` with these words: the largest model with and without offload."""
    program = Path(__file__).resolve().parents[1] / "offload.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        with mock.patch.object(sys, "argv", [str(program), *words, "--json", str(path)]):
            runpy.run_path(str(program), run_name="__main__")
        return json.loads(path.read_text()) if path.exists() else {"rows": []}
