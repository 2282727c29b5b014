"""Plans under which `compile=auto` compiles the blocks of six architectures: covering sets of their options,
and the verdict of `plait verify` about one."""

import functools
import math
import random
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from plait.comm import connect
from plait.engine import auto_compile
from plait.errors import PlaitError
from plait.plan import Plan, compile_choice
from plait.plan.schedule import GENERATORS, make_schedule
from plait.verify import ModelSource, ModelSpec, Verdict, model_spec, worker
from support import programs, verify_models
from support.compilers import compiles
from support.covering import Case, covering, covering_drawn

LAYERS = 4  # two stages of two chunks
# Class, layers with adapters (sharded by columns and by rows), and sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "q_proj o_proj", {"num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        "c_fc c_proj",
        {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    ),
    "qwen3": ("Qwen3ForCausalLM", "v_proj down_proj", {"num_key_value_heads": 2, "head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", "k_proj o_proj", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "query output.dense", {}),
    "t5": ("T5ForConditionalGeneration", "q o", verify_models.T5),
}
FACTORS = {
    factor: options.split()
    for factor, options in {
        "model": " ".join(MODELS),
        "adapter": "none lora",
        "precision": "fp32 bf16 fp64",
        "dp": "1 2",
        "zero": "0 1 2 3",
        "offload": "none cpu",
        "tp": "1 2 2x1",
        "sp": "false true",
        "cp": "1 2",
        "ep": "1 2",
        "pp": "1 2",
        "schedule": "gpipe 1f1b interleaved bfs",
        "recompute": "none full selective every=2",
        "micro": "1 2",
    }.items()
}
OF_THE_PLAN = [factor for factor in FACTORS if factor not in ("model", "adapter")]
DTYPES = {"fp32": "float32", "bf16": "bf16", "fp64": "float64"}
MOST_RANKS, SEED, TRIES, NUM_DRAWN = 4, 5, 150, 400
STEPS, SAMPLES, LENGTH = 2, 8, 12


@functools.cache
def few_cases() -> tuple[Case, ...]:
    """Cases on at most two ranks that cover every option, but for those that take the longest."""
    rng = random.Random(SEED)
    drawn = [case for _ in range(NUM_DRAWN) if (case := draw(rng, {})) and num_ranks(case) <= 2]
    cases = [case for case in drawn if not {"t5", "gpipe", "bfs"} & {*case.values()}]
    return tuple(
        covering(cases, seed=SEED, size=1, cost=lambda case: 2.0 if case["adapter"] == "lora" else 1.0)
    )


@functools.cache
def many_cases() -> tuple[Case, ...]:
    """Cases that cover every pair of options under which blocks are compiled."""
    return tuple(covering_drawn(FACTORS, draw, seed=SEED, cost=_cost))


def draw(rng: random.Random, wanted: Case) -> Case | None:
    """Draw a random case with the options `wanted`; None if none is found."""
    for _ in range(TRIES):
        drawn = {factor: rng.choice(options) for factor, options in FACTORS.items()}
        case = _applying(drawn | wanted)
        if case is not None and wanted.items() <= case.items():
            return case
    return None


def _applying(case: dict[str, str]) -> Case | None:
    """Drop factors that do not apply; None if options exclude each other."""
    left_out = {"sp": case["tp"] in ("1", "2x1"), "schedule": case["pp"] == "1"}
    found = {factor: option for factor, option in case.items() if not left_out.get(factor)}
    refused = {  # of the sharding of these models, which other tests are about
        "tp=2x1": case["adapter"] == "lora" or case["model"] in ("mixtral", "bert", "t5"),
        "sp=true": case["model"] in ("bert", "t5"),
        "cp=2": case["model"] == "t5",
        "ep=2": case["model"] != "mixtral",
    }
    words = [f"{factor}={option}" for factor, option in found.items()]
    if any(refused.get(word) for word in words):
        return None
    try:
        plan = Plan.parse(plan_of(found))
        if plan.num_ranks > MOST_RANKS:
            return None
        make_schedule(plan.schedule, plan.pp, plan.micro)
    except PlaitError:
        return None
    return None if reason_of(found) else found


def _cost(case: Case) -> float:
    """Root of the processor time, roughly: each rank compiles."""
    return math.sqrt(num_ranks(case) * (2 if case["adapter"] == "lora" else 1))


