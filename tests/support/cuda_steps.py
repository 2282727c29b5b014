"""A short training on CUDA ranks, recorded, and the same one on CPU ranks; a step of a large model."""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import plait
from plait.comm import connect
from plait.models import causal_lm_on_meta
from plait.models.stages.split import StageModule
from support import hf_models, programs, routed_experts
from support.virtual_cuda.build import MODULE
from support.virtual_cuda.recording import Recording, recorded

STEPS = 3  # the last one is recorded: by then, buffers and orders are settled


@dataclass
class Steps:
    """Results of a training on one rank. `recording`: of the last step; None on a real device."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # on rank 0
    recording: Recording | None = None


def small_llama(layers: int = 2) -> nn.Module:
    """Build a small Llama with weights, which are the same on every device: generators are not."""
    torch.manual_seed(7)
    return programs.llama(on_meta=False, exact=False, layers=layers)


def deep_llama() -> nn.Module:
    """Build one of four blocks."""
    return small_llama(layers=4)


def small_mixture() -> nn.Module:
    """Build a mixture of two blocks, by an implementation without waits for the number of tokens."""
    torch.manual_seed(7)
    model: Any = hf_models.model_of("mixtral", on_meta=False, exact=False)
    model.set_experts_implementation("batched_mm")
    return model


def idle_mixture() -> nn.Module:
    """Build one for four ranks, of which the first and the last get no tokens."""
    torch.manual_seed(7)
    routing = "one rank" if connect().rank < 2 else "first rank"
    return routed_experts.model_with(routing, on_meta=False, exact=False, experts_implementation="batched_mm")


def train(
    device: str, plan: str, build: Callable[[], nn.Module], *, keep_log: bool = False, **options: Any
) -> Steps:
    """Train on this rank's device. `options`: of `parallelize`."""
    world = connect(device=device, timeout_s=40)
    arguments = {"optimizer_args": programs.ADAMW, "clip_norm": programs.CLIP}
    engine = plait.parallelize(build(), plan, seed=3, world=world, **arguments | options)
    found = Steps()
    *first, last = [
        _on_device(programs.share_of(batch, engine), world.device) for batch in programs.batches(STEPS)
    ]
    results = [engine.step(batch) for batch in first]
    with recorded(keep_log=keep_log) as found.recording:
        results.append(engine.step(last))
    found.losses = [result.loss for result in results]
    found.norms = [result.grad_norm for result in results]
    weights = engine.full_parameters()
    found.weights = {name: tensor.cpu() for name, tensor in weights.items()} if world.rank == 0 else {}
    world.close()
    return found


def _on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: tensor.to(device) for key, tensor in batch.items()}


def train_on_both(plan: str, build: Callable[[], nn.Module] = small_llama, **options: Any) -> Any:
    """Train on CPU and on CUDA ranks, from the same weights on the same batches."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        on_cpu = train("cpu", plan, build, **options)
        return on_cpu, train("cuda", plan, build, keep_log=True, **options)


# --- models of full size

LARGE_BYTES = 1 << 20  # contents are computed up to here: totals, flags, token ids
LARGE_IN_TOY = 1 << 16
VOCABULARY = 128256
SIZES = {  # hidden, ffn, layers, heads, key-value heads
    "toy": (512, 1024, 8, 8, 2),
    "0.3b": (1024, 4096, 16, 16, 8),
    "1b": (2048, 8192, 16, 32, 8),
    "8b": (4096, 14336, 32, 32, 8),
    "70b": (8192, 28672, 80, 64, 8),
}


def sized_step(plan: str, model: str, sequences: int, length: int, layers: int) -> Recording:
    """Record the second step, of `sequences` per data rank, of tensors with sizes and no contents."""
    native = sys.modules[MODULE]
    native.set_large_bytes(LARGE_IN_TOY if model == "toy" else LARGE_BYTES)
    gc.collect()  # engines of earlier calls
    world = connect(device="cuda", timeout_s=300)
    hidden, ffn, _, heads, kv_heads = SIZES[model]
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": model == "1b",
    }
    engine = plait.parallelize(causal_lm_on_meta(config), plan, seed=1, world=world)
    ids = torch.randint(0, VOCABULARY, (sequences, length), device=world.device)
    batch = {"input_ids": ids, "labels": ids}
    with mock.patch.object(StageModule, "check_taint"):  # what has no contents may be NaN
        engine.step(batch)
    with recorded(keep_log=True) as recording:
        engine.step(batch)
    assert recording is not None
    native.set_large_bytes(0)
    return recording
