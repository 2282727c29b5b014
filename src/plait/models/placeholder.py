"""Placeholders for other stages' parameters: NaN of the right shape, dtype and device, without storage.

The model's code before its first block (embeddings, positions, scaling) runs on them unmodified; its results
are replaced by the received tensors. NaN reveals a result that is not replaced.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn


def placeholder_like(parameter: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return one NaN (zero for integers), expanded to the parameter's shape."""
    is_floating = parameter.is_floating_point() or parameter.is_complex()
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    value = torch.full((), torch.nan if is_floating else 0, dtype=dtype, device=device)
    return value.expand(parameter.shape)


def placeholders_of(module: nn.Module) -> dict[str, Tensor]:
    """The placeholders that a stage's module (models/stages/shell.py) has in place of direct parameters, by
    key."""
    found: Any = module._stage_placeholders if hasattr(type(module), "_stage_placeholders") else {}
    return cast(dict[str, Tensor], found)


def placeholders(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all placeholders with their names, tied ones under each name."""
    for name, module in model.named_modules():
        for key, placeholder in placeholders_of(module).items():
            yield f"{name}.{key}" if name else key, placeholder
