"""The stages of `run.py` and their cases, for a machine."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("torch",)
PLAIT = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "pydantic",
    "rich",
    "typer",
    "matplotlib",
)
PYTEST = (*PLAIT, "pytest", "hypothesis")
SHORT_S, LONG_S = 120.0, 240.0  # limits of cases
CONTENDER_S = 45.0  # of it, to build one of several: a compilation


@dataclass(frozen=True)
class Case:
    """A function of this folder with its keywords, run in a process of its own.

    limit_s       seconds until the process is ended
    needs         modules without which it is left out
    environment   variables of its process
    refuses       whether plait is expected to refuse it
    """

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_s: float = SHORT_S
    needs: tuple[str, ...] = PLAIT
    environment: dict[str, str] = field(default_factory=dict)
    refuses: bool = False


@dataclass(frozen=True)
class Machine:
    """`gpus`: number of devices. `is_dry`: a dry run on the CPU, with toys."""

    gpus: int
    is_dry: bool = False

    @property
    def device(self) -> dict[str, str]:
        return {"device": "cpu" if self.is_dry else "cuda"}

    def model(self, size: str, sequence: int, batch: int) -> dict[str, Any]:
        """The device, a model, and a batch of sequences of this many tokens."""
        size, sequence, batch = ("toy", 16, 4) if self.is_dry else (size, sequence, batch)
        return {**self.device, "size": size, "sequence": sequence, "batch": batch}


def stages(machine: Machine) -> dict[str, list[Case]]:
    """The cases by stage, in the order in which they are run; one of those that are equal in a dry run."""
    builders = {"checks": checks, "tests": tests, "parity": parity, "memory": memory}
    built = {name: list(build(machine)) for name, build in builders.items()}
    built |= {name: [speed(machine, *of_case) for of_case in of_stage] for name, of_stage in _SPEED.items()}
    built |= {"offload": list(offload(machine)), "trace": list(trace(machine))}
    unique = {name: {_key(case): case for case in reversed(cases)} for name, cases in built.items()}
    return {name: [*reversed(cases.values())] for name, cases in unique.items()}


def _key(case: Case) -> str:
    return json.dumps([case.function, case.arguments, case.environment])


def checks(machine: Machine) -> Iterator[Case]:
    for name in ("versions", "transfers", "products", "memory", "launches"):
        yield Case(name, f"hardware.{name}", machine.device, needs=TORCH)
    for ranks in (2, 4, 8):
        if ranks <= (2 if machine.is_dry else machine.gpus):
            yield Case(
                f"collectives, {ranks} ranks", "hardware.collectives", {**machine.device, "ranks": ranks}
            )


def tests(machine: Machine) -> Iterator[Case]:
    """Those written for the device. A dry run checks how they are run, with others."""
    found = sorted((ROOT / "tests" / "cuda").glob("test_*.py"))
    for path in [ROOT / "tests" / "pure" / "test_grid.py"] if machine.is_dry else found:
        name = str(path.relative_to(ROOT))
        yield Case(name, "suite.tests", {"paths": [name]}, limit_s=LONG_S, needs=PYTEST)


# Plans by number of ranks.
_PARITY = {
    1: "dp=1; zero=1; zero=2; zero=3; zero=3 reshard=step; zero=3 prefetch=2; "
    "zero=3 micro=4 accumulate=sharded; micro=4; recompute=full; zero=3 recompute=selective; "
    "recompute=every=2 micro=2; offload=cpu; offload=cpu zero=2 recompute=full; offload=cpu zero=3 micro=2",
    2: "dp=2; dp=2 zero=1; dp=2 zero=2 micro=2; dp=2 zero=3; dp=2 zero=3 micro=2 recompute=full; "
    "dp=2 zero=3 offload=cpu; tp=2; tp=2 sp=true; tp=2x1; pp=2 micro=4; pp=2 micro=4 schedule=zb-h1; "
    "cp=2 micro=2; cp=2 cp_method=ring recompute=full; cp=2 cp_method=ulysses zero=2",
    4: "dp=4 shard=2 zero=3; dp=2 tp=2 zero=3 sp=true; pp=2 dp=2 zero=1 micro=4; tp=2x2; pp=4 micro=8",
    8: "dp=2 tp=2 pp=2 zero=1 micro=4; dp=4 tp=2 zero=3; pp=4 dp=2 micro=8",
}
_OF_MODELS = "dp=1; zero=3 recompute=full; offload=cpu zero=3"
_COMPILED = "compile=true; compile=true zero=3 recompute=selective"


def parity(machine: Machine) -> Iterator[Case]:
    every = "; ".join(plans for ranks, plans in _PARITY.items() if ranks <= max(machine.gpus, 1))
    runs = [("llama", dtype, every) for dtype in ("float64", "float32", "bf16")]
    runs += [(model, "float32", _OF_MODELS) for model in ("gpt2", "mixtral", "qwen3")]
    runs += [("llama", "float32", "deterministic=true"), ("llama", "bf16", _COMPILED)]
    runs[3:3] = [("llama", precision, _OF_MODELS) for precision in ("fp8", "fp8-rowwise")]
    for model, dtype, plans in runs[:1] + runs[-1:] if machine.is_dry else runs:
        some = plans.split("; ")[:: 8 if machine.is_dry else 1]
        arguments = {**machine.device, "model": model, "dtype": dtype, "plans": some}
        yield Case(f"{model}, {dtype}, {some[0]}", "parity.verify", arguments, LONG_S)
    for precision, reference in (("fp16", "fp32"), ("fp8", "bf16"), ("fp8-rowwise", "bf16")):
        arguments = {**machine.device, "precision": precision, "reference": reference}
        yield Case(precision, "parity.losses", arguments)
    for dtype, head_size in (("bfloat16", 128), ("bfloat16", 80), ("float16", 64)):
        arguments = {**machine.device, "dtype": dtype, "head_size": head_size}
        yield Case(f"attention of {dtype}, size {head_size}", "parity.attention", arguments)


_MEMORY = (
    "precision=bf16", "precision=bf16 zero=3", "precision=bf16 recompute=full",
    "precision=bf16 recompute=selective", "precision=bf16 micro=4", "precision=bf16 optim_dtype=bf16",
    "precision=fp32", "precision=bf16 compile=true", "precision=bf16 offload=cpu",
    "precision=bf16 offload=cpu zero=3 recompute=full",
)  # fmt: skip


def memory(machine: Machine) -> Iterable[Case]:
    runs = [("1B", 4096, 4, plan) for plan in _MEMORY] + [("3B", 8192, 1, "precision=bf16 recompute=full")]
    for size, sequence, batch, plan in runs:
        arguments = {**machine.model(size, sequence, batch), "plan": f"dp=1 {plan}"}
        yield Case(f"{size} {plan}", "training.memory", arguments)
    arguments = {**machine.model("1B", 4096, 4), "plan": "dp=1 precision=bf16 zero=3 recompute=full"}
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    yield Case("1B zero=3, expandable segments", "training.memory", arguments, environment=expandable)


BF16 = "plait dp=1 precision=bf16"
_EVERYONE = ("torch", "torch compile", "FSDP2 compile", BF16, f"{BF16} compile=true")
_NARROW = f"{BF16} compile=true optim_dtype=bf16"
# Of each case: size, tokens of a sequence, sequences of a step, and the contenders, which share a process and
# the device's memory: 12 to 18 bytes per parameter each, besides one's activations.
_SPEED: dict[str, list[tuple[str, int, int, tuple[str, ...]]]] = {
    "speed": [
        ("1B", 8192, 1, _EVERYONE),
        ("1B", 2048, 4, _EVERYONE),
        ("0.3B", 2048, 16, (*_EVERYONE, f"{BF16} zero=3 compile=true", "FSDP2", "torch whole")),
    ],
    "speed-large": [
        *(("3B", 8192, 1, (one,)) for one in ("torch compile", f"{BF16} compile=true", "FSDP2 compile")),
        ("3B", 8192, 1, (f"{BF16} zero=3",)),
        ("8B", 4096, 1, (f"{_NARROW} recompute=full",)),
        ("8B", 4096, 1, ("torch bf16 compile recompute",)),
        ("8B", 4096, 1, (f"{BF16} compile=true recompute=full",)),
        ("3B", 8192, 4, (f"{BF16} compile=true offload=cpu recompute=full",)),
    ],
    "speed-plans": [
        *(
            ("1B", 8192, 2, (f"{BF16} recompute={which}", f"{BF16} recompute={which} compile=true"))
            for which in ("none", "selective", "every=2", "full")
        ),
        ("1B", 8192, 2, ("torch recompute", "FSDP2 compile recompute")),
        ("1B", 8192, 1, (BF16, f"{BF16} zero=3", f"{BF16} zero=3 reshard=step")),
        ("1B", 8192, 1, (f"{BF16} deterministic=true",)),
    ],
    "speed-sequence": [
        ("1B", length, 2**15 // length, (f"{BF16} compile=true recompute=full", "FSDP2 compile recompute"))
        for length in (2048, 4096, 8192, 16384, 32768)
    ],
}


def speed(machine: Machine, size: str, sequence: int, batch: int, contenders: tuple[str, ...]) -> Case:
    several_s = max(LONG_S, CONTENDER_S * (1 + len(contenders)))
    limit_s = SHORT_S if len(contenders) == 1 and "offload" not in contenders[0] else several_s
    arguments = {**machine.model(size, sequence, batch), "contenders": contenders}
    arguments["budget_s"] = 0.0 if machine.is_dry else limit_s / 4
    more = f" and {len(contenders) - 1} more" * (len(contenders) > 1)
    return Case(f"{size}, {batch} x {sequence}, {contenders[0]}{more}", "training.train", arguments, limit_s)


def offload(machine: Machine) -> Iterable[Case]:
    """`benchmarks/offload.py`; offload=disk is for CPU ranks."""
    yield Case("largest model", "training.offload", {"words": ["--cap-gib", "4"]}, limit_s=420.0)
    words = ["--trial", "2", "--plan", "dp=1 zero=3 precision=bf16 offload=disk recompute=full"]
    yield Case("disk", "training.offload", {"words": words}, refuses=not machine.is_dry)


def trace(machine: Machine) -> Iterable[Case]:
    for contender in (BF16, f"{BF16} compile=true", f"{BF16} zero=3 compile=true", "torch compile"):
        arguments = {**machine.model("1B", 8192, 1), "contender": contender}
        yield Case(f"1B {contender}", "training.trace", arguments)
