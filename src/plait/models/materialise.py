"""Initial weights: a function of the seed and the module's name alone, the same under every plan.

[Note: how a meta model comes to life]
Parameters already lie in their final storage when this runs (`parallel/units.py` binds them); here
they are only given values. Modules are visited children first, as transformers does, because a parent
may re-initialise what its children hold (gpt2 scales its residual projections so). Before each module
the generator is seeded with a hash of (seed, the module's name), so a module's values depend on no other
module, on no rank and on no plan. Buffers of a meta model are allocated here; their module's own
initialisation fills them. Parameters and buffers are poisoned first (NaN, the least integer): what no
initialisation touched is found and named instead of being trained as garbage.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plait.errors import ModelError


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part, the same on every machine."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def seeded(device: torch.device, *parts: object) -> Iterator[None]:
    """Random numbers inside depend on `parts` alone; afterwards the generators are as they were."""
    with torch.random.fork_rng(_cuda_devices(device)):
        _seed(device, *parts)
        yield


def initialise(model: nn.Module, seed: int, device: torch.device) -> None:
    """Fills parameters and buffers of a model that was built on meta. Changes no global generator.

    Raises ModelError naming a parameter that the model's own code leaves without a value.
    """
    wide = {p: p.data for p in model.parameters() if p.dtype == torch.float64}
    for parameter, data in wide.items():  # generators draw other numbers in float64
        parameter.data = torch.empty_like(data, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(_cuda_devices(device)):
        for parameter in model.parameters():
            _poisoned(parameter)
        _visit(model, "", _initialiser_of(model), seed, device)
    for parameter, data in wide.items():
        parameter.data = data.copy_(parameter.data)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _is_poisoned(tensor):
            raise ModelError(
                "the model's own code leaves a parameter or buffer without an initial value",
                given=name,
                hint="give the module that owns it a reset_parameters(), or build the model off meta",
            )


def _visit(
    module: nn.Module, name: str, apply: Callable[[Any], None], seed: int, device: torch.device
) -> None:
    for key, child in module.named_children():
        inner = _initialiser_of(child) if isinstance(child, PreTrainedModel) else apply
        _visit(child, f"{name}.{key}" if name else key, inner, seed, device)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _poisoned(torch.empty_like(buffer, device=device))
    _seed(device, "initial weights", seed, name)
    apply(module)


def _initialiser_of(model: nn.Module) -> Callable[[Any], None]:
    """What gives a module its values: the Hugging Face model's own way, else `reset_parameters`."""
    if isinstance(model, PreTrainedModel):
        return model._init_weights
    return _reset


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _poisoned(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: Tensor) -> bool:
    """Any NaN, or integers none of which was touched. A bool cannot tell; its neighbours do."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _seed(device: torch.device, *parts: object) -> None:
    """Seeds the generators of the CPU and of `device`, and no other device's."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
