"""A short training on CUDA ranks, recorded, and the same one on CPU ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.comm import connect
from support import programs
from support.virtual_cuda.recording import Recording, recorded

STEPS = 3  # the last one is recorded: by then, buffers and orders are settled


@dataclass
class Steps:
    """Results of a training on one rank. `recording`: of the last step; None on a real device."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # on rank 0
    recording: Recording | None = None


def train(device: str, plan: str, build: Callable[[], nn.Module], **options: Any) -> Steps:
    """Train on this rank's device. `options`: of `parallelize`."""
    world = connect(device=device, timeout_s=40)
    arguments = {"optimizer_args": programs.ADAMW, "clip_norm": programs.CLIP, "loss": programs.summed_loss}
    engine = plait.parallelize(build(), plan, seed=3, world=world, **arguments | options)
    found = Steps()
    *first, last = [
        _on_device(programs.share_of(batch, engine), world.device) for batch in programs.batches(STEPS)
    ]
    results = [engine.step(batch) for batch in first]
    with recorded() as found.recording:
        results.append(engine.step(last))
    found.losses = [result.loss for result in results]
    found.norms = [result.grad_norm for result in results]
    weights = engine.full_parameters()
    found.weights = {name: tensor.cpu() for name, tensor in weights.items()} if world.rank == 0 else {}
    world.close()
    return found


def _on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: tensor.to(device) for key, tensor in batch.items()}


def train_on_both(plan: str, build: Callable[[], nn.Module] = programs.rough_llama, **options: Any) -> Any:
    """Train on CPU and on CUDA ranks, from the same weights on the same batches."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return train("cpu", plan, build, **options), train("cuda", plan, build, **options)