def num_ranks(case: Case) -> int:
    return Plan.parse(plan_of(case)).num_ranks


def plan_of(case: Case) -> str:
    return " ".join(f"{key}={case[key]}" for key in OF_THE_PLAN if key in case) + " compile=auto"


def name_of(case: Case) -> str:
    return "-".join(f"{key}={option}" for key, option in case.items())


def reason_of(case: Case) -> str:
    """The reason for which blocks are not compiled; "" if they are."""
    is_selective = case["recompute"] == "selective"
    reasons = {
        "splits backwards": "schedule" in case and bool(GENERATORS[case["schedule"]].splits),
        "compiles no block with attention over ranks": is_selective and case["cp"] == "2",
        "counts no experts in compiled blocks": is_selective and case["model"] == "mixtral",
        "a norm over sharded features": is_selective and case["tp"] == "2x1",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


# --- models


@dataclass(frozen=True)
class Source(ModelSource):
    """One of MODELS. `adapter`: none or lora."""

    adapter: str = "none"

    def spec(self) -> ModelSpec:
        return ModelSpec(partial(_built, self.build, self.adapter))


def _built(model: str, adapter: str) -> nn.Module:
    """Build a model with its own matrices. Biases are not zero, and norms not one, so that they matter."""
    name, layers, sizes = MODELS[model]
    built = verify_models.of_task(name, **{"num_hidden_layers": LAYERS, **sizes})
    if adapter == "lora":
        import peft  # noqa: PLC0415 - takes seconds

        config = peft.LoraConfig(r=4, target_modules=layers.split(), fan_in_fan_out=model == "gpt2")
        peft.inject_adapter_in_model(config, built)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built


def compute_in_float64(model: Any, blocks: Iterable[nn.Module]) -> None:
    """Replace the parts that compute in float32, by code that torch.compile traces. In place."""
    del blocks
    model.set_experts_implementation("eager")  # torch's grouped matmul does not support float64
    for module in model.modules():
        name = type(module).__name__
        if re.search(r"RMSNorm|T5LayerNorm", name):
            module.forward = types.MethodType(programs.exact_rms_norm, module)
        elif name.endswith("Router"):
            module.forward = types.MethodType(_exact_router, module)


def _exact_router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mixtral's router, whose softmax is in float32."""
    logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
    values, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
    return logits, values / values.sum(-1, keepdim=True), indices


def _wide(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of transformers that leaves logits in float64."""

    def run(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        with model_spec._Float64() if logits.dtype == torch.float64 else nullcontext():
            return loss(logits, *args, **options)

    return run


# --- on ranks


@contextmanager
def choosing(*, in_cpp: bool = False, gain: float = -1e9) -> Iterator[None]:
    """Measure in runs of any length, with times in a folder of this rank. `gain`: what counts as one."""
    torch._dynamo.reset()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", XDG_CACHE_HOME=folder),
        mock.patch.object(compile_choice, "MIN_RUN_S", 0.0),
        mock.patch.object(compile_choice, "MIN_GAIN", gain),
        mock.patch.object(auto_compile, "_ROUNDS", 1),
        compiles(in_cpp=in_cpp),
    ):
        yield


def verified(case: Case, in_cpp: bool) -> tuple[Verdict | None, str, int]:
    """The verdict, which is rank 0's; the choice; and the number of graphs that were compiled for it."""
    engines: list[Any] = []

    def parallelize(*args: Any, **options: Any) -> Any:
        engines.append(made := real(*args, **options))
        return made

    real: Callable[..., Any] = worker.parallelize
    source, dtype = Source(build=case["model"], adapter=case["adapter"]), DTYPES[case["precision"]]
    job = worker.Case(source, plan_of(case), dtype, STEPS, SAMPLES, LENGTH, 0)
    torch._dynamo.utils.counters.clear()
    with (
        choosing(in_cpp=in_cpp),
        mock.patch.object(worker, "parallelize", parallelize),
        mock.patch.object(model_spec, "compute_in_float64", compute_in_float64),
        mock.patch.dict(LOSS_MAPPING, {name: _wide(loss) for name, loss in LOSS_MAPPING.items()}),
    ):
        verdict = worker.Verifier().run(job, connect(), Path())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return verdict, str(engines[0].compile_choice) if engines else "", graphs
