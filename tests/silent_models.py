"""Models in which what tends to be forgotten counts: biases, norms and sinks far from their first values."""

import functools
from typing import Any

import torch
from torch import nn

import families
import programs

_LAYERS = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
    "sinks": "colwise",
}
SINKS = {f"model.layers.*.self_attn.{name}": word for name, word in _LAYERS.items()}


def loud(family: str, on_meta: bool = False, **more: Any) -> nn.Module:
    """With weights. Libraries begin with biases of zero and norms of one, under which a bias that is added
    twice, or a norm that is left out, changes nothing."""
    model = families.model_of(family, on_meta=on_meta, **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def task(family: str, **how: Any) -> programs.Task:
    """Of its training. `how`: as `programs.Task` has it."""
    words = SINKS if family == "gpt_oss" else None
    options = {"steps": 2, "own_loss": True, "tensor_plan": words} | how
    return programs.Task(functools.partial(loud, family), **options)
