"""Parameters of other stages: of the right shape, dtype and device, without bytes of their own, and NaN.

The model's code before its first block (embeddings, positions, scaling) runs on them unmodified; what it
makes of them is replaced by what was received. NaN tells on whatever is not replaced.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

_KEYS_ATTRIBUTE = "_hollow"  # a module's attribute: the keys of its hollow parameters


def placeholder_like(parameter: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """One NaN (or zero, if it holds integers) that looks like the whole parameter."""
    is_floating = parameter.is_floating_point() or parameter.is_complex()
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    value = torch.full((), torch.nan if is_floating else 0, dtype=kind, device=device)
    return value.expand(parameter.shape)


def make_placeholder(module: nn.Module, key: str, hollow: Tensor) -> None:
    """The module's parameter becomes a plain attribute, which no one trains, counts or saves."""
    del module._parameters[key]
    module.__dict__[key] = hollow
    module.__dict__[_KEYS_ATTRIBUTE] = (*module.__dict__.get(_KEYS_ATTRIBUTE, ()), key)


def placeholder_keys(module: nn.Module) -> tuple[str, ...]:
    """Of the module's own parameters, those that are another stage's."""
    keys: tuple[str, ...] = module.__dict__.get(_KEYS_ATTRIBUTE, ())
    return keys


def placeholders(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All hollow parameters with their names, tied ones under each."""
    for name, module in model.named_modules():
        for key in placeholder_keys(module):
            yield f"{name}.{key}" if name else key, module.__dict__[key]


def resize_placeholders(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Makes hollow parameters look like pieces of these shapes, by name."""
    for name, hollow in list(placeholders(model)):
        if name in shapes:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner).__dict__[key] = hollow.flatten()[0].expand(*shapes[name])
