"""The forward of peft's wrappers of parameters on shards: see `models/parameter_adapters.py`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.models.parameter_adapters import adapted_output, is_wrapper
from plait.parallel.tensor.apply import own_forward, set_forward


@dataclass(frozen=True)
class AdaptedParameter:
    """Forward of a wrapper."""

    @torch.compiler.disable(recursive=False, reason="adapted weights in place of a parameter")
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return adapted_output(module, *args, **kwargs)


def adapt_parameters(model: nn.Module) -> None:
    """Replace the forwards of peft's wrappers of parameters."""
    for name, module in model.named_modules():
        if is_wrapper(module) and not isinstance(own_forward(name, module), AdaptedParameter):
            set_forward(module, AdaptedParameter())
