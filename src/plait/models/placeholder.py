"""Placeholders for other stages' parameters: NaN of the right shape, dtype and device, without storage.

The model's code before its first block (embeddings, positions, scaling) runs on them unmodified; its results
are replaced by the received tensors. NaN reveals a result that is not replaced.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_KEYS_ATTRIBUTE = "_placeholder_keys"  # of a module: the keys of its placeholders


def placeholder_like(parameter: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return one NaN (zero for integers), expanded to the parameter's shape."""
    is_floating = parameter.is_floating_point() or parameter.is_complex()
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    value = torch.full((), torch.nan if is_floating else 0, dtype=dtype, device=device)
    return value.expand(parameter.shape)


def make_placeholder(module: nn.Module, key: str, placeholder: Tensor) -> None:
    """Replace the module's parameter by a plain attribute, which is not trained, counted or saved."""
    del module._parameters[key]
    module.__dict__[key] = placeholder
    module.__dict__[_KEYS_ATTRIBUTE] = (*module.__dict__.get(_KEYS_ATTRIBUTE, ()), key)


def placeholder_keys(module: nn.Module) -> tuple[str, ...]:
    """The keys of the module's direct parameters that belong to another stage."""
    keys: tuple[str, ...] = module.__dict__.get(_KEYS_ATTRIBUTE, ())
    return keys


def placeholders(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all placeholders with their names, tied ones under each name."""
    for name, module in model.named_modules():
        for key in placeholder_keys(module):
            yield f"{name}.{key}" if name else key, module.__dict__[key]
