"""The forward of peft's wrappers of parameters, on shards. See [Note: factors of experts] in
`models/parameter_adapters.py`.

peft replaces the parameter by a parametrization while the wrapped module runs, which moves it out of the
module and back, and sizes the factors by the full number of experts. Here the module has an attribute with the
adapted weights meanwhile, in place of its parameter, with the experts and features of this rank.

# e experts of this rank  r rank of the adapter
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.parameter_adapters import is_wrapper
from plait.parallel.tensor.apply import own_forward, set_forward


@dataclass(frozen=True)
class AdaptedParameter:
    """Forward of a wrapper."""

    @torch.compiler.disable(recursive=False, reason="adapted weights in place of a parameter")
    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        active = [key for key in module.active_adapters if key in module.lora_A]
        if module.disable_adapters or module.merged or not active:
            return module.base_layer(*args, **kwargs)
        base, weight = module.get_base_layer(), module.get_param()
        for key in active:
            weight = _adapted(weight, module, key)
        vars(base)[module.parameter_name] = weight
        try:
            return module.base_layer(*args, **kwargs)
        finally:
            del vars(base)[module.parameter_name]


def adapt_parameters(model: nn.Module) -> None:
    """Replace the forwards of peft's wrappers of parameters."""
    for name, module in model.named_modules():
        if is_wrapper(module) and not isinstance(own_forward(name, module), AdaptedParameter):
            set_forward(module, AdaptedParameter())


def _adapted(weight: Tensor, module: Any, key: str) -> Tensor:
    """W + s B A of each expert, or of a matrix."""
    a, b = (factor[key].weight.to(weight.dtype) for factor in (module.lora_A, module.lora_B))
    if weight.ndim == 2:
        return torch.addmm(weight, b, a, alpha=module.scaling[key])
    rank = module.r[key]
    a_eri = a.unflatten(0, (-1, rank))
    b_eor = b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    if getattr(module.get_base_layer(), "is_transposed", False):
        return torch.baddbmm(weight, a_eri.mT, b_eor.mT, alpha=module.scaling[key])
    return torch.baddbmm(weight, b_eor, a_eri, alpha=module.scaling[key])
